"""Casts to float8 with one scale a tensor, which travels beside it: ``value = float8 * scale``.

The scale is ``amax / max``: the largest magnitude of the tensor, over the largest number of the dtype. So the error of
an element ``w`` is at most half a step of the dtype at ``w / scale``, times the scale::

    float8_e4m3fn   max(2**-4 * abs(w), amax / 448 * 2**-10)
    float8_e5m2     max(2**-3 * abs(w), amax / 57344 * 2**-17)

What is not finite stays what it is where the dtype has it, and is NaN where not; it does not count for ``amax``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightwire.weights.dtypes import torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SCALABLE", "SUFFIX", "amax_of", "quantised", "scale_of", "scale_to", "scaled_name"]

SCALABLE = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
"""Dtypes that can be asked for as ``"<dtype>*scale"``."""
SUFFIX = "_scale"


def scaled_name(name: str) -> str:
    """The name of the scale of a tensor: ``layer.weight`` -> ``layer.weight_scale``, as inference engines have it."""
    return name + SUFFIX


def scale_of(tensor: Tensor, dtype: str) -> Tensor:
    """One float32 number, without dimensions; 1 for what is all zeros, or empty."""
    return scale_to(amax_of(tensor), dtype)


def amax_of(tensor: Tensor) -> Tensor:
    """The largest magnitude, as float32; of what is empty, 0. That of a whole is the largest of its parts'."""
    import torch

    if not tensor.numel():
        return torch.zeros((), device=tensor.device)
    # No look at the value, for which a device would have to be waited for.
    return torch.where(tensor.isfinite(), tensor, 0).abs().amax().float()


def scale_to(amax: Tensor, dtype: str) -> Tensor:
    """The scale of a tensor with this largest magnitude."""
    import torch

    scale = amax / torch.finfo(torch_dtype(dtype)).max
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def quantised(tensor: Tensor, scale: Tensor, dtype: str) -> Tensor:
    """The tensor over its scale, in float8."""
    import torch

    kind = torch_dtype(dtype)
    most = torch.finfo(kind).max
    value = tensor.float() / scale
    # Rounding may go beyond the largest number; torch makes that of infinities, too, where the dtype has none.
    endless = value if dtype == "float8_e5m2" else torch.full_like(value, torch.nan)
    return torch.where(value.isfinite(), value.clamp(-most, most), endless).to(kind)
