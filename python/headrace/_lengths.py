"""Lengths of sequences, which the library reads on the host."""

from __future__ import annotations

from typing import Any

import numpy as np


def on_host(name: str, values: Any) -> np.ndarray:
    """cu_seqlens or seqused, anything with integers, as a contiguous NumPy array of int32."""
    if hasattr(values, "detach"):  # a tensor of PyTorch, maybe on a GPU
        values = values.detach().cpu().numpy()
    host = np.asarray(values)
    if host.dtype.kind not in "iu" and host.size:
        raise TypeError(f"{name}: dtype is {host.dtype}; it must be int32")
    if host.ndim != 1:
        raise ValueError(f"{name}: has {host.ndim} dimensions; it must have 1")
    if host.size and not -(2**31) <= host.min() <= host.max() < 2**31:
        raise ValueError(f"{name}: has a value that does not fit int32")
    return np.ascontiguousarray(host, np.int32)
