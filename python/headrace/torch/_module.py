"""Self-attention as a module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from .._options import Options
from ._attention import attention, attention_varlen
from ._rotary import apply_rotary, rotary_tables
from ._sdpa import draw_seed

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SelfAttention(nn.Module):
    """Multi-head self-attention with grouped queries and rotary positions.

    Args:
        embed_dim: features of a token.
        num_heads, num_kv_heads: query heads, and key-value heads (all by default); the first a multiple of the second.
        head_dim: embed_dim / num_heads by default.
        bias: biases of the projections.
        dropout_p: of the attention weights, in training only.
        rotary_base: base of rotary positions, None for none. rotary_dim: the features of a head that rotate, all by
            default.
        options: those of `headrace.attention` for every call, as causal=True.
    """

    def __init__(  # type: ignore[misc]
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        dropout_p: float = 0.0,
        rotary_base: float | None = None,
        rotary_dim: int | None = None,
        device: object = None,
        dtype: object = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__()
        num_kv_heads = num_kv_heads or num_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads: is {num_heads}; it must be a multiple of num_kv_heads = {num_kv_heads}")
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(f"embed_dim: is {embed_dim}; without head_dim it must be a multiple of num_heads = {num_heads}")
        self.head_dim = head_dim or embed_dim // num_heads
        self.rotary_base, self.rotary_dim = rotary_base, rotary_dim or self.head_dim
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(f"rotary_dim: is {self.rotary_dim}; it must be even and at most head_dim = {self.head_dim}")
        self.dropout_p, self.options = dropout_p, options
        self.split = [num_heads, num_kv_heads, num_kv_heads]
        self.qkv = nn.Linear(embed_dim, sum(self.split) * self.head_dim, bias, device=device, dtype=dtype)  # type: ignore[arg-type]
        self.out = nn.Linear(num_heads * self.head_dim, embed_dim, bias, device=device, dtype=dtype)  # type: ignore[arg-type]

    def forward(
        self, x: Tensor, cu_seqlens: Tensor | None = None, positions: Tensor | None = None, **options: Unpack[Options]
    ) -> Tensor:
        """x `[batch, seqlen, embed_dim]`, or `[total, embed_dim]` with cu_seqlens `[batch + 1]` int32. positions: of
        the tokens for the rotation, `[seqlen]` or `[batch, seqlen]` (ragged: `[total]`, required with rotary_base);
        0, 1, ... by default. options: of this call, over those of the module. Returns the shape of x."""
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(self.split, -2)
        if self.rotary_base is not None:
            if positions is None and cu_seqlens is not None:
                raise ValueError("positions: is None; a ragged batch needs the position of each token")
            length = x.shape[-2] if positions is None else int(positions.max()) + 1 if positions.numel() else 0
            tables = rotary_tables(length, self.rotary_dim, self.rotary_base, x.device)
            cos, sin = tables if positions is None else (table[positions] for table in tables)
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        merged: Options = {**self.options, **options}  # type: ignore[typeddict-item]
        if self.training and self.dropout_p:
            merged["dropout_p"] = self.dropout_p
            merged.setdefault("seed", draw_seed())  # type: ignore[typeddict-item]
        if cu_seqlens is None:
            out = attention(q, k, v, **merged)
        else:
            out = attention_varlen(q, k, v, cu_seqlens, cu_seqlens, **merged)
        return self.out(out.flatten(-2))
