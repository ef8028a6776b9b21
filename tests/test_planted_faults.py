"""Every fault that a backend may have is caught by a named case of the kit, and a right backend passes that case.

The backend is ``planted/``: right, but for one method that the fault replaces. Each fault has a suite of its own, of
which just the case is run that is to catch it; the tests here read what came out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

PLANTED = Path(__file__).with_name("planted")


class Caught(NamedTuple):
    """By which case of the kit, and what that says."""

    case: str
    said: str
    endpoint: str = "import:planted"
    right: str = "passed"  # how it ends over a right backend


CLAIMS = "import:planted_claims"

CATCHES = {
    "commits before data": Caught("test_reader_never_sees_a_mix[copy]", "a mix of versions"),
    "carries no digest": Caught("test_digest_catches_a_flipped_bit", "DID NOT RAISE DigestError"),
    "flips a bit": Caught("test_special_values", "assert "),
    "drops zero-size tensors": Caught("test_shapes_and_strides[(0, 8)]", "dense.float32"),
    "unties": Caught("test_tied_tensors_travel_once", "frozenset({"),
    "reorders tensors": Caught("test_all_dtypes_in_one_state", "assert "),
    "shares the trainer's memory": Caught(
        "test_trainer_changes_tensors_after_push[in place]", "assert ", "import:planted_inline"
    ),
    "reorders events": Caught("test_worker_comes_back_under_its_name", "version 2 in phase wait: not applied"),
    "goes back a version": Caught("test_late_joiner_gets_the_newest", "assert 4 == 5"),
    "old bytes under a new number": Caught("test_hooks_run_once_after_all_tensors", "(2, 1)"),
    "forgets subsets": Caught("test_late_joiner_takes_full_version_and_subset", "assert 1 == 2"),
    "hands out a subset without its full version": Caught(
        "test_subset_on_top_of_a_missed_full_version", "push a full one"
    ),
    "loses what was accepted before close": Caught("test_versions_accepted_before_close_arrive", "assert [] == [1]"),
    "acknowledges early": Caught("test_deadline_names_who_is_missing", "DID NOT RAISE WaitTimeout"),
    "says staged before the worker has it": Caught("test_staged_needs_no_trainer", "waited 5 s for its first"),
    "swallows a worker's error": Caught("test_late_failure_is_told_once", "DID NOT RAISE PushError"),
    "swallows an error of the trainer's": Caught("test_source_fails_while_it_is_read", "not staged after"),
    "ignores the deadline of events": Caught("test_no_worker_at_all", "at most 3.0 s are fine"),
    "ignores the deadline of poll": Caught("test_pull_before_there_is_a_trainer", "at most 3.0 s are fine"),
    "never says goodbye": Caught("test_worker_learns_that_the_trainer_closed", "the worker learns that it is over"),
    "answers for a dead worker": Caught("test_lost_worker_may_be_dropped", "() == ('victim',)"),
    "serves two workers of one name": Caught("test_second_live_worker_of_one_name", "DID NOT RAISE EndpointInUseError"),
    "lets two updaters have a place": Caught("test_second_updater_on_one_place", "DID NOT RAISE EndpointInUseError"),
    "claims alias falsely": Caught("test_kept_views_are_not_overwritten", "assert "),
    "claims late_join falsely": Caught("test_worker_comes_back_under_its_name", "has pushed none that it can take"),
    "claims subset_workers falsely": Caught("test_push_to_some_workers", "long enough for what should not come"),
    "claims hosts falsely": Caught("test_worker_elsewhere", "there is no trainer at", CLAIMS, "skipped"),
    "claims sharded_target falsely": Caught("test_sharded_target", "bytes for a half of", CLAIMS),
    "leaks a descriptor a push": Caught("test_a_thousand_pushes_of_which_fifty_fail", "file descriptors leak"),
    "keeps every version": Caught("test_a_thousand_pushes_of_which_fifty_fail", "resident memory leaks"),
    "listens on all interfaces": Caught("test_nothing_listens_where_others_can_connect", "address='00000000:"),
    "unpickles": Caught("test_a_pickle_is_never_loaded", "/loaded')] == []"),
    "lets one silent caller stop it": Caught("test_connections_that_say_nothing", "has pushed none that it can take"),
}

SHARES = 3
"""Runs beside each other: much of a fault is waiting for what does not come."""

SUITE = """
class Test{number}(BackendSuite):
    endpoint = {endpoint!r}
    options = {options!r}
"""

NOTES = '''
"""Writes down how each case ended and what it said."""

import json
import os
from pathlib import Path

from weightwire.testing import rig

rig.TIMEOUT = 5.0  # seconds; half of what it is, for what never comes
ended = {}


def pytest_runtest_logreport(report):
    if report.when == "call" or not report.passed:
        ended[report.nodeid.partition("::")[2]] = (report.outcome, report.longreprtext)


def pytest_sessionfinish():
    Path(os.environ["ENDED"]).write_text(json.dumps(ended))
'''


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """How each case ended, by suite and case: ``Test3`` has the fault number 3, ``Test3Right`` none."""
    folder = tmp_path_factory.mktemp("planted")
    suites, nodes = ["from weightwire.testing import BackendSuite\n"], {}
    for number, (fault, caught) in enumerate(CATCHES.items()):
        suites.append(SUITE.format(number=number, endpoint=caught.endpoint, options={"fault": fault}))
        nodes[f"Test{number}::{caught.case}"] = None
    rights: dict[str, set[str]] = {}
    for caught in CATCHES.values():
        rights.setdefault(right(caught.endpoint), set()).add(caught.case)
    for endpoint, cases in rights.items():
        name = suite_of(endpoint)
        suites.append(SUITE.format(number=name, endpoint=endpoint, options={}))
        nodes.update(dict.fromkeys(f"Test{name}::{case}" for case in sorted(cases)))
    (folder / "test_all.py").write_text("".join(suites))
    (folder / "conftest.py").write_text(NOTES)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --timeout=120\n")
    with tempfile.TemporaryDirectory(prefix="planted-") as private:  # short, and nobody else's
        runs = [run_cases(folder, private, str(share), list(nodes)[share::SHARES]) for share in range(SHARES)]
        try:
            said = "".join(run.communicate(timeout=600)[0] for run in runs)
        finally:
            for run in runs:
                run.kill()
                run.wait(10)
    found: dict[str, tuple[str, str]] = {}
    for share in range(SHARES):
        assert (folder / str(share)).exists(), said
        found.update(json.loads((folder / str(share)).read_text()))
    assert set(found) == set(nodes), said
    return found


def run_cases(folder: Path, private: str, share: str, nodes: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"test_all.py::{node}" for node in nodes)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PLANTED), "XDG_RUNTIME_DIR": private, "ENDED": str(folder / share)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def right(endpoint: str) -> str:
    """Where the same is right."""
    return "import:planted" if endpoint == CLAIMS else endpoint


def suite_of(endpoint: str) -> str:
    return "Right" + endpoint.rpartition(":")[2].title().replace("_", "")


@pytest.mark.timeout(700)
@pytest.mark.parametrize("fault", CATCHES)
def test_the_fault_is_caught(fault: str, ended: dict[str, tuple[str, str]]) -> None:
    case, said, endpoint, expected = CATCHES[fault]
    outcome, text = ended[f"Test{list(CATCHES).index(fault)}::{case}"]
    assert outcome == "failed", f"{case} let it pass"
    assert said in text, text
    outcome, text = ended[f"Test{suite_of(right(endpoint))}::{case}"]
    assert outcome == expected, text


def test_every_planted_fault_is_tried() -> None:
    run = subprocess.run(
        [sys.executable, "-c", "import json, planted_faults; print(json.dumps(list(planted_faults.FAULTS)))"],
        env={**os.environ, "PYTHONPATH": str(PLANTED)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert set(json.loads(run.stdout)) == set(CATCHES)
