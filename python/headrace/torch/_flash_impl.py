"""Headrace as a flash-attention implementation of PyTorch itself (torch.nn.attention.register_flash_attention_impl).

While it is active, scaled_dot_product_attention runs on Headrace wherever PyTorch would have chosen flash attention, so
models need no change. PyTorch chooses flash attention on a CPU for calls without dropout, and on CUDA for 16-bit
calls without a mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from .. import _attention
from ._sdpa import _four_dimensions, draw_seed


class _Handle:
    """Keeps the kernels in place; PyTorch's registry removes it."""

    def __init__(self, libraries: list[Any]) -> None:
        self.libraries = libraries

    def remove(self) -> None:
        self.libraries.clear()


def register(name: str = "headrace") -> None:
    """Registers Headrace, so that `torch.nn.attention.activate_flash_attention_impl("headrace")` turns it on and
    `restore_flash_attention_impl()` off. RuntimeError where this PyTorch has no such registry: use
    `scaled_dot_product_attention` of this module there."""
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError:
        raise RuntimeError(
            f"torch {torch.__version__} has no register_flash_attention_impl; "
            "use headrace.torch.scaled_dot_product_attention"
        ) from None
    register_flash_attention_impl(name, register_fn=_activate)


def _activate() -> _Handle:
    cpu, cuda = (library.Library("aten", "IMPL", key) for key in ("CPU", "CUDA"))
    cpu.impl("_scaled_dot_product_flash_attention_for_cpu", _cpu_forward, allow_override=True)
    cpu.impl("_scaled_dot_product_flash_attention_for_cpu_backward", _cpu_backward, allow_override=True)
    cuda.impl("_scaled_dot_product_flash_attention", _cuda_forward, allow_override=True)
    cuda.impl("_scaled_dot_product_flash_attention_backward", _cuda_backward, allow_override=True)
    return _Handle([cpu, cuda])


def _options(is_causal: bool, attn_mask: Tensor | None, scale: float | None, query: Tensor) -> dict[str, Any]:
    options: dict[str, Any] = {"causal": "top_left" if is_causal else False, "scale": scale}
    if attn_mask is not None:
        name = "mask" if attn_mask.dtype == torch.bool else "bias"
        options[name] = _four_dimensions(attn_mask, query.shape[:1])
    return options


def _gradients(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, options: dict[str, Any]
) -> tuple[Tensor, ...]:
    arguments = (grad_out, query, key, value, out, logsumexp)
    return tuple(_attention.backward(*arguments, {}, None, False, False, options, True).values())


def _cpu_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    options = {**_options(is_causal, attn_mask, scale, query), "dropout_p": dropout_p}
    return _attention.forward(query, key, value, {}, True, options, True)


def _cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    options = {**_options(is_causal, attn_mask, scale, query), "dropout_p": dropout_p}
    return _gradients(grad_out, query, key, value, out, logsumexp, options)


def _cuda_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    if return_debug_mask:
        raise NotImplementedError("return_debug_mask: is True; headrace has no debug mask (see headrace.dropout_mask)")
    # Philox's seed travels to the backward pass in the tensors that flash attention has for its own.
    seed = int(draw_seed()) if dropout_p else 0
    options = {**_options(is_causal, None, scale, query), "dropout_p": dropout_p, "seed": seed}
    out, lse = _attention.forward(query, key, value, {}, True, options, True)
    philox_seed, philox_offset = torch.tensor([seed, 0], dtype=torch.int64)
    return out, lse, None, None, query.shape[2], key.shape[2], philox_seed, philox_offset, query.new_empty(0)


def _cuda_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    seed = int(philox_seed) if dropout_p else 0
    options = {**_options(is_causal, None, scale, query), "dropout_p": dropout_p, "seed": seed}
    return _gradients(grad_out, query, key, value, out, logsumexp, options)
