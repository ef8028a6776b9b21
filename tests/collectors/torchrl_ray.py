"""A script that `test_torchrl_ray.py` runs: a RayCollector over the ray backend; prints what was seen as one line of
JSON."""

from __future__ import annotations

import gc
import inspect
import json
import time
from typing import Any

import ray
import ray.internal
import torch
from torchrl.collectors.distributed import RayCollector
from torchrl_parts import VERSIONED, Proof, fill, still

from weightwire.collectors.torchrl import scheme


def seen(batch: Any) -> list[tuple[float, float, int]]:
    """For each actor: least and greatest value that it acted with, and the version on its frames."""
    keys = [batch[key].flatten().tolist() for key in ("pid", "low", "high")]
    versions = batch["next", "policy_version"].flatten().tolist() if VERSIONED else [-1] * batch.numel()
    return sorted({row[1:] for row in zip(*keys, versions, strict=True)})


def error_of(function: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """Type, text and seconds of what it raises."""
    begun = time.monotonic()
    try:
        function(*args, **kwargs)
    except Exception as exc:
        return [type(exc).__name__, str(exc), time.monotonic() - begun]
    return ["nothing", "", time.monotonic() - begun]


def main() -> None:
    if "ray.internal.free(" in inspect.getsource(inspect.getmodule(RayCollector)) and not hasattr(ray.internal, "free"):
        print(json.dumps({"skip": "the RayCollector of this torchrl calls what this Ray no longer has"}))
        return
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    policy, ours, out = Proof(1.0), scheme("ray", timeout=60), {}
    collector = RayCollector(
        [still] * 2,
        policy,
        frames_per_batch=16,
        total_frames=10**9,
        sync=True,
        remote_configs={"num_cpus": 1, "num_gpus": 0, "memory": 2**28},
        collector_kwargs={"track_policy_version": True} if VERSIONED else {},
        weight_sync_schemes={"policy": ours},
    )
    batches = iter(collector)
    out["first"] = seen(next(batches))
    fill(policy, 2.0)
    out["trained"] = seen(next(batches))
    collector.update_policy_weights_()
    out["updated"] = seen(next(batches))
    for worker in (0, 1):
        collector.update_policy_weights_(fill(policy, 3.0 + worker), worker_ids=worker)
    out["each"] = seen(next(batches))
    out["versions"] = ours.versions
    state = policy.state_dict()
    misfits = {
        "transposed": {**state, "layers.0.weight": torch.ones(32, 128)},
        "float64": {**state, "layers.0.bias": torch.ones(64, dtype=torch.float64)},
        "extra": {**state, "unknown": torch.ones(1)},
        "missing": {name: tensor for name, tensor in state.items() if name != "layers.0.bias"},
    }
    out["misfits"] = {name: error_of(collector.update_policy_weights_, bad) for name, bad in misfits.items()}
    out["unharmed"] = seen(next(batches))
    ray.kill(collector.remote_collectors[1])
    out["killed"] = error_of(collector.update_policy_weights_)
    ray.shutdown()
    del collector, batches
    gc.collect()
    out["ray is up"] = ray.is_initialized()
    print(json.dumps(out))


if __name__ == "__main__":
    main()
