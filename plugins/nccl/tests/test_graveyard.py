"""Groups that failed are let go when their works have ended, whoever has been closed meanwhile."""

from __future__ import annotations

import os
import weakref
from typing import Any, ClassVar

import pytest

from weightwire_nccl.works import Graveyard


class Group:
    """As far as a graveyard knows one."""

    patience = 0.0
    leaked: ClassVar[list[Group]] = []

    def abort(self) -> None: ...

    def leak(self) -> None:
        self.leaked.append(self)


class Works:
    ended = False


def buried(graveyard: Graveyard) -> tuple[weakref.ref[Group], Works]:
    group: Any = Group()
    works: Any = Works()
    graveyard.bury(group, works, bytearray(8))
    return weakref.ref(group), works


def test_one_that_is_closed_leaves_its_groups_to_the_next() -> None:
    first = Graveyard()
    group, works = buried(first)
    first.close(0.0)
    Graveyard().sweep()
    assert group() is not None, "its works go on"
    assert not Group.leaked
    works.ended = True
    Graveyard()
    assert group() is None


def test_until_its_works_have_ended_a_group_stays_with_its_own() -> None:
    graveyard = Graveyard()
    group, works = buried(graveyard)
    graveyard.sweep()
    assert group() is not None
    works.ended = True
    graveyard.sweep()
    assert group() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_in_a_forked_child_nothing_is_destroyed() -> None:
    """Gloo's destructors would wait for threads that are not there."""
    first = Graveyard()
    group, works = buried(first)
    first.close(0.0)
    works.ended = True
    child = os.fork()
    if child == 0:
        Graveyard()
        found = group()
        os._exit(Group.leaked != [found])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    Graveyard()
    assert group() is None
