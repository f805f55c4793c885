"""Headrace: exact, IO-aware attention for NumPy, PyTorch and whatever else speaks DLPack.

    import headrace as hr
    out = hr.attention(q, k, v, causal=True)                # [batch, seqlen, heads, dim]

`headrace.torch` has the same with autograd and torch.compile, `headrace.flash_attn` the names of flash-attn,
`headrace.integrations.transformers` an attention implementation for transformers, `headrace.jax` an operation of XLA.
"""

from . import _binding
from ._attention import (
    attention,
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
    check,
    dropout_mask,
    merge_states,
)
from ._block_mask import BlockMask
from ._options import Options
from ._plan import Plan, explain, info

__version__ = _binding.version
__all__ = [
    "BlockMask",
    "Options",
    "Plan",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "check",
    "dropout_mask",
    "explain",
    "info",
    "merge_states",
]
