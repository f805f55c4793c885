"""The attention of torch.nn.functional, computed by Headrace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._attention import convert_for_autocast
from ._ops import attend


def draw_seed() -> Tensor:
    """A seed for dropout from PyTorch's generator: torch.manual_seed, checkpointing and compiled programs work."""
    return torch.randint(0, 2**63 - 1, (), dtype=torch.int64)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The arguments and the result of torch.nn.functional.scaled_dot_product_attention.

    Args:
        query: `[..., heads_q, seqlen_q, head_dim]`. key: `[..., heads_kv, seqlen_k, head_dim]`. value:
            `[..., heads_kv, seqlen_k, value_dim]`. Without heads: `[seqlen, dim]` each.
        attn_mask: bool (true = visible) or an additive bias in float32 or the dtype of query, with shape broadcastable
            to `[..., heads_q, seqlen_q, seqlen_k]`. Gradients reach a bias.
        dropout_p: applied always, as there; the seed comes from PyTorch's generator.
        is_causal: query i sees the keys j <= i: aligned top-left, unlike `causal=True` of `headrace.attention`.
        scale: 1 / sqrt(head_dim) by default.
        enable_gqa: fewer heads of key and value than of query.

    Returns:
        `[..., heads_q, seqlen_q, value_dim]`, a view of a result whose heads lie behind its tokens. A row that sees
        no key is 0.

    Raises ValueError for attn_mask together with is_causal, and for shapes that do not fit.
    """
    causal = "top_left" if is_causal else False
    if query.ndim == key.ndim == value.ndim == 4 and attn_mask is None and not dropout_p:
        # Almost every call is one of these, and is not charged for what others need.
        q_shape, k_shape = query.shape, key.shape
        if q_shape[0] == k_shape[0] == value.shape[0] and (enable_gqa or q_shape[1] == k_shape[1]):
            return _heads_first(query, key, value, {"causal": causal, "scale": scale})
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask: is given together with is_causal; only one of them can be")
    if min(query.ndim, key.ndim, value.ndim) < 2:
        raise ValueError("query, key, value: must have 2 dimensions at least: [..., seqlen, dim]")
    if query.ndim < 3:
        return scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask, dropout_p, is_causal, scale, enable_gqa
        )[0]
    heads_q, heads_kv = query.shape[-3], key.shape[-3]
    if heads_q != heads_kv and heads_kv != 1 and not enable_gqa:
        raise ValueError(f"key: has {heads_kv} heads, query {heads_q}; enable_gqa=True allows that")
    options: dict[str, Any] = {"causal": causal, "scale": scale}
    if dropout_p > 0.0:
        options = {**options, "dropout_p": dropout_p, "seed": draw_seed()}  # torch 2.4 compiles no update()
    leading = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    if attn_mask is not None:
        name = "mask" if attn_mask.dtype == torch.bool else "bias"
        options[name] = _four_dimensions(attn_mask, leading)
    q, k, v = (x.expand(*leading, *x.shape[-3:]).flatten(0, -4) if leading else x[None] for x in (query, key, value))
    out = _heads_first(q, k, v, options)
    return out.reshape(*leading, *out.shape[1:])


def _heads_first(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    q, k, v = convert_for_autocast(query, key, value, options)
    return attend(q, k, v, {}, False, options, heads_first=True)  # type: ignore[arg-type]


def _four_dimensions(mask: Tensor, leading: torch.Size) -> Tensor:
    """A mask over `[..., heads, seqlen_q, seqlen_k]` with all of `...` in one dimension, 1 where it broadcasts."""
    while mask.ndim < 4:
        mask = mask[None]
    if len(leading) == 1 or all(size == 1 for size in mask.shape[:-3]):
        return mask.flatten(0, -4)
    return mask.expand(*leading, *mask.shape[-3:]).flatten(0, -4)
