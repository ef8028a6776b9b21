"""What the two ends say to each other over their socket, and how messages travel.

Trainer to worker: :class:`Welcome` or :class:`Reject`, then :class:`Memory`, :class:`Probe` and :class:`Lend`;
:class:`News` stand on a board in shared memory, and a bare packet, the ring, says to look there. Worker to trainer:
:class:`Hello`, then :class:`Probed`, :class:`Report` and :class:`Goodbye`. All are closed msgspec types; nothing is
unpickled. The socket is a Unix ``SOCK_SEQPACKET`` one: a packet carries a serial number and a message.

A message that is larger than a packet travels in a memfd that comes with it, so that sending never has to wait for the
other end to read.

Everything here is safe against an exception (Ctrl-C) between any two steps: a packet is drained from the socket into
the inbox by one call into C, a message leaves the inbox after it was handled, and a packet that was sent twice is known
by its serial.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import socket
import stat
import struct
import termios
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Annotated, Any, NamedTuple, Union

import msgspec

from weightwire.errors import WireError
from weightwire.transport import Version
from weightwire_ipc.device import Handle
from weightwire_ipc.memory import memfd

__all__ = [
    "BURST",
    "PROTOCOL",
    "Channel",
    "Goodbye",
    "Hello",
    "Lend",
    "Memory",
    "Message",
    "News",
    "Probe",
    "Probed",
    "Reject",
    "Report",
    "SlotInfo",
    "Welcome",
    "decode_news",
    "encode_news",
    "peer_of",
]

PROTOCOL = 2
"""Grows when one end could not understand the other."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A worker introduces itself: ``joined`` is a :class:`~weightwire.transport.Joined` in the core's wire format,
    ``device`` the UUID of the device on which its weights are, empty for the host."""

    protocol: int
    joined: bytes
    device: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Report(msgspec.Struct, frozen=True, tag=True):
    """``event``: Applied or Refused, in the core's wire format."""

    event: bytes


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """The worker leaves on purpose."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Comes with two descriptors: the worker's board, and the file whose bytes are locked as leases."""

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


class News(msgspec.Struct, frozen=True):
    """All that a worker has to know; stands on its board.

    ``live``: the slots that there are, of those numbered below ``until``. A slot's memory may arrive before the news.
    """

    full: SlotInfo | None
    subset: SlotInfo | None
    live: tuple[int, ...]
    until: int


class Memory(msgspec.Struct, frozen=True, tag=True):
    """Slots that are new to the worker: number, start, size (bytes). Their descriptors come along."""

    slots: tuple[tuple[int, int, int], ...]


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Can you read this? ``digest`` is the xxh3-128 of what lies there."""

    handle: Handle
    digest: bytes


class Probed(msgspec.Struct, frozen=True, tag=True):
    """Why the worker cannot read the trainer's device memory; empty where it can. Also said later, where it cannot any
    more."""

    reason: Annotated[str, msgspec.Meta(max_length=2000)]


class Lend(msgspec.Struct, frozen=True, tag=True):
    """The device memory of a slot, exported for this worker once. It is in place of any other of that slot."""

    slot: int
    arena: int
    handle: Handle


Message = Union[Hello, Report, Goodbye, Probed, Welcome, Reject, Memory, Probe, Lend]

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_NEWS = msgspec.msgpack.Decoder(News)
_ZERO = bytes(4)

PACKET = 2048
"""Bytes of a message that still travels in the packet itself."""
LIMIT = 40 * 2**20
"""Bytes of one message: a little more than the largest event that :mod:`weightwire.wire` takes."""
BURST = 64
"""Packets taken from a socket in one go, so that nobody who talks all the time keeps the others waiting."""
MAX_FDS = 16

_PREFIX = struct.Struct("<I?")  # serial; whether the message is in the last descriptor
_RING = _PREFIX.pack(0, False)  # serials begin at 1: this one is old to everybody, and so says nothing
# Plain numbers: an enum's `&` and `|` cost as much as a system call.
_SEND = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
_END: tuple[Any, ...] = (b"", [], int(socket.MSG_CMSG_CLOEXEC), None)
_BROKEN = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """Those that came with a packet."""
    numbers = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    return list(numbers)


class _Parcel(NamedTuple):
    """A packet to be sent, with descriptors that stay the caller's and perhaps one of our own."""

    data: bytes
    fds: Sequence[int]
    outside: int

    def rights(self) -> list[tuple[int, int, array.array[int]]]:
        fds = [*self.fds, self.outside] if self.outside >= 0 else self.fds
        return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []

    def close(self) -> None:
        if self.outside >= 0:
            os.close(self.outside)


