"""From padded batches to packed tokens and back: the functions of flash_attn.bert_padding."""

from __future__ import annotations

import torch
from torch import Tensor


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the tokens of hidden_states `[batch, seqlen, ...]` where attention_mask `[batch, seqlen]` (bool or 0/1) is
    set, or unused_mask, whose tokens are packed but not counted as used.

    Returns (tokens `[total, ...]`, their indices in the flattened batch `[total]`, cu_seqlens `[batch + 1]` int32,
    the largest length, used lengths `[batch]` int32). Differentiable.
    """
    used = attention_mask.bool()
    kept = used if unused_mask is None else used | unused_mask.bool()
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, used.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of unpad_input: `[total, ...]` to `[batch, seqlen, ...]`, zeros elsewhere. Differentiable."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """x[indices]."""
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, size: int) -> Tensor:
    """Zeros `[size, ...]` with values `[total, ...]` at indices `[total]`."""
    return values.new_zeros(size, *values.shape[1:]).index_copy(0, indices, values)
