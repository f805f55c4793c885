"""The backend of calls, where it is not to be chosen by where the arrays are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from . import _binding

_BACKENDS = {"auto": 0, "cpu": 1, "reference": 2, "cuda": 3}


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Calls of this thread inside run on this backend: "auto", "cpu", "cuda", or "reference", the slow float64 oracle."""
    if name not in _BACKENDS:
        raise ValueError(f"backend: is {name!r}; it must be one of {', '.join(_BACKENDS)}")
    before = _binding.exchange_backend(_BACKENDS[name])
    try:
        yield
    finally:
        _binding.exchange_backend(before)
