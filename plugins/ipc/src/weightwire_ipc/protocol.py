"""What the two ends say to each other over their socket, and how messages are cut into packets.

Trainer to worker: :class:`Welcome` or :class:`Reject`, then :class:`News`. Worker to trainer: :class:`Hello`, then
:class:`Report` and :class:`Goodbye`. All are closed msgspec types; nothing is unpickled. The socket is a Unix
``SOCK_SEQPACKET`` one: each packet carries a serial number, a "more" flag and a piece of a message.

Everything here is safe against an exception (Ctrl-C) between any two steps: a packet is drained from the socket into
the inbox by one call into C, a message leaves the inbox after it was handled, and a packet that was sent twice is known
by its serial.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Union

import msgspec

from weightwire.errors import WireError
from weightwire.transport import Version

__all__ = [
    "PROTOCOL",
    "Channel",
    "Goodbye",
    "Hello",
    "Message",
    "News",
    "Reject",
    "Report",
    "SlotInfo",
    "Welcome",
    "peer_of",
]

PROTOCOL = 1
"""Grows when one end could not understand the other."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A worker introduces itself: ``joined`` is a :class:`~weightwire.transport.Joined` in the core's wire format."""

    protocol: int
    joined: bytes


class Report(msgspec.Struct, frozen=True, tag=True):
    """``event``: Applied or Refused, in the core's wire format."""

    event: bytes


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """The worker leaves on purpose."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Comes with two descriptors: the control page and the file whose bytes are locked as leases."""

    epoch: int
    lane: int


class Reject(msgspec.Struct, frozen=True, tag=True):
    """The trainer does not take this worker; ``kind`` is ``"name"`` or ``"protocol"``."""

    kind: str
    reason: str


class SlotInfo(msgspec.Struct, frozen=True, array_like=True):
    """A version and the slot that holds it: header area up to byte ``start``, payload from there."""

    stamp: Version
    base: Version | None
    slot: int
    start: int
    size: int


class News(msgspec.Struct, frozen=True, tag=True):
    """All that a worker has to know; the latest one counts. ``attached``: the slots whose descriptors come along."""

    full: SlotInfo | None
    subset: SlotInfo | None
    live: tuple[int, ...]
    attached: tuple[int, ...]


Message = Union[Hello, Report, Goodbye, Welcome, Reject, News]

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)

CHUNK = 32 * 1024
LIMIT = 40 * 2**20
"""Bytes of one message: a little more than the largest event that :mod:`weightwire.wire` takes."""
BURST = 64
"""Packets taken from a socket in one go, so that nobody who talks all the time keeps the others waiting."""
MAX_FDS = 16

_PREFIX = struct.Struct("<I?")  # serial, more
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
_END: tuple[Any, ...] = (b"", [], socket.MSG_CMSG_CLOEXEC, None)
_BROKEN = socket.MSG_TRUNC | socket.MSG_CTRUNC


class _Packet(NamedTuple):
    """What ``recvmsg`` gives."""

    data: bytes
    ancillary: list[tuple[int, int, bytes]]
    flags: int
    address: object

    @property
    def serial(self) -> int:
        return int(_PREFIX.unpack_from(self.data)[0])

    @property
    def more(self) -> bool:
        return bool(_PREFIX.unpack_from(self.data)[1])

    def fds(self) -> list[int]:
        numbers = array.array("i")
        for level, kind, data in self.ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
        return list(numbers)


class Channel:
    """Messages over one connected socket, never blocking."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._serial = 0  # of the last packet queued
        self._done = 0  # serial of the last packet handled
        self._out: deque[tuple[bytes, Sequence[int]]] = deque()
        self._inbox: list[Any] = []
        self._receive = partial(sock.recvmsg, CHUNK + _PREFIX.size, socket.CMSG_SPACE(MAX_FDS * 4), _FLAGS)
        self.ended = False
        """Whether the other end is gone; what it said before can still be read."""

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def idle(self) -> bool:
        """Whether everything that was sent is with the kernel."""
        return not self._out

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Queue a message and send as much as the socket takes. Errors of a dead connection show when reading."""
        data = _ENCODER.encode(message)
        if len(data) <= CHUNK:
            self._queue(data, False, fds)
        else:
            for start in range(0, len(data), CHUNK):
                self._queue(data[start : start + CHUNK], start + CHUNK < len(data), () if start else fds)
        self.flush()

    def try_send(self, message: Message, fds: Sequence[int] = ()) -> bool:
        """Send a small message now or not at all, where nothing is queued before it; whether it is gone."""
        if self._out:
            return False
        self.send(message, fds)
        gone = not self._out
        self._out.clear()
        return gone

    def widen(self, nbytes: int) -> None:
        """Let so many bytes wait for the other end to read them."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)

    def _queue(self, piece: bytes, more: bool, fds: Sequence[int]) -> None:
        self._serial += 1
        self._out.append((_PREFIX.pack(self._serial, more) + piece, fds))

    def flush(self) -> bool:
        """Send what is queued, as far as the socket takes it; whether nothing is left."""
        while self._out:
            data, fds = self._out[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                self._sock.sendmsg([data], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except OSError as exc:
                if exc.errno == errno.ETOOMANYREFS:  # more descriptors under way than this user may have; later
                    return False
                self._out.clear()
                return True
            if self._out:
                self._out.popleft()
        return True

    def drain(self) -> None:
        """Take what the socket has, up to a burst."""
        before = len(self._inbox)
        try:
            try:
                self._inbox.extend(islice(iter(self._receive, _END), BURST))
            except ConnectionResetError:  # it left without reading all of ours; what it said before is still there
                self._inbox.extend(islice(iter(self._receive, _END), BURST))
        except BlockingIOError:
            return
        except OSError:
            self.ended = True
            return
        self.ended = len(self._inbox) - before < BURST

    def messages(self) -> Iterator[tuple[Message, list[int]]]:
        """Whole messages with their descriptors, oldest first. One is forgotten when the next is asked for.

        Raises :class:`~weightwire.WireError`; the connection is then of no more use.
        """
        while count := self._whole():
            packets = [_Packet(*raw) for raw in self._inbox[:count]]
            fresh = {packet.serial: packet for packet in packets if packet.serial > self._done}
            if fresh:
                yield _decode(fresh), [fd for packet in fresh.values() for fd in packet.fds()]
                self._done = packets[-1].serial
            del self._inbox[:count]

    def _whole(self) -> int:
        """How many packets in the inbox make up the next message; 0: it is not complete yet."""
        size = 0
        for count, raw in enumerate(self._inbox, 1):
            data, _, flags, _ = raw
            size += len(data)
            if len(data) < _PREFIX.size or flags & _BROKEN or size > LIMIT:
                raise WireError(f"a packet of {len(data)} bytes (message of {size}) is malformed or too large")
            if not _PREFIX.unpack_from(data)[1]:
                return count
        return 0

    def close(self) -> None:
        """Close the socket, and descriptors that came with messages nobody has handled."""
        inbox, self._inbox = self._inbox, []
        self._out.clear()
        self._sock.close()
        for raw in inbox:
            for fd in _Packet(*raw).fds():
                os.close(fd)

    def detach(self) -> int:
        """The bare descriptor, for a forked child to close."""
        return self._sock.detach()


def _decode(packets: dict[int, _Packet]) -> Message:
    data = b"".join([packet.data[_PREFIX.size :] for packet in packets.values()])
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as exc:
        raise WireError(f"a message of {len(data)} bytes is malformed: {exc}") from exc


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Pid and uid of the process at the other end, from the kernel."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid
