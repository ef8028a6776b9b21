from __future__ import annotations

from weightwire_ray.conformance import Suite


class TestRay(Suite):
    pass
