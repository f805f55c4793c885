"""Block-sparse visibility."""

from __future__ import annotations

from typing import Any


class BlockMask:
    """Which blocks of the score matrix are visible; hidden ones cost nothing.

    mask: bool `[1|batch, 1|heads_q, ceil(seqlen_q / block_q), ceil(seqlen_k / block_k)]`, an array of the kind of q;
    true = visible. block_q, block_k: rows and keys of a block, any integers from 1 on.

    Raises ValueError for a block size below 1; the shape is checked by the call.
    """

    __slots__ = ("mask", "block_q", "block_k")

    def __init__(self, mask: Any, block_q: int, block_k: int) -> None:
        for name, size in (("block_q", block_q), ("block_k", block_k)):
            if not 1 <= size < 2**63:
                raise ValueError(f"{name}: is {size}; it must be at least 1")
        self.mask, self.block_q, self.block_k = mask, int(block_q), int(block_k)

    def __repr__(self) -> str:
        return f"BlockMask({'x'.join(map(str, self.mask.shape))}, block_q={self.block_q}, block_k={self.block_k})"
