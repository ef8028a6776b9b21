from __future__ import annotations

import os
from pathlib import Path

import pytest

from weightwire.errors import EndpointError
from weightwire_nccl.secret import fresh_nonce, prove, read_token, verify

TOKEN = b"a secret of sixteen bytes or more"


def test_both_prove_that_they_know_the_token() -> None:
    trainer, worker = fresh_nonce(), fresh_nonce()
    assert verify(TOKEN, "worker", trainer, worker, prove(TOKEN, "worker", trainer, worker))
    assert verify(TOKEN, "trainer", worker, trainer, prove(TOKEN, "trainer", worker, trainer))


def test_nothing_else_is_a_proof() -> None:
    trainer, worker = fresh_nonce(), fresh_nonce()
    good = prove(TOKEN, "worker", trainer, worker)
    assert not verify(b"another secret of that length....", "worker", trainer, worker, good)
    assert not verify(TOKEN, "worker", fresh_nonce(), worker, good), "recorded"
    assert not verify(TOKEN, "trainer", trainer, worker, good), "sent back"
    assert not verify(TOKEN, "worker", trainer, worker + b"x", good)
    assert not verify(TOKEN, "worker", trainer, worker, b"")


def test_token_comes_from_the_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_token("") == b""
    monkeypatch.setenv("WEIGHTWIRE_TOKEN", "from the environment")
    assert read_token("") == b"from the environment"
    file = tmp_path / "token"
    file.write_bytes(b" from the file, rather \n")
    assert read_token(str(file)) == b"from the file, rather"


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 5000])
def test_tokens_that_are_none(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(EndpointError, match="16 to 4096"):
        read_token(str(file))
    with pytest.raises(EndpointError, match="cannot be read"):
        read_token(str(tmp_path / "missing"))


def test_tokens_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("pipe", ".", "nul\0"):
        with pytest.raises(EndpointError):
            read_token(f"{tmp_path}/{path}")


def test_a_token_may_be_any_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTWIRE_TOKEN", os.fsdecode(b"\xff\xfe" * 10))
    assert read_token("") == b"\xff\xfe" * 10
