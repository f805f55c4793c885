"""merge_states in PyTorch's own operations: on any device, and differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """As headrace.merge_states, with its shapes, dtypes, guarantees and errors. Computed in the dtype of lse, which is
    at least float32; on a GPU a stream capture may record it."""
    _check(out_a, lse_a, out_b, lse_b)
    a, b = lse_a, lse_b
    # The shift changes no value, and no gradient: it is finite, so that no difference of infinities is taken.
    shift = torch.maximum(a, b).detach()
    shift = shift.masked_fill(torch.isneginf(shift), 0.0)
    weight_a, weight_b = torch.exp(a - shift), torch.exp(b - shift)
    total = weight_a + weight_b
    nothing = torch.isneginf(a) & torch.isneginf(b)
    total = total.masked_fill(nothing, 1.0)
    lse = (shift + torch.log(total)).masked_fill(nothing, -torch.inf)
    out: Any = 0.0
    for x, weight, side in ((out_a, weight_a, a), (out_b, weight_b, b)):
        # What a side without keys holds, NaN even, is nothing.
        x = x.to(lse.dtype).masked_fill(_beside_rows(torch.isneginf(side)), 0.0)
        out = out + x * _beside_rows(weight / total)
    return out.to(out_a.dtype), lse


def _beside_rows(x: Tensor) -> Tensor:
    """`[batch, heads, seqlen]` as `[batch, seqlen, heads, 1]`."""
    return x.transpose(1, 2)[..., None]


def _check(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    for name, x in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: is a {type(x).__name__}; it must be a torch.Tensor, as the first argument is")
        if x.device != out_a.device:
            raise ValueError(f"{name}: is on device {x.device}, the first argument on {out_a.device}; they must be equal")
    wide = (torch.float32, torch.float64) if out_a.dtype == torch.float64 else (torch.float32,)
    if not out_a.is_floating_point():
        raise TypeError(f"out_a: dtype is {out_a.dtype}; it must be float32, float16, bfloat16 or float64")
    if lse_a.dtype not in wide:
        raise TypeError(f"lse_a: dtype is {lse_a.dtype}; it must be float32, or float64 where that of out_a is")
    if out_a.ndim != 4:
        raise ValueError(f"out_a: has {out_a.ndim} dimensions; it must have 4: [batch, seqlen_q, heads, value_dim]")
    batch, seqlen, heads, _ = out_a.shape
    for name, x, first, shape in (
        ("out_b", out_b, out_a, out_a.shape),
        ("lse_a", lse_a, lse_a, (batch, heads, seqlen)),
        ("lse_b", lse_b, lse_a, (batch, heads, seqlen)),
    ):
        if x.dtype != first.dtype:
            raise TypeError(f"{name}: dtype is {x.dtype}, but that of side a is {first.dtype}; they must be equal")
        if tuple(x.shape) != tuple(shape):
            raise ValueError(f"{name}: shape is {tuple(x.shape)}; out_a makes it {tuple(shape)}")
