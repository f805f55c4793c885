"""The functions of flash-attn 2.8, computed by Headrace: replacing the import is the port.

    from headrace.flash_attn import flash_attn_func

Names, order and meaning of arguments are those of flash_attn.flash_attn_interface. What differs: `window_size` may hold
any bound, of which -1 alone means none, and dropout draws its seed from PyTorch's CPU generator.
"""

from ._functions import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from ._kvcache import flash_attn_with_kvcache

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
