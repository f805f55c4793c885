"""Attention as flash-attn calls it: dense and ragged, separate and packed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..torch import attention, attention_varlen
from ..torch._sdpa import draw_seed


def window(window_size: tuple[int, int]) -> tuple[int | None, int | None]:
    """flash-attn's window: -1 is no bound."""
    left, right = window_size
    return None if left == -1 else left, None if right == -1 else right


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q `[batch, seqlen_q, heads_q, head_dim]` to k, v `[batch, seqlen_k, heads_kv, head_dim]`.

    causal aligns bottom-right. softmax_scale is 1 / sqrt(head_dim) by default; alibi_slopes is `[heads_q]` or
    `[batch, heads_q]` float32. Returns out, of the shape of q; with return_attn_probs (out, lse, None), lse
    `[batch, heads_q, seqlen_q]` float32: there are no probabilities to return. Errors are those of headrace.attention.
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return _result(attention(q, k, v, return_lse=return_attn_probs, **options), return_attn_probs)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **options: Any) -> Any:
    """flash_attn_func with keys and values in kv `[batch, seqlen_k, 2, heads_kv, head_dim]`."""
    return flash_attn_func(q, *_unpack("kv", kv, 2), *arguments, **options)


def flash_attn_qkvpacked_func(qkv: Tensor, *arguments: Any, **options: Any) -> Any:
    """flash_attn_func with all in qkv `[batch, seqlen, 3, heads, head_dim]`."""
    return flash_attn_func(*_unpack("qkv", qkv, 3), *arguments, **options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """flash_attn_func over a ragged batch: q `[total_q, heads_q, head_dim]`, k, v `[total_k, heads_kv, head_dim]`.

    cu_seqlens_q, cu_seqlens_k: `[batch + 1]` int32. max_seqlen_q, max_seqlen_k are not needed and not looked at. With
    block_table `[batch, pages]` int32, k and v are pages `[num_pages, page_size, heads_kv, head_dim]` and cu_seqlens_k
    counts the tokens of each sequence; they are gathered first. lse is `[heads_q, total_q]`.
    """
    if block_table is not None:
        k, v = (_gather(x, block_table, cu_seqlens_k) for x in (k, v))
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    result = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=return_attn_probs, **options)
    return _result(result, return_attn_probs)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **options: Any) -> Any:
    """flash_attn_varlen_func with keys and values in kv `[total_k, 2, heads_kv, head_dim]`."""
    return flash_attn_varlen_func(q, *_unpack("kv", kv, 2), *arguments, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *arguments: Any, **options: Any
) -> Any:
    """flash_attn_varlen_func with all in qkv `[total, 3, heads, head_dim]`."""
    q, k, v = _unpack("qkv", qkv, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *arguments, **options
    )


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
) -> dict[str, Any]:
    return {
        "dropout_p": dropout_p,
        "seed": draw_seed() if dropout_p else 0,
        "scale": softmax_scale,
        "causal": causal,
        "window": window(window_size),
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "deterministic": deterministic,
    }


def _unpack(name: str, packed: Tensor, parts: int) -> Any:
    if packed.ndim < 3 or packed.shape[-3] != parts:
        raise ValueError(f"{name}: has shape {tuple(packed.shape)}; it must be [..., {parts}, heads, head_dim]")
    return packed.unbind(-3)


def _gather(pages: Tensor, block_table: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The tokens of all sequences one behind the other."""
    size, lengths = pages.shape[1], cu_seqlens.diff().tolist()
    tables = (block_table[b, : -(-length // size)].long() for b, length in enumerate(lengths))
    parts = [pages[table].flatten(0, 1)[:length] for table, length in zip(tables, lengths)]
    return torch.cat(parts) if parts else pages.new_empty(0, *pages.shape[2:])


def _result(result: Any, return_attn_probs: bool) -> Any:
    return (*result, None) if return_attn_probs else result
