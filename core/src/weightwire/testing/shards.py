"""Tensors that are sharded over two processes."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["RANKS", "half", "halves", "whole"]

RANKS = 2
NAMES = ("rows", "columns")
SIDE = 2048  # 16 MiB a tensor
PATIENCE = timedelta(seconds=30)


def whole(version: int) -> dict[str, Tensor]:
    """Every element says where it is, in which tensor, and of which version."""
    state = torch.arange(SIDE * SIDE, dtype=torch.float32).reshape(SIDE, SIDE)
    return {name: state + version + 10 * number for number, name in enumerate(NAMES)}


def halves(rank: int, meet: str) -> dict[str, Tensor]:
    """This process's half of both, cut along another dimension each. ``meet``: a file by which the ranks meet, with
    which this process becomes one of them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=RANKS, timeout=PATIENCE)
    mesh = init_device_mesh("cpu", (RANKS,))
    shapes = [(SIDE // RANKS, SIDE), (SIDE, SIDE // RANKS)]
    return {  # ones, not zeros: their memory is there already
        name: DTensor.from_local(torch.ones(shape), mesh, [Shard(dim)], run_check=False)
        for dim, (name, shape) in enumerate(zip(NAMES, shapes))
    }


def half(rank: int, version: int) -> dict[str, Tensor]:
    """What :func:`halves` has to hold."""
    return {name: tensor.chunk(RANKS, dim)[rank] for dim, (name, tensor) in enumerate(whole(version).items())}
