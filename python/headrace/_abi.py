"""The C interface (headrace.h), through ctypes: structs, functions, and the exceptions that statuses become.

ctypes releases the GIL while a function of the library runs.
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_char, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

FLOAT32, FLOAT16, BFLOAT16, FLOAT64, BOOL, INT32, INT64 = range(7)
CAUSAL = {False: 0, True: 1, "bottom_right": 1, "top_left": 2}
BACKEND = {"auto": 0, "cpu": 1, "reference": 2, "cuda": 3}
DEVICE = {"cpu": 0, "cuda": 1}
FORWARD, BACKWARD = 0, 1
UNBOUNDED = 2**63 - 1


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("shape", c_int64 * 4),
        ("stride", c_int64 * 4),
        ("ndim", c_int32),
        ("dtype", c_int32),
    ]


def _tensors(names: str) -> list[tuple[str, Any]]:
    return [(name, Tensor) for name in names.split()]


class Attention(ctypes.Structure):
    """hr_attention. Filled by `struct`, which is several times faster than field by field; see _call.py."""

    _fields_ = [
        ("struct_size", c_size_t),
        *_tensors("q k v out lse bias mask alibi_slopes sinks block_mask"),
        ("block_q", c_int64),
        ("block_k", c_int64),
        *_tensors("cu_seqlens_q cu_seqlens_k seqused_q seqused_k dout dlse dq dk dv dbias dsinks"),
        ("causal", c_int32),
        ("has_scale", c_int32),
        ("scale", c_double),
        ("window_left", c_int64),
        ("window_right", c_int64),
        ("softcap", c_double),
        ("dropout_p", c_double),
        ("seed", c_uint64),
        ("deterministic", c_int32),
        ("batch_invariant", c_int32),
        ("threads", c_int32),
        ("backend", c_int32),
        ("device", c_int32),
        ("device_index", c_int32),
        ("stream", c_void_p),
    ]


OFFSET: dict[str, int] = {field[0]: getattr(Attention, field[0]).offset for field in Attention._fields_}
TENSOR = struct.Struct("@P4q4qii")
ROWS = struct.Struct("@" + 3 * "P4q4qii")  # q, k, v
BLOCKS = struct.Struct("@qq")  # block_q, block_k
OPTIONS = struct.Struct("@iidqqddQiiiiiiP")  # from causal to stream
assert TENSOR.size == ctypes.sizeof(Tensor)
assert OFFSET["q"] + ROWS.size == OFFSET["out"]
assert OFFSET["causal"] + OPTIONS.size == ctypes.sizeof(Attention)


def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(Path(__file__).with_name("libheadrace.so")))
    pointer = c_void_p
    functions: list[tuple[Any, ...]] = [
        ("hr_attention_init", None, pointer),
        ("hr_plan_create", c_int32, pointer, c_int32, ctypes.POINTER(c_void_p)),
        ("hr_plan_destroy", None, pointer),
        ("hr_plan_workspace_bytes", c_size_t, pointer),
        ("hr_plan_explain", c_char_p, pointer),
        ("hr_plan_explain_json", c_char_p, pointer),
        ("hr_forward", c_int32, pointer),
        ("hr_backward", c_int32, pointer),
        ("hr_merge_states", c_int32, *[pointer] * 6),
        ("hr_dropout_mask", c_int32, pointer, c_double, c_uint64),
        ("hr_info", c_char_p),
        ("hr_version", c_char_p),
        ("hr_last_error", c_char_p),
    ]
    for name, result, *arguments in functions:
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


api = _load()


def _template() -> bytes:
    attention = Attention()
    api.hr_attention_init(ctypes.byref(attention))
    if attention.struct_size != ctypes.sizeof(Attention):
        raise ImportError(
            f"libheadrace.so: hr_attention has {attention.struct_size} bytes, this package expects "
            f"{ctypes.sizeof(Attention)}; they are of different versions"
        )
    return bytes(attention)


TEMPLATE = _template()
_EXCEPTIONS = {1: TypeError, 2: ValueError, 3: NotImplementedError}


def check(status: int) -> None:
    """Raises what a status other than HR_OK stands for, with the sentence of hr_last_error."""
    if status:
        raise _EXCEPTIONS.get(status, RuntimeError)(api.hr_last_error().decode())


def address(array: np.ndarray) -> int:
    """Where element [0, 0, ...] of a NumPy array lies."""
    try:
        # Three times as fast as what always works.
        return ctypes.addressof(c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):  # read-only, not contiguous, empty, or a dtype of somebody else's
        return array.__array_interface__["data"][0]
