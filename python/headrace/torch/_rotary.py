"""Rotary position embedding (Su et al., RoFormer, 2021)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(
    seqlen: int, rotary_dim: int, base: float = 10000.0, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each `[seqlen, rotary_dim / 2]` float32: angle = position / base^(2 i / rotary_dim)."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
    angles = torch.arange(seqlen, dtype=torch.float64, device=device)[:, None] / base**exponents
    return angles.cos().float(), angles.sin().float()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotates the first 2 n of the last dimension of x `[batch, seqlen, heads, dim]` by cos and sin, `[seqlen, n]` or
    `[batch, seqlen, n]`. interleaved pairs neighbours (GPT-J), else the halves (GPT-NeoX, Llama). Computed in float32
    at least, and rounded to the dtype of x once."""
    n = cos.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(wide)[..., None, :], sin.to(wide)[..., None, :]
    rotated, rest = x[..., : 2 * n].to(wide), x[..., 2 * n :]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        rotated = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    else:
        a, b = rotated[..., :n], rotated[..., n:]
        rotated = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    return torch.cat([rotated.to(x.dtype), rest], -1)
