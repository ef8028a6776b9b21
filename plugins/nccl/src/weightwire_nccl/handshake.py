"""Who is who, before anything else is said: the trainer asks, both prove, the worker introduces itself.

Pure: what each side answers to what it is told. :mod:`weightwire_nccl.secret` has the proofs.
"""

from __future__ import annotations

from weightwire import wire
from weightwire.errors import CapabilityError, EndpointError, EndpointInUseError, WeightwireError, WireError
from weightwire.transport import Joined
from weightwire_nccl import secret
from weightwire_nccl.messages import PROTOCOL, Accepted, Challenge, Hello, Proof, Reject

__all__ = ["Doorman", "Refusal", "Visitor", "introduced"]


class Refusal(Exception):
    """One side wants nothing of the other. ``kind`` is the error that the worker's user is to see."""

    def __init__(self, kind: type[WeightwireError], reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


_VERSIONS = "install one version of weightwire-nccl on all sides"


class Doorman:
    """The trainer's side."""

    def __init__(self, token: bytes, epoch: int) -> None:
        self._token = token
        self._epoch = epoch

    def challenge(self, nonce: bytes) -> Challenge:
        return Challenge(PROTOCOL, nonce, bool(self._token))

    def answer(self, nonce: bytes, proof: Proof) -> Accepted | Reject:
        """To who was asked with this nonce."""
        if proof.protocol != PROTOCOL:
            return Reject(
                "protocol", f"the updater speaks protocol {PROTOCOL}, this worker {proof.protocol}: {_VERSIONS}"
            )
        if not self._token:
            return Accepted(b"", self._epoch)
        if not secret.verify(self._token, "worker", nonce, proof.nonce, proof.proof):
            return Reject("token", f"the updater asks for a token (token_file, {secret.VARIABLE}): it is not this one")
        return Accepted(secret.prove(self._token, "trainer", proof.nonce, nonce), self._epoch)


def introduced(hello: Hello) -> Joined:
    """Who a hello is from. Raises :class:`~weightwire.WireError`."""
    joined = wire.decode_event(hello.joined)
    if not isinstance(joined, Joined) or len(hello.device) > wire.MAX_LABEL:
        raise WireError(f"a hello of kind {type(joined).__name__}")
    return joined


class Visitor:
    """The worker's side, for one connection. All methods raise :class:`Refusal`, and :class:`~weightwire.WireError`
    where something comes out of turn."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._nonce = secret.fresh_nonce()
        self._theirs = b""

    def answer(self, challenge: Challenge) -> Proof:
        if self._theirs:
            raise WireError("a second challenge")
        if challenge.protocol != PROTOCOL:
            text = f"the updater speaks protocol {challenge.protocol}, this worker {PROTOCOL}: {_VERSIONS}"
            raise Refusal(WireError, text)
        if bool(self._token) is not challenge.guarded:
            who, lacks = ("it asks for", "this worker has") if challenge.guarded else ("this worker has", "it asks for")
            text = f"{who} a token, but {lacks} none: set token_file or {secret.VARIABLE} on all sides"
            raise Refusal(EndpointError, text)
        if len(challenge.nonce) != secret.NONCE:
            raise WireError(f"a nonce of {len(challenge.nonce)} bytes")
        self._theirs = challenge.nonce
        proof = secret.prove(self._token, "worker", challenge.nonce, self._nonce) if self._token else b""
        return Proof(PROTOCOL, self._nonce, proof)

    def check(self, accepted: Accepted) -> None:
        """Whether it is the trainer who says so."""
        if not self._theirs:
            raise WireError("an answer without a question")
        if self._token and not secret.verify(self._token, "trainer", self._nonce, self._theirs, accepted.proof):
            raise Refusal(EndpointError, "who listens there does not know the token")

    @staticmethod
    def rejected(reject: Reject) -> Refusal:
        kinds = {"name": EndpointInUseError, "protocol": WireError, "stream": CapabilityError}
        return Refusal(kinds.get(reject.kind, EndpointError), reject.reason)
