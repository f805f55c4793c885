"""One call of the library: an hr_attention that is filled, kept alive and run."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import _abi
from ._arrays import arrays_of
from ._block_mask import BlockMask
from ._options import Bound, Causal

_ONES: tuple[tuple[int, ...], ...] = ((1,) * 4, (1,) * 3, (1,) * 2, (1,), ())
_Memory = ctypes.c_char * len(_abi.TEMPLATE)
_backend: contextvars.ContextVar[int] = contextvars.ContextVar("headrace_backend", default=_abi.BACKEND["auto"])


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Calls inside run on this backend: "auto", "cpu", "cuda", or "reference", the slow float64 oracle."""
    if name not in _abi.BACKEND:
        raise ValueError(f"backend: is {name!r}; it must be one of {', '.join(_abi.BACKEND)}")
    token = _backend.set(_abi.BACKEND[name])
    try:
        yield
    finally:
        _backend.reset(token)


class Call:
    """Tensors and options of one call; `name` and `first` are the argument that all others must match."""

    __slots__ = ("arrays", "memory", "kept")

    def __init__(self, name: str, first: Any) -> None:
        self.arrays = arrays_of(name, first)
        self.memory = _Memory.from_buffer_copy(_abi.TEMPLATE)
        self.kept: dict[str, Any] = {}

    def input(self, name: str, array: Any, rows: bool = False) -> Any:
        """Adds an input tensor. Returns it as the library will read it, maybe a copy; rows: see pack."""
        kept = self.kept[name] = self.arrays.pack(name, array, self.memory, _abi.OFFSET[name], rows)
        return kept

    def rows(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """Adds q, k and v, whose last dimensions must be contiguous. Returns them as `input` does."""
        if self.arrays.pack_alike(q, k, v, self.memory):
            return q, k, v
        return self.input("q", q, True), self.input("k", k, True), self.input("v", v, True)

    def output(self, name: str, shape: tuple[int, ...], code: int) -> Any:
        array = self.kept[name] = self.arrays.empty(shape, code)
        self.describe(name, shape, code, self.arrays.address(array))
        return array

    def output_like(self, name: str, like: Any) -> Any:
        array = self.kept[name] = self.arrays.empty_like(like)
        self.describe(name, tuple(like.shape), self.arrays.code[like.dtype], self.arrays.address(array))
        return array

    def describe(self, name: str, shape: tuple[int, ...], code: int, address: int = 0) -> None:
        """Adds a contiguous tensor at an address, or without data, for a plan."""
        try:
            a, b, c, d = (*shape, *_ONES[len(shape)])  # further dimensions of 1 change no stride
        except (IndexError, ValueError):
            raise ValueError(f"{name}: has {len(shape)} dimensions; it must have 1 to 4") from None
        of_c = d or 1
        of_b = (c or 1) * of_c
        of_a = (b or 1) * of_b
        _abi.TENSOR.pack_into(
            self.memory, _abi.OFFSET[name], address, a, b, c, d, of_a, of_b, of_c, 1, len(shape), code
        )

    def lengths(self, name: str, values: Any) -> None:
        """Adds cu_seqlens or seqused: int32, read on the host. int64 and other integers are converted."""
        host = self.arrays.host(name, values)
        if host.dtype.kind not in "iu" and host.size:
            raise TypeError(f"{name}: dtype is {host.dtype}; it must be int32")
        if host.ndim != 1:
            raise ValueError(f"{name}: has {host.ndim} dimensions; it must have 1")
        if host.size and not -(2**31) <= host.min() <= host.max() < 2**31:
            raise ValueError(f"{name}: has a value that does not fit int32")
        host = self.kept[name] = np.ascontiguousarray(host, np.int32)
        _abi.TENSOR.pack_into(
            self.memory, _abi.OFFSET[name], _abi.address(host), host.size, 0, 0, 0, 1, 0, 0, 0, 1, _abi.INT32
        )

    def options(
        self,
        *,
        causal: Causal = False,
        window: tuple[Bound, Bound] = (None, None),
        scale: float | None = None,
        softcap: float = 0.0,
        bias: Any = None,
        alibi_slopes: Any = None,
        mask: Any = None,
        block_mask: BlockMask | None = None,
        sinks: Any = None,
        dropout_p: float = 0.0,
        seed: int = 0,
        deterministic: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        if bias is not None:
            self.input("bias", bias)
        if alibi_slopes is not None:
            self.input("alibi_slopes", alibi_slopes)
        if mask is not None:
            self.input("mask", mask)
        if sinks is not None:
            self.input("sinks", sinks)
        if block_mask is not None:
            if not isinstance(block_mask, BlockMask):
                raise TypeError(f"block_mask: is a {type(block_mask).__name__}; it must be a headrace.BlockMask")
            self.input("block_mask", block_mask.mask)
            _abi.BLOCKS.pack_into(self.memory, _abi.OFFSET["block_q"], block_mask.block_q, block_mask.block_k)
        try:
            left, right = window
        except (TypeError, ValueError):
            raise ValueError(f"window: is {window!r}; it must be a pair (left, right) of integers or None") from None
        try:
            _abi.OPTIONS.pack_into(
                self.memory,
                _abi.OFFSET["causal"],
                _abi.CAUSAL[causal],
                scale is not None,
                0.0 if scale is None else scale,
                _abi.UNBOUNDED if left is None else left,
                _abi.UNBOUNDED if right is None else right,
                softcap,
                dropout_p,
                seed,
                bool(deterministic),
                bool(batch_invariant),
                self.arrays.threads,
                _backend.get(),
                self.arrays.device,
                self.arrays.device_index,
                self.arrays.stream,
            )
        except (struct.error, KeyError, TypeError):
            _explain_options(causal, left, right, scale, softcap, dropout_p, seed)
            raise

    @contextlib.contextmanager
    def plan(self, direction: int) -> Iterator[ctypes.c_void_p]:
        """The library's plan of this call."""
        plan = ctypes.c_void_p()
        _abi.check(_abi.api.hr_plan_create(self.memory, direction, ctypes.byref(plan)))
        try:
            yield plan
        finally:
            _abi.api.hr_plan_destroy(plan)

    def run(self, function: Any) -> None:
        _abi.check(function(self.memory))


def _explain_options(causal: Any, left: Any, right: Any, scale: Any, softcap: Any, dropout_p: Any, seed: Any) -> None:
    """Says which option did not fit its field."""
    if not isinstance(causal, (bool, np.bool_, str)) or causal not in _abi.CAUSAL:
        raise ValueError(f"causal: is {causal!r}; it must be False, True, 'bottom_right' or 'top_left'")
    for name, value, low, high in [
        ("window_left", left, -(2**63), 2**63),
        ("window_right", right, -(2**63), 2**63),
        ("seed", seed, 0, 2**64),
    ]:
        if value is None and name != "seed":
            continue
        if not hasattr(value, "__index__"):
            raise TypeError(f"{name}: is {value!r}; it must be an integer")
        if not low <= value.__index__() < high:
            raise ValueError(f"{name}: is {value}; it must be at least {low} and below {high}")
    for name, number in [("scale", scale), ("softcap", softcap), ("dropout_p", dropout_p)]:
        if not hasattr(number, "__float__") and not (number is None and name == "scale"):
            raise TypeError(f"{name}: is {number!r}; it must be a number")
