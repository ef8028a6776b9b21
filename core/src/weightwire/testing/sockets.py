"""Which sockets this process listens on, as the kernel tells (Linux only)."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["Listener", "listeners"]


@dataclass(frozen=True)
class Listener:
    """``kind`` is ``"unix"``, ``"tcp"`` or ``"tcp6"``; ``type`` is the number of ``SOCK_STREAM`` and so on."""

    kind: str
    type: int
    address: str

    def found(self, directory: Path) -> Listener:
        """The same with the path that its file has below ``directory``: it may have been bound by another way to it."""
        name = Path(self.address).name
        path = next((path for path in directory.rglob("*") if path.name == name), None) if self.kind == "unix" else None
        return replace(self, address=str(path)) if path else self

    @property
    def private(self) -> bool:
        """Whether nobody but this user (or, over TCP, nobody beyond this machine) can connect."""
        if self.kind == "unix":
            path = Path(self.address)
            return path.is_socket() and path.stat().st_mode & 0o077 == 0 and path.parent.stat().st_mode & 0o077 == 0
        return self.address.startswith(
            ("0100007F:", "00000000000000000000000001000000:", "0000000000000000FFFF00000100007F:")
        )


def listeners() -> list[Listener]:
    """The listening sockets of this process."""
    return [*_unix(_inodes()), *_tcp(_inodes())]


def _inodes() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found


def _unix(mine: set[str]) -> list[Listener]:
    rows = [line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    accepting = 1 << 16  # __SO_ACCEPTCON of the kernel's net.h
    return [
        Listener("unix", int(row[4], 16), row[7].strip() if len(row) > 7 else "")
        for row in rows
        if row[6] in mine and int(row[3], 16) & accepting
    ]


def _tcp(mine: set[str]) -> list[Listener]:
    found = []
    for kind in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            rows = [line.split() for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
            found += [Listener(kind, 1, row[1]) for row in rows if row[9] in mine and row[3] == "0A"]  # TCP_LISTEN
    return found
