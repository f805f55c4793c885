"""attention and attention_varlen for PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._options import Options
from ._ops import attend

if TYPE_CHECKING:
    from typing_extensions import Unpack


def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Unpack[Options]) -> Any:
    """`headrace.attention`, with its shapes, options and errors, as an operator of PyTorch.

    Differentiable in q, k, v, bias and sinks, through out and through lse; once, not twice. `seed` may also be an
    int64 tensor of one element on the CPU, so that a compiled program can draw it. Under autocast q, k and v are
    converted to its dtype, and a bias of another dtype than that and float32 as well.
    """
    q, k, v = convert_for_autocast(q, k, v, options)
    return attend(q, k, v, {}, return_lse, options)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Any:
    """`headrace.attention_varlen` as an operator of PyTorch; see `attention`."""
    q, k, v = convert_for_autocast(q, k, v, options)
    return attend(q, k, v, {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}, return_lse, options)


def convert_for_autocast(q: Tensor, k: Tensor, v: Tensor, options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in the dtype of autocast, where it is on; a bias in options as well."""
    device = "cpu" if q.is_cpu else q.device.type  # the latter is slow
    if device == "meta" or not torch.is_autocast_enabled(device) or q.dtype == torch.float64:
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    bias = options.get("bias")
    if bias is not None and bias.dtype not in (dtype, torch.float32):
        options["bias"] = bias.to(dtype)
    return q.to(dtype), k.to(dtype), v.to(dtype)
