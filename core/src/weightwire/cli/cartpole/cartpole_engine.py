"""What a backend builds on and does not start by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from weightwire import parse_endpoint


@contextlib.contextmanager
def started(endpoint: str) -> Iterator[str]:
    """The endpoint for both sides. Over ``ray`` that takes a Ray: a small one of this machine's, for as long as the
    block lasts, unless the endpoint says where one is (``ray?address=auto``)."""
    parsed = parse_endpoint(endpoint)
    if parsed.backend != "ray" or "address" in parsed.options:
        yield endpoint
        return
    import ray

    ray.init(
        address="local",
        num_cpus=1,
        object_store_memory=100_000_000,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )
    try:
        # The workers are processes that Ray knows nothing of: they are told where it is.
        address = ray.get_runtime_context().gcs_address
        yield str(replace(parsed, options={**parsed.options, "address": address}))
    finally:
        ray.shutdown()
