"""What the two ends say to each other over the control socket: closed types, in msgpack; nothing is unpickled.

The trainer speaks first: :class:`Challenge`, :class:`Proof`, :class:`Accepted`, :class:`Hello`. A push is then
:class:`Plan`, :class:`Ready` (from everybody who is awake), :class:`Go`, the broadcast itself in the engine's sockets,
:class:`Got`, and :class:`Done`, which brings the header. A round that fails ends with :class:`Abort`. A worker
that joins late or falls behind gets :class:`Parcel`, chunks, :class:`Done`. One that streams gets :class:`Offer`, and
chunks for each :class:`Fetch`.
"""

from __future__ import annotations

from typing import Union

import msgspec

from weightwire.errors import WireError
from weightwire.transport import Version

__all__ = [
    "PROTOCOL",
    "Abort",
    "Accepted",
    "Add",
    "Added",
    "Challenge",
    "Done",
    "Drop",
    "Fetch",
    "Go",
    "Goodbye",
    "Got",
    "Hello",
    "Key",
    "Message",
    "Offer",
    "Parcel",
    "Ping",
    "Plan",
    "Pong",
    "Proof",
    "Ready",
    "Reject",
    "Report",
    "Trouble",
    "decode",
    "encode",
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
    """The trainer does not take this worker; ``kind`` is ``"name"``, ``"token"``, ``"protocol"`` or ``"stream"``."""

    kind: str
    reason: str


class Hello(_Message, frozen=True):
    """``joined`` is a :class:`~weightwire.transport.Joined` in the core's wire format. ``device``: the GPU on which the
    worker stages, as a label that is the same for all who share it; empty for the CPU. ``streams``: it stages nothing,
    and fetches what it is offered."""

    joined: bytes
    device: str
    streams: bool = False


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


class Offer(_Message, frozen=True):
    """A version that a worker which streams may fetch."""

    round: int
    header: bytes


class Fetch(_Message, frozen=True):
    """Bytes ``start`` to ``stop`` of what was offered in a round, please; they come as chunks of round ``ticket``. None
    at all: no more of it."""

    round: int
    ticket: int
    start: int
    stop: int


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
    Offer,
    Fetch,
    Key,
    Add,
    Added,
    Ping,
    Pong,
    Report,
    Goodbye,
]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)

encode = _ENCODER.encode


def decode(frame: memoryview) -> Message:
    """Raises :class:`~weightwire.WireError`."""
    try:
        return _DECODER.decode(frame)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as exc:
        raise WireError(f"a message of {len(frame)} bytes is malformed: {exc}") from exc
