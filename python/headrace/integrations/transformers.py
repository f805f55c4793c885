"""Headrace as an attention implementation of Hugging Face transformers.

    import headrace.integrations.transformers
    headrace.integrations.transformers.register()
    model = AutoModel.from_pretrained(..., attn_implementation="headrace")

Training, and generation with the caches of transformers. Queries share keys and values as they are (GQA), results
need no transposition, and masks that are causal, windows, padding or packed sequences never become a matrix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..torch._attention import convert_for_autocast
from ..torch._ops import attend
from ..torch._sdpa import draw_seed
from ._pattern_mask import Pattern, PatternMask, make_mask

_REFUSED = ("indices", "block_indices", "sinks")  # keys chosen one by one, and sinks of each token


def register(name: str = "headrace") -> None:
    """Makes `attn_implementation=name` known to transformers (4.53 or later)."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, make_mask)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for the attention of a layer.

    Args:
        query: `[batch, heads_q, seqlen_q, head_dim]`. key, value: `[batch, heads_kv, seqlen_k, head_dim]`.
        attention_mask: what make_mask made, or `[batch|1, heads|1, seqlen_q|1, seqlen_k]` bool (true = visible) or
            additive. Without one, causality is is_causal, by default that of the module, aligned top-left.
        s_aux: sinks `[heads_q]`. position_bias: `[batch|1, heads|1, seqlen_q|1, seqlen_k]`, added to the scores.
        arguments: the rest of what models pass. sliding_window is not looked at: the mask has it.

    Returns:
        (out `[batch, seqlen_q, heads_q, head_dim]`, None): there are no weights to return, and output_attentions
        raises NotImplementedError, as do models that choose single keys or have sinks of each token.
    """
    if arguments.get("output_attentions"):
        raise NotImplementedError("output_attentions: headrace computes no attention weights; load the model as 'eager'")
    for name in _REFUSED:
        if arguments.get(name) is not None:
            raise NotImplementedError(f"{name}: headrace does not know it; load the model as 'eager'")
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap or 0.0}
    if s_aux is not None:
        options["sinks"] = s_aux.float()
    if dropout:
        options.update(dropout_p=dropout, seed=draw_seed())
    if position_bias is not None:
        options["bias"] = position_bias

    q, k, v = convert_for_autocast(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), options)
    if isinstance(attention_mask, PatternMask):
        pattern = attention_mask.pattern
        lengths = None if position_bias is not None else _ragged(pattern, q, k)
        if lengths is not None:
            options.update(_bounds(pattern, 0))
            packed = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
            out = attend(*packed, lengths, False, options)  # type: ignore[arg-type]
            return out.unflatten(0, q.shape[:2]), None
        options.update(_bounds(pattern, k.shape[1] - q.shape[1] - pattern.shift))
        if pattern.packed is not None:
            options["mask"] = attention_mask.matrix()
        elif pattern.padding is not None:
            options["mask"] = pattern.padding[:, None, None, :]
    elif attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        options["causal"] = "top_left" if causal and q.shape[1] > 1 else False
    elif attention_mask.dtype == torch.bool:
        options["mask"] = attention_mask
    elif position_bias is None:
        options["bias"] = attention_mask
    else:
        options["bias"] = attention_mask + position_bias
    if "bias" in options and options["bias"].dtype not in (q.dtype, torch.float32):
        options["bias"] = options["bias"].to(q.dtype)
    return attend(q, k, v, {}, False, options), None  # type: ignore[arg-type]


def _bounds(pattern: Pattern, behind: int) -> dict[str, Any]:
    """The pattern's bounds as options, where Headrace's own alignment, last query to last key, is `behind` of it."""
    left, right = pattern.left, pattern.right
    if right == behind:
        return {"causal": True, "window": (None if left is None else left + behind, None)}
    return {"window": (None if left is None else left + behind, None if right is None else right - behind)}


def _ragged(pattern: Pattern, q: Tensor, k: Tensor) -> dict[str, Tensor] | None:
    """The sequences that padding and packing leave, as the lengths of a ragged call; None where they are none, or
    where a dense call with a mask is the better way."""
    if q.shape[1] == 1 or not q.is_cpu or (pattern.padding is None and pattern.packed is None):
        return None  # one query reads its mask faster than keys are packed; GPU kernels know no ragged batches yet
    if pattern.lengths is None:
        pattern.lengths = _packed_lengths(pattern) if pattern.padding is None else _padded_lengths(pattern, q.shape[1])
    return pattern.lengths or None


def _packed_lengths(pattern: Pattern) -> dict[str, Tensor]:
    """A sequence begins where the number changes, and with each row."""
    packed = pattern.packed
    assert packed is not None
    starts = torch.ones_like(packed, dtype=torch.bool)
    starts[:, 1:] = packed[:, 1:] != packed[:, :-1]
    edges = torch.cat([starts.flatten().nonzero().flatten(), torch.tensor([packed.numel()])]).int()
    return {"cu_seqlens_q": edges, "cu_seqlens_k": edges}


def _padded_lengths(pattern: Pattern, seqlen_q: int) -> dict[str, Tensor]:
    """Each row is three sequences: padding, what is used, padding. Empty where what is used is not in one piece, or
    where the last query that is used does not stand at the last key."""
    padding = pattern.padding
    assert padding is not None
    batch, seqlen_k = padding.shape
    count = padding.sum(1)
    begin = torch.where(count > 0, padding.int().argmax(1), 0)
    end = begin + count
    position = torch.arange(seqlen_k)
    if pattern.packed is not None or not torch.equal(padding, (position >= begin[:, None]) & (position < end[:, None])):
        return {}
    if pattern.left is None and pattern.right is None:  # cross-attention, or queries that see all: each one counts
        begin_q, end_q = torch.zeros_like(begin), torch.full_like(end, seqlen_q)
    else:
        begin_q, end_q = ((x - pattern.shift).clamp(0, seqlen_q) for x in (begin, end))
        if bool((end_q - begin_q > 0).logical_and(end_q + pattern.shift != end).any()):
            return {}
    lengths = {}
    for name, first, last, total in (("q", begin_q, end_q, seqlen_q), ("k", begin, end, seqlen_k)):
        edges = torch.stack([torch.zeros_like(first), first, last], 1) + total * torch.arange(batch)[:, None]
        lengths[f"cu_seqlens_{name}"] = torch.cat([edges.flatten(), torch.tensor([batch * total])]).int()
        used = torch.stack([torch.zeros_like(first), last - first, torch.zeros_like(first)], 1)
        lengths[f"seqused_{name}"] = used.flatten().int()
    return lengths
