"""What the kit's fork server loads before it forks its first worker."""

from __future__ import annotations

import torch

import weightwire.testing.workers  # noqa: F401 - for its effect: torch, both ends and the kit are loaded once

torch.set_num_threads(1)
