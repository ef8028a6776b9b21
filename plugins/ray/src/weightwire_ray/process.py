"""Whether a process of this machine lives: asked of the kernel, which also knows of those that are only stopped."""

from __future__ import annotations

__all__ = ["gone", "started", "stopped"]


def started(pid: int) -> int:
    """When a process was started, in clock ticks since boot: with the pid, who it is. 0 where that is not known."""
    fields = _fields(pid)
    return int(fields[19]) if fields else 0


def gone(pid: int, since: int) -> bool:
    """Whether the process that was started then has ended. One that is stopped (SIGSTOP) has not."""
    fields = _fields(pid)
    return not fields or int(fields[19]) != since or fields[0] in "ZX"


def stopped(pid: int) -> bool:
    """Whether a process stands still (SIGSTOP, a debugger) and will go on."""
    return _fields(pid)[:1] in (["T"], ["t"])


def _fields(pid: int) -> list[str]:
    """The fields of ``/proc/<pid>/stat`` from the state on; empty where there is none, or no ``/proc``."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()
    except OSError:
        return []
