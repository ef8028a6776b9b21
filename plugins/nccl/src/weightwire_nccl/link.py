"""How messages, and chunks of payloads, travel: four bytes of length, one byte of kind, and the rest.

A frame that is malformed, or longer than may be at that moment, ends its connection.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from weightwire.errors import WireError
from weightwire_nccl.messages import decode, encode

if TYPE_CHECKING:
    from weightwire_nccl.messages import Message

__all__ = ["CHUNK", "LIMIT", "SHY", "TERSE", "Chunk", "Link"]

CHUNK = 1 << 20
"""Bytes of a chunk, at most."""
LIMIT = 40 << 20
"""Bytes of a frame: a little more than the largest header or event that :mod:`weightwire.wire` takes."""
SHY = 1 << 10
"""Bytes of a frame from a worker that has not proved anything yet."""
TERSE = 16 << 10
"""The same from somebody who may be the trainer: it has to be able to say why it does not want us."""
UNREAD = 20_000
"""Messages that wait to be read by the other end, at most."""
BURST = 4 << 20
"""Bytes taken from a socket in one go, so that nobody who talks all the time keeps the others waiting."""

_PREFIX = struct.Struct("<IB")
_CHUNK = struct.Struct("<QQ")
_MESSAGE_KIND, _CHUNK_KIND = 0, 1
_READ = 256 << 10


class Chunk(NamedTuple):
    """A part of a payload. ``data`` is valid until the next frame is asked for."""

    round: int
    start: int
    data: memoryview


class Link:
    """Frames over one connected stream socket, never blocking.

    ``send`` only queues, and may be called from any thread; ``flush`` and ``frames`` belong to one thread.
    """

    def __init__(self, sock: socket.socket, limit: int) -> None:
        sock.setblocking(False)
        self._sock = sock
        self.limit = limit
        """Bytes of the frames that are taken."""
        # A listener for both families knows IPv4 addresses by another name, under which no engine finds them.
        self.host: str = sock.getsockname()[0].removeprefix("::ffff:")
        """This end's address."""
        self.other: str = sock.getpeername()[0].removeprefix("::ffff:")
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
        """Queue a message. Who asks for ever more and reads nothing is hung up on."""
        if len(self._out) > UNREAD:
            self.ended = True
            return
        data = encode(message)
        self._out.append(memoryview(_PREFIX.pack(len(data), _MESSAGE_KIND) + data))

    def send_chunk(self, round_: int, start: int, data: memoryview) -> None:
        """Queue a chunk; its memory must stay as it is until the link is idle."""
        if len(self._out) > UNREAD:
            self.ended = True
            return
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
                    message = decode(frame)
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
