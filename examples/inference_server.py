"""An inference server that goes on answering while a trainer pushes new weights to it.

    python examples/inference_server.py
    python examples/inference_server.py --clients 8 --seconds 10 --backend "ipc://served?slots=3"
    python examples/inference_server.py --without-gate        # what the gate is for: answers of two versions at once

The server is plain asyncio over TCP on the loopback interface, one JSON object a line: in goes an observation, out come
an action value and the version that computed it. Requests overlap: between the layers of the policy each gives way to
the others, as a server does that batches, streams or waits for a device. In its own process a trainer pushes versions
as fast as it can. In processes of their own clients hold every answer against what that version must answer, bit for
bit: the trainer writes a mark of the version all over the policy, so that a mix answers what no version would.

Weightwire's part is three lines: look for ``receiver``.

Exit status: 0, all answers were of one version each; 1, some were not, or none came.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from weightwire.collectors.gate import GatedReceiver

WIDTH, LAYERS = 32, 6
PATIENCE = 60.0  # seconds for processes to start, and for an answer
SPAWN = multiprocessing.get_context("spawn")


def make_policy() -> nn.Sequential:
    """Observations ``(WIDTH,)`` to one action value. The trainer and the server have one of these."""
    from torch import float64, nn

    sizes = [WIDTH] * LAYERS + [1]
    return nn.Sequential(*(nn.Linear(a, b, bias=False, dtype=float64) for a, b in itertools.pairwise(sizes)))


def mark(version: int) -> float:
    """What the trainer writes into every weight. Whole numbers of 64ths: whatever is computed with them is exact."""
    return (version % 61 + 1) / 64


def expected(observation: list[float], version: int) -> float:
    """What the policy answers when the mark of ``version`` stands in all its weights."""
    value = sum(observation) * mark(version)
    for _ in range(LAYERS - 1):
        value *= WIDTH * mark(version)  # each of the units has the value, and the next layer adds them up
    return value


# -- the server ------------------------------------------------------------------------------------------------------


class Server:
    def __init__(self, receiver: GatedReceiver, policy: nn.Sequential, *, gated: bool) -> None:
        self.receiver = receiver
        self.policy = policy
        self.gated = gated

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client, request by request."""
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                async with self.acting() as version:
                    value = await self.infer(json.loads(line)["observation"])
                writer.write(json.dumps({"version": version, "value": value}).encode() + b"\n")
                await writer.drain()
        writer.close()

    @contextlib.asynccontextmanager
    async def acting(self) -> AsyncIterator[int]:
        if self.gated:
            async with self.receiver.acting() as version:
                yield version
        else:  # for a look at what happens then
            yield self.receiver.version

    async def infer(self, observation: list[float]) -> float:
        import torch

        with torch.inference_mode():
            value = torch.tensor(observation, dtype=torch.float64)
        for layer in self.policy:
            with torch.inference_mode():
                value = layer(value)
            await asyncio.sleep(0)  # other requests have their turn
        return value.item()


async def serve(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Serve until the clients are through; what each of them says."""
    import torch

    from weightwire.collectors.gate import GatedReceiver

    torch.set_num_threads(1)
    policy = make_policy()
    with GatedReceiver(args.backend, policy, worker="server") as receiver:
        server = await asyncio.start_server(
            Server(receiver, policy, gated=not args.without_gate).serve, host="127.0.0.1", port=0
        )
        port = server.sockets[0].getsockname()[1]
        pipes, children = [], []
        trainer = SPAWN.Process(target=train, args=(receiver.endpoint,), daemon=True)
        trainer.start()
        try:
            await asyncio.to_thread(receiver.wait, 1, PATIENCE)
            for _ in range(args.clients):
                mine, theirs = SPAWN.Pipe(duplex=False)
                children.append(SPAWN.Process(target=ask, args=(port, args.seconds, theirs), daemon=True))
                children[-1].start()
                theirs.close()  # the client has it: this end sees it close when the client dies
                pipes.append(mine)
            print(f"serving on 127.0.0.1:{port}, weights from {receiver.endpoint}", flush=True)
            return [await asyncio.to_thread(answer_of, pipe, args.seconds + PATIENCE) for pipe in pipes]
        finally:
            server.close()
            for child in [trainer, *children]:
                child.kill()
                child.join(10)


def answer_of(pipe: Any, timeout: float) -> dict[str, Any]:
    if not pipe.poll(timeout):
        raise RuntimeError(f"a client has said nothing for {timeout:.0f} s")
    try:
        told: dict[str, Any] = pipe.recv()
    except EOFError:
        raise RuntimeError("a client has died; what it printed above says why") from None
    return told


# -- the other processes ---------------------------------------------------------------------------------------------


def train(endpoint: str) -> None:
    """Push one version after the other, until killed."""
    import torch

    from weightwire import WeightUpdater

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends us
    torch.set_num_threads(1)
    policy = make_policy()
    with WeightUpdater(endpoint, policy, timeout=PATIENCE) as updater:
        updater.wait_for_workers(1)
        while True:
            with torch.no_grad():
                for weight in policy.parameters():
                    weight.fill_(mark(updater.version + 1))
            updater.push(wait="applied", metadata={"pushed_at": time.time()})


def ask(port: int, seconds: float, pipe: Any) -> None:
    """Ask, and check the answers, for so many seconds. Knows nothing of weights, nor of torch."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    versions: set[int] = set()
    delays: list[float] = []
    mixed = 0
    with (
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection,
        connection.makefile("rw") as file,
    ):
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            asked = time.monotonic()
            observation = [float((len(delays) + n) % 7 - 2) for n in range(WIDTH)]
            file.write(json.dumps({"observation": observation}) + "\n")
            file.flush()
            answer = json.loads(file.readline())
            delays.append(time.monotonic() - asked)
            versions.add(answer["version"])
            mixed += answer["value"] != expected(observation, answer["version"])
    pipe.send({"answers": len(delays), "versions": versions, "mixed": mixed, "delay": statistics.median(delays)})


# -- the command line ------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--backend", default=f"ipc://served-{os.getpid()}", metavar="ENDPOINT", help="any endpoint with a location"
    )
    parser.add_argument("--clients", type=int, default=4, help="how many (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="that each client asks (default: %(default)s)")
    parser.add_argument("--without-gate", action="store_true", help="act whenever asked, even amid an update")
    args = parser.parse_args()
    if args.clients < 1 or not args.seconds > 0:
        parser.error("at least one client and a time above 0, please")
    return args


def main() -> int:
    told = asyncio.run(serve(arguments()))
    answers, mixed = sum(client["answers"] for client in told), sum(client["mixed"] for client in told)
    versions = set().union(*(client["versions"] for client in told))
    print(
        f"{answers} answers to {len(told)} clients from {len(versions)} versions, median "
        f"{1e3 * statistics.median(client['delay'] for client in told):.2f} ms; {mixed} of a mix"
    )
    return 0 if answers and len(versions) > 1 and not mixed else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
