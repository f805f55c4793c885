"""Headrace in PyTorch: autograd, torch.compile, vmap, autocast.

    from headrace.torch import attention
    out = attention(q, k, v, causal=True)                   # [batch, seqlen, heads, dim]

`scaled_dot_product_attention` takes the arguments of torch.nn.functional; `register` makes Headrace a flash-attention
implementation of PyTorch itself, where PyTorch has a registry for them.
"""

from ._attention import attention, attention_varlen
from ._flash_impl import register
from ._module import SelfAttention
from ._ops import attend
from ._rotary import apply_rotary, rotary_tables
from ._sdpa import scaled_dot_product_attention

__all__ = [
    "SelfAttention",
    "apply_rotary",
    "attend",
    "attention",
    "attention_varlen",
    "register",
    "rotary_tables",
    "scaled_dot_product_attention",
]
