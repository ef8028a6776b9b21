"""What the two ends say to each other over the control socket, and how it travels.

Frames: four bytes of length, one byte of kind, and either a msgpack message of a closed type or a chunk of a payload.
Nothing is unpickled; a frame that is malformed, or longer than may be at that moment, ends its connection.

The trainer speaks first: :class:`Challenge`, :class:`Proof`, :class:`Accepted`, :class:`Hello`. A push is then
:class:`Plan`, :class:`Ready` (from everybody who is awake), :class:`Go`, the broadcast itself in the engine's sockets,
:class:`Got`, and :class:`Done`, which brings the header. A round that fails ends with :class:`Abort`. A worker
that joins late or falls behind gets :class:`Parcel`, chunks, :class:`Done`.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, Union

import msgspec

from weightwire.errors import WireError
from weightwire.transport import Version

__all__ = [
    "CHUNK",
    "LIMIT",
    "PROTOCOL",
    "SHY",
    "Abort",
    "Accepted",
    "Add",
    "Added",
    "Challenge",
    "Chunk",
    "Done",
    "Drop",
    "Go",
    "Goodbye",
    "Got",
    "Hello",
    "Key",
    "Link",
    "Message",
    "Parcel",
    "Ping",
    "Plan",
    "Pong",
    "Proof",
    "Ready",
    "Reject",
    "Report",
    "Trouble",
]

PROTOCOL = 1
"""Grows when one end could not understand the other."""


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Challenge(_Message, frozen=True):
    """Trainer: who are you? ``guarded``: whether a token is asked for."""

    protocol: int
    nonce: bytes
    guarded: bool


class Proof(_Message, frozen=True):
    """Worker: I know the token; now you."""

    protocol: int
    nonce: bytes
    proof: bytes


class Accepted(_Message, frozen=True):
    """Trainer: so do I; go on with your hello."""

    proof: bytes
    epoch: int


class Reject(_Message, frozen=True):
    """The trainer does not take this worker; ``kind`` is ``"name"``, ``"token"`` or ``"protocol"``."""

    kind: str
    reason: str


class Hello(_Message, frozen=True):
    """``joined`` is a :class:`~weightwire.transport.Joined` in the core's wire format. ``device``: the GPU on which the
    worker stages, as a label that is the same for all who share it; empty for the CPU."""

    joined: bytes
    device: str


class Plan(_Message, frozen=True):
    """A version is about to be broadcast: get ready. ``stops``: where each bucket ends, in bytes of the payload."""

    round: int
    stamp: Version
    base: Version | None
    nbytes: int
    stops: tuple[int, ...]
    engine: str


class Ready(_Message, frozen=True):
    """The worker is awake and has memory for the version."""

    round: int


class Go(_Message, frozen=True):
    """Take part. A generation that is new is a group to be made, of ``size`` members, of which the trainer is 0."""

    round: int
    generation: int
    rank: int
    size: int
    algorithm: str
    timeout: float


class Got(_Message, frozen=True):
    """All bytes of the round are there."""

    round: int


class Trouble(_Message, frozen=True):
    """The worker cannot go on with a round."""

    round: int
    reason: str


class Done(_Message, frozen=True):
    """The header of the version, which is whole with it. ``more``: a subset on it follows at once."""

    round: int
    header: bytes
    more: bool = False


class Abort(_Message, frozen=True):
    """A round is off, and the generation that took part in it (0: none) with it."""

    round: int
    generation: int


class Drop(_Message, frozen=True):
    """A generation will not be used any more."""

    generation: int


class Parcel(_Message, frozen=True):
    """A version comes in chunks over this socket."""

    round: int
    stamp: Version
    base: Version | None
    nbytes: int


class Key(_Message, frozen=True):
    """A member of a generation has set a key; everybody in it is told."""

    generation: int
    key: str
    value: bytes


class Add(_Message, frozen=True):
    """Add to a number that the generation shares; answered by :class:`Added`."""

    serial: int
    generation: int
    key: str
    amount: int


class Added(_Message, frozen=True):
    serial: int
    value: int


class Ping(_Message, frozen=True):
    """Are you awake?"""


class Pong(_Message, frozen=True):
    """Yes."""


class Report(_Message, frozen=True):
    """``event``: Staged, Applied or Refused, in the core's wire format."""

    event: bytes


class Goodbye(_Message, frozen=True):
    """Whoever says it leaves on purpose."""


