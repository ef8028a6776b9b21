"""One process of a static RPC group: ``python member.py RANK PORT``. Rank 0 trains, the others work."""

from __future__ import annotations

import json
import os
import sys

from torch.distributed import rpc

from weightwire import WeightReceiver, WeightUpdater
from weightwire.errors import WorkerLostError
from weightwire.testing.states import counters, seen

ENDPOINT = "rpc://policy?allow_pickle=true"


def train() -> dict[str, object]:
    updater = WeightUpdater(ENDPOINT, timeout=30.0)
    updater.wait_for_workers(2)
    first = updater.push(counters(1), wait="applied")
    print("all have version 1", flush=True)
    sys.stdin.readline()  # one of them is killed meanwhile
    lost = ""
    try:
        updater.push(counters(2), wait="applied")
    except WorkerLostError as exc:
        lost = str(exc.worker)
    third = updater.push(counters(3), wait="applied")
    states = [{name: receipt.state for name, receipt in report.receipts.items()} for report in (first, third)]
    updater.close()
    return {"states": states, "lost": lost}


def work(name: str) -> dict[str, object]:
    versions = []
    with WeightReceiver(ENDPOINT, counters(0), worker=name, timeout=30.0) as receiver:
        while not receiver.closed:
            if receiver.pull(None if not receiver.ready else 0.0) is not None:
                assert seen(receiver.weights) == receiver.version
                versions.append(receiver.version)
    return {"versions": versions}


if __name__ == "__main__":
    rank, port = map(int, sys.argv[1:])
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=30)
    rpc.init_rpc(f"member{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    print(json.dumps(train() if rank == 0 else work(f"w{rank}")), flush=True)
    if rank == 0:
        sys.stdin.readline()  # the store is here: the others go first
    os._exit(0)  # a member is dead, for which rpc.shutdown() would wait