class Channel:
    """Messages over one connected socket, never blocking."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._serial = 0  # of the last packet queued
        self._done = 0  # serial of the last packet handled
        self._out: deque[_Parcel] = deque()
        self._inbox: list[tuple[bytes, list[tuple[int, int, bytes]], int, object]] = []  # what recvmsg gives
        self._receive = partial(sock.recvmsg, PACKET + _PREFIX.size, socket.CMSG_SPACE(MAX_FDS * 4), _FLAGS)
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
        outside = _in_memfd(data) if len(data) > PACKET else -1
        self._serial += 1
        prefix = _PREFIX.pack(self._serial, outside >= 0)
        self._out.append(_Parcel(prefix + (b"" if outside >= 0 else data), fds, outside))
        self.flush()

    def try_send(self, message: Message, fds: Sequence[int] = ()) -> bool:
        """Send a message now or not at all, where nothing is queued before it; whether it is gone."""
        if self._out:
            return False
        self.send(message, fds)
        gone = not self._out
        self._discard()
        return gone

    def ring(self) -> None:
        """Wake the other end, as far as it sleeps. Where its socket is full it has enough to wake up for."""
        try:
            self._sock.send(_RING, _SEND)
        except OSError:  # of a dead connection, too: that shows when reading
            return

    @property
    def unread(self) -> bool:
        """Whether something that was sent has not been read yet."""
        return bool(fcntl.ioctl(self._sock.fileno(), termios.TIOCOUTQ, _ZERO) != _ZERO)

    def widen(self, nbytes: int) -> None:
        """Let so many bytes wait for the other end to read them."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)

    def flush(self) -> bool:
        """Send what is queued, as far as the socket takes it; whether nothing is left."""
        while self._out:
            parcel = self._out[0]
            try:
                if rights := parcel.rights():
                    self._sock.sendmsg([parcel.data], rights, _SEND)
                else:
                    self._sock.send(parcel.data, _SEND)
            except BlockingIOError:
                return False
            except OSError as exc:
                if exc.errno == errno.ETOOMANYREFS:  # more descriptors under way than this user may have; later
                    return False
                self._discard()
                return True
            self._out.popleft().close()
        return True

    def _discard(self) -> None:
        while self._out:
            self._out.popleft().close()

    def drain(self, most: int = BURST) -> bool:
        """Take what the socket has, up to so many packets; whether that was all of it."""
        before = len(self._inbox)
        try:
            try:
                self._inbox.extend(islice(iter(self._receive, _END), most))
            except ConnectionResetError:  # it left without reading all of ours; what it said before is still there
                self._inbox.extend(islice(iter(self._receive, _END), most))
        except BlockingIOError:
            return True
        except OSError:
            self.ended = True
            return True
        self.ended = len(self._inbox) - before < most
        return self.ended

    def messages(self) -> Iterator[tuple[Message, list[int]]]:
        """Whole messages with their descriptors, oldest first. One is forgotten when the next is asked for.

        The descriptors are the channel's, which closes them with the message: who wants to keep one duplicates it.
        Raises :class:`~weightwire.WireError`, and ``OSError`` where there was no room for descriptors; the connection
        is then of no more use.
        """
        while self._inbox:
            packet, ancillary, flags, _ = self._inbox[0]
            if flags & socket.MSG_CTRUNC:
                os.close(os.dup(self.fileno()))  # raises where they were cut off because there is no room for more
            if len(packet) < _PREFIX.size or flags & _BROKEN:
                raise WireError(f"a packet of {len(packet)} bytes is malformed")
            serial, elsewhere = _PREFIX.unpack_from(packet)
            fds = _descriptors(ancillary) if ancillary else []
            if serial > self._done:
                if elsewhere and fds:
                    yield _decode(_from_memfd(fds[-1])), fds[:-1]
                else:
                    yield _decode(packet[_PREFIX.size :]), fds
                self._done = serial
            del self._inbox[0]
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Close the socket, and descriptors that came with messages nobody has handled."""
        inbox, self._inbox = self._inbox, []
        self._discard()
        self._sock.close()
        for _, ancillary, _, _ in inbox:
            for fd in _descriptors(ancillary):
                os.close(fd)

    def detach(self) -> int:
        """The bare descriptor, for a forked child to close."""
        return self._sock.detach()


def _in_memfd(data: bytes) -> int:
    fd = memfd("weightwire-message")
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(data)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _from_memfd(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    if not stat.S_ISREG(os.fstat(fd).st_mode) or size > LIMIT:
        raise WireError(f"a message of {size} bytes, at most {LIMIT} are taken")
    try:
        return os.pread(fd, size, 0)
    except OSError as exc:
        raise WireError(f"a message came in a file that cannot be read: {exc.strerror}") from exc


def encode_news(news: News) -> bytes:
    """For the board."""
    return _ENCODER.encode(news)


def decode_news(data: bytes) -> News:
    """From the board. Raises :class:`~weightwire.WireError`."""
    try:
        return _NEWS.decode(data)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as exc:
        raise WireError(f"news of {len(data)} bytes are malformed: {exc}") from exc


def _decode(data: bytes) -> Message:
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as exc:
        raise WireError(f"a message of {len(data)} bytes is malformed: {exc}") from exc


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Pid and uid of the process at the other end, from the kernel."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid
