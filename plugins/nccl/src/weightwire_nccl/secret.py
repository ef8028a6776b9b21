"""The token that both ends must know, and how each proves to the other that it does, without saying it.

The trainer sends a nonce, the worker answers with a nonce of its own and an HMAC over both, and the trainer with
another one: whoever has not got the token can neither join nor pass for the trainer, and nothing that was recorded is
of use a second time. It proves who connects; it does not encrypt what follows.
"""

from __future__ import annotations

import hmac
import os
import secrets

from weightwire.errors import EndpointError

__all__ = ["NONCE", "fresh_nonce", "prove", "read_token", "verify"]

NONCE = 32
"""Bytes."""
MIN_TOKEN, MAX_TOKEN = 16, 4096
"""Bytes."""
VARIABLE = "WEIGHTWIRE_TOKEN"


def read_token(token_file: str) -> bytes:
    """The token in the file, else the environment's, without blanks around it; empty where there is none.

    Raises :class:`~weightwire.EndpointError`.
    """
    if token_file:
        source = f"token_file {token_file!r}"
        try:
            with open(token_file, "rb", opener=_at_once) as file:
                token = (file.read(MAX_TOKEN + 1) or b"").strip()
        except (OSError, ValueError) as exc:  # ValueError: no path can be that
            raise EndpointError(f"{source} cannot be read: {exc}") from exc
    else:
        source = f"the environment variable {VARIABLE}"
        token = os.fsencode(os.environ.get(VARIABLE, "")).strip()
        if not token:
            return b""
    if not MIN_TOKEN <= len(token) <= MAX_TOKEN:
        raise EndpointError(f"{source} holds {len(token)} bytes; a token has {MIN_TOKEN} to {MAX_TOKEN}")
    return token


def _at_once(path: str, flags: int) -> int:
    """Not only when somebody writes, where the path is no file but a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def fresh_nonce() -> bytes:
    return secrets.token_bytes(NONCE)


def prove(token: bytes, role: str, theirs: bytes, ours: bytes) -> bytes:
    """The answer to ``theirs``, a nonce. ``role`` keeps an answer from being sent back to who made it."""
    return hmac.digest(token, b"weightwire-nccl 1 " + role.encode() + b"\0" + theirs + ours, "sha256")


def verify(token: bytes, role: str, ours: bytes, theirs: bytes, proof: bytes) -> bool:
    """Whether ``proof`` is what the other end, in its ``role``, had to answer to ``ours``."""
    if len(ours) != NONCE or len(theirs) != NONCE:
        return False
    return hmac.compare_digest(prove(token, role, ours, theirs), proof)
