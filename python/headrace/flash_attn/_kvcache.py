"""Attention to a cache of keys and values, which a call may extend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _attention
from ..torch import apply_rotary
from ._functions import window


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of q `[batch, seqlen_q, heads_q, head_dim]` to the first tokens of a cache. No gradients.

    Args:
        k_cache, v_cache: `[batch_cache, capacity, heads_kv, head_dim]`; with block_table `[batch, pages]` int32 they are
            pages `[num_pages, page_size, heads_kv, head_dim]`, which each call gathers into one tensor. Entries of the
            table that no length reaches may hold anything.
        k, v: `[batch, seqlen_new, heads_kv, head_dim]`, written into the cache behind its tokens, and attended to.
        rotary_cos, rotary_sin: `[positions, rotary_dim / 2]`. k is rotated at the positions that it takes, q with causal
            or a window at those of the last tokens, else all of it at cache_seqlens. They need k.
        cache_seqlens: how many tokens the cache holds before this call, an int or `[batch]`; its capacity by default.
        cache_batch_idx: `[batch]`, which entries of the cache are meant; not with block_table.
        cache_leftpad: `[batch]`, where the tokens of each sequence begin.
        num_splits: not looked at; Headrace chooses.
        Others as in flash_attn_func.

    Returns:
        out `[batch, seqlen_q, heads_q, head_dim]`; with return_softmax_lse (out, lse).

    Raises ValueError where the new tokens do not fit, and for arguments that exclude each other. Lengths are read on the
    host: in GPU memory that costs a synchronisation.
    """
    batch, seqlen_q = q.shape[:2]
    paged = block_table is not None
    capacity = k_cache.shape[1] * (block_table.shape[1] if block_table is not None else 1)
    if paged and (cache_batch_idx is not None or cache_leftpad is not None):
        raise ValueError("block_table: is given together with cache_batch_idx or cache_leftpad")
    if (k is None) != (v is None):
        raise ValueError("k, v: only one of them is given")
    if k is None and rotary_cos is not None:
        raise ValueError("rotary_cos: is given without k")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens: is None; with k it must say where the new tokens go")
    entries = torch.arange(batch, device=q.device) if cache_batch_idx is None else cache_batch_idx.long()
    held = torch.as_tensor(capacity if cache_seqlens is None else cache_seqlens, device=q.device).long().expand(batch)
    local = causal or tuple(window_size) != (-1, -1)

    if k is not None and v is not None:
        new = k.shape[1]
        if batch and int(held.max()) + new > capacity:
            raise ValueError(f"cache_seqlens: is up to {int(held.max())}; {new} new tokens do not fit {capacity}")
        positions = held[:, None] + torch.arange(new, device=q.device)
        if rotary_cos is not None and rotary_sin is not None:
            at = held[:, None] + torch.arange(seqlen_q if local else 1, device=q.device)
            q = apply_rotary(q, rotary_cos[at], rotary_sin[at], rotary_interleaved)
            k = apply_rotary(k, rotary_cos[positions], rotary_sin[positions], rotary_interleaved)
        if block_table is not None:
            size = k_cache.shape[1]
            place = block_table.long().gather(1, positions // size), positions % size
        else:
            place = entries[:, None], positions
        k_cache[place], v_cache[place] = k, v
        held = held + new

    if block_table is not None:
        pages = block_table.long().clamp(0, k_cache.shape[0] - 1)  # also where no length reaches
        keys, values = (x[pages].flatten(1, 2) for x in (k_cache, v_cache))
    elif cache_batch_idx is not None:
        keys, values = k_cache[entries], v_cache[entries]
    else:
        keys, values = k_cache[:batch], v_cache[:batch]
    options: dict[str, Any] = {"scale": softmax_scale, "causal": causal, "window": window(window_size)}
    options.update(softcap=softcap, alibi_slopes=alibi_slopes)
    if cache_leftpad is not None:
        options["mask"] = (torch.arange(capacity, device=q.device) >= cache_leftpad[:, None])[:, None, None, :]
    # A full cache is a dense call, which more backends know.
    lengths = {} if k is None and cache_seqlens is None else {"seqused_k": held}
    return _attention.forward(q, keys, values, lengths, return_softmax_lse, options, False)
