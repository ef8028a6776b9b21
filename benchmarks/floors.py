"""What Weightwire is held against: the least that such work can cost. No Weightwire code in here."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from measure import PATIENCE, Contender
from states import Look, nbytes
from torch import Tensor, nn
from workers import Crew, contender, counter

__all__ = ["BareEnd", "bare_crew", "flat_copy", "views", "walk"]


def flat_copy(size: int) -> Contender:
    """One ``copy_`` of ``size`` bytes from memory to memory, with as many threads as torch has here."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    return Contender(lambda: target.copy_(source))


def walk(module: nn.Module) -> list[Tensor]:
    return [tensor.detach() for _, tensor in (*module.named_parameters(), *module.named_buffers())]


def shared(memory: mmap.mmap) -> Tensor:
    return torch.from_numpy(np.frombuffer(memory, np.uint8))


def views(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors' shapes over flat memory, one behind the other."""
    cuts = flat.split([tensor.nbytes for tensor in tensors])
    return [cut.view(tensor.dtype).view(tensor.shape) for cut, tensor in zip(cuts, tensors, strict=True)]


def bound_waits(peer: socket.socket) -> None:
    """A timeout that the kernel keeps: Python's own would cost the floor one more system call a message."""
    peer.setblocking(True)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        peer.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(PATIENCE), 0))


class BareEnd:
    """A worker of the bare floor: one message in, one fused copy (aliased: none), a look, one message out."""

    def __init__(self, module: nn.Module, address: str, apply: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        bound_waits(self.socket)
        self.socket.connect(address)
        _, (descriptor,), _, _ = socket.recv_fds(self.socket, 1, 1)
        self.targets = walk(module)
        self.sources = views(shared(mmap.mmap(descriptor, nbytes(module))), self.targets)
        os.close(descriptor)
        if apply == "alias":  # from now on the module acts with whatever the trainer writes
            for parameter, source in zip(module.parameters(), self.sources, strict=True):
                parameter.data = source
            self.targets = self.sources = []
        self.look = Look(module)

    def take(self, sentinel: float, *how: str) -> None:
        if float(self.socket.recv(32)) != sentinel:
            raise AssertionError("a message was lost")
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources)
        self.look(sentinel)
        self.socket.send(b"done")

    def close(self) -> None:
        self.socket.close()


def bare_crew(stack: ExitStack, module: nn.Module, state: str, workers: int, apply: str = "copy") -> Contender:
    """The bare floor: walk the module, one fused copy on each side, one socket round trip a worker. Aliased, workers
    copy nothing.

    It is no transport: nothing tells a worker that a version is whole, and a slow worker reads what is being written;
    an aliased one acts with it.
    """
    descriptor = os.memfd_create("bare-floor")
    stack.callback(os.close, descriptor)
    os.ftruncate(descriptor, nbytes(module))
    arena = views(shared(mmap.mmap(descriptor, nbytes(module))), walk(module))
    address = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "socket"
    listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    listener.settimeout(PATIENCE)
    listener.bind(str(address))
    listener.listen(workers)
    crew = Crew(workers, state, BareEnd)
    stack.callback(crew.close)
    crew.tell("open", str(address), apply)
    peers = []
    for _ in range(workers):
        peer = stack.enter_context(listener.accept()[0])
        bound_waits(peer)
        socket.send_fds(peer, [b"-"], [descriptor])
        peers.append(peer)
    crew.answers()
    sentinels, versions = counter(), counter()  # the same numbers, asked for before the clock and within it

    def push() -> None:
        torch._foreach_copy_(arena, walk(module))
        message = str(versions()).encode()
        for peer in peers:
            peer.send(message)
        for peer in peers:
            peer.recv(32)

    return contender(crew, module, push, sentinels)