Message = Union[
    Challenge,
    Proof,
    Accepted,
    Reject,
    Hello,
    Plan,
    Ready,
    Go,
    Got,
    Trouble,
    Done,
    Abort,
    Drop,
    Parcel,
    Key,
    Add,
    Added,
    Ping,
    Pong,
    Report,
    Goodbye,
]


class Chunk(NamedTuple):
    """A part of a payload. ``data`` is valid until the next frame is asked for."""

    round: int
    start: int
    data: memoryview


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)

CHUNK = 1 << 20
"""Bytes of a chunk, at most."""
LIMIT = 40 << 20
"""Bytes of a frame: a little more than the largest header or event that :mod:`weightwire.wire` takes."""
SHY = 1 << 10
"""Bytes of a frame from somebody who has not proved anything yet."""
BURST = 4 << 20
"""Bytes taken from a socket in one go, so that nobody who talks all the time keeps the others waiting."""

_PREFIX = struct.Struct("<IB")
_CHUNK = struct.Struct("<QQ")
_MESSAGE_KIND, _CHUNK_KIND = 0, 1
_READ = 256 << 10


class Link:
    """Frames over one connected stream socket, never blocking.

    ``send`` only queues, and may be called from any thread; ``flush`` and ``frames`` belong to one thread.
    """

    def __init__(self, sock: socket.socket, limit: int) -> None:
        sock.setblocking(False)
        self._sock = sock
        self.limit = limit
        """Bytes of the frames that are taken."""
        self.host: str = sock.getsockname()[0]
        """This end's address."""
        self.other: str = sock.getpeername()[0]
        """The other end's."""
        self._in = bytearray()
        self._out: deque[memoryview] = deque()
        self.ended = False
        """Whether the other end is gone; what it said before can still be read."""

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def idle(self) -> bool:
        """Whether everything that was sent is with the kernel."""
        return not self._out

    def send(self, message: Message) -> None:
        """Queue a message."""
        data = _ENCODER.encode(message)
        self._out.append(memoryview(_PREFIX.pack(len(data), _MESSAGE_KIND) + data))

    def send_chunk(self, round_: int, start: int, data: memoryview) -> None:
        """Queue a chunk; its memory must stay as it is until the link is idle."""
        head = _PREFIX.pack(_CHUNK.size + data.nbytes, _CHUNK_KIND) + _CHUNK.pack(round_, start)
        self._out.extend((memoryview(head), data))

    def flush(self) -> bool:
        """Send what is queued, as far as the socket takes it; whether nothing is left."""
        while self._out:
            part = self._out[0]
            try:
                sent = self._sock.send(part)
            except BlockingIOError:
                return False
            except OSError:  # shows when reading, too; what it has said is still to be read
                self._out.clear()
                return True
            if sent == part.nbytes:
                self._out.popleft()
            else:
                self._out[0] = part[sent:]
        return True

    def frames(self) -> Iterator[Message | Chunk]:
        """What has come, oldest first, up to a burst. Raises :class:`~weightwire.WireError`."""
        taken = 0
        while taken < BURST and not self.ended:
            try:
                data = self._sock.recv(_READ)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.ended = True
                return
            taken += len(data)
            self._in += data
            yield from self._whole()

    def _whole(self) -> Iterator[Message | Chunk]:
        at = 0
        try:
            while len(self._in) - at >= _PREFIX.size:
                length, kind = _PREFIX.unpack_from(self._in, at)
                if length > self.limit or kind > _CHUNK_KIND:
                    raise WireError(f"a frame of kind {kind} and {length} bytes; at most {self.limit} are taken")
                begin = at + _PREFIX.size
                if len(self._in) - begin < length:
                    return
                at = begin + length
                with memoryview(self._in) as view, view[begin:at] as frame:
                    if kind == _CHUNK_KIND:
                        chunk = _chunk(frame)
                        try:
                            yield chunk
                        finally:
                            chunk.data.release()
                        continue
                    message = _decode(frame)
                yield message
        finally:
            del self._in[:at]

    def close(self) -> None:
        self._out.clear()
        self._sock.close()

    def detach(self) -> int:
        """The bare descriptor, for a forked child to close."""
        return self._sock.detach()


def _chunk(frame: memoryview) -> Chunk:
    if len(frame) < _CHUNK.size:
        raise WireError(f"a chunk of {len(frame)} bytes is malformed")
    round_, start = _CHUNK.unpack_from(frame)
    return Chunk(round_, start, frame[_CHUNK.size :])


def _decode(frame: memoryview) -> Message:
    try:
        return _DECODER.decode(frame)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as exc:
        raise WireError(f"a message of {len(frame)} bytes is malformed: {exc}") from exc
