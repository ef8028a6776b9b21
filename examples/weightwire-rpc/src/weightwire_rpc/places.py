"""Who has which place: kept by the group's first member, where these functions are called."""

from __future__ import annotations

import threading

from weightwire_rpc import group

__all__ = ["find", "give_up", "take"]

_lock = threading.Lock()
_holders: dict[str, tuple[str, int]] = {}  # place -> the trainer's name in the group, its epoch
_epochs: dict[str, int] = {}  # place -> the newest epoch there ever was


def take(place: str, name: str, floor: int) -> int | str:
    """The new epoch, or who has the place."""
    with _lock:
        holder = _holders.get(place)
    if holder is not None:
        try:
            if group.call(holder[0], lives, place, holder[1], timeout=2.0):
                return holder[0]
        except group.Unreachable:
            pass  # it died with it
    with _lock:
        if _holders.get(place) != holder:
            return "another process, a moment ago"
        epoch = max(floor, _epochs.get(place, 0) + 1)
        _holders[place], _epochs[place] = (name, epoch), epoch
    return epoch


def find(place: str) -> tuple[str, int] | None:
    """The trainer's name in the group, and its epoch."""
    return _holders.get(place)


def give_up(place: str, epoch: int) -> None:
    with _lock:
        if _holders.get(place, ("", 0))[1] == epoch:
            del _holders[place]


def lives(place: str, epoch: int) -> bool:
    """Asked of the holder."""
    from weightwire_rpc.sender import here

    sender = here.get(place)
    return sender is not None and sender.epoch == epoch
