"""A dynamic RPC group whose first member is the test process, on loopback; the kit's processes join it."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator

import pytest

os.environ["TP_SOCKET_IFNAME"] = "lo"  # where torch listens
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it warns of every member that leaves
# Each of torch's threads has an arena of malloc's own, between which resident memory wanders more than the kit takes.
os.environ["MALLOC_ARENA_MAX"] = "2"
ctypes.CDLL(None).mallopt(-8, 2)  # M_ARENA_MAX, for this process

TIMEOUT = 20


@pytest.fixture(scope="session")
def group() -> Iterator[str]:
    """``host:port`` of its store."""
    from torch.distributed import rpc

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://{place}", rpc_timeout=TIMEOUT)
    rpc.init_rpc("first", rank=0, rpc_backend_options=options)
    yield place
    rpc.shutdown(graceful=False)
