"""What a call would do, and what the machine offers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _abi
from ._attention import lse_code, prepare, result_shapes
from ._call import Call
from ._options import Options

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Plan:
    """The report of `explain`: str(plan) as text, plan.details as a dict, plan.workspace_bytes."""

    __slots__ = ("details", "workspace_bytes", "_text")

    def __init__(self, text: str, details: dict[str, Any], workspace_bytes: int) -> None:
        self._text, self.details, self.workspace_bytes = text, details, workspace_bytes

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"<headrace.Plan>\n{self._text}"


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    device: str | None = None,
    dtype: Any = "float32",
    backward: bool = False,
    **options: Unpack[Options],
) -> Plan:
    """Plans a call without running it: kernel, tiles, work, bytes moved, and why no faster kernel was chosen.

    Args:
        q, k, v: the arrays of `attention`, or their shapes as tuples.
        cu_seqlens_q, cu_seqlens_k: for a ragged batch, as in `attention_varlen`.
        device: "cpu", "cuda" or "cuda:N"; by default where the arrays are, else the CPU.
        dtype: of arrays that are given by shape: float32, float16, bfloat16 or float64, by name.
        backward: plan the backward pass.
        options: those of `attention`.

    Errors are those of the call itself.
    """
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    lengths = {name: x for name, x in lengths.items() if x is not None}
    if isinstance(q, tuple):
        code = _dtype_code(dtype)
        call = Call("q", np.empty(0))
        for name, values in lengths.items():
            call.lengths(name, values)
        for name, shape in (("q", q), ("k", k), ("v", v)):
            call.describe(name, shape, code)
    else:
        call, q, k, v = prepare(q, k, v, lengths)
        code = call.arrays.code[q.dtype]
        q, k, v = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    if device is not None:
        kind, _, index = device.partition(":")
        if kind not in _abi.DEVICE or not (index or "0").isdigit():
            raise ValueError(f"device: is {device!r}; it must be 'cpu', 'cuda' or 'cuda:N'")
        if kind == "cpu" or not call.arrays.device:
            call.arrays.device, call.arrays.device_index = _abi.DEVICE[kind], int(index or 0)
    call.options(**options)
    out_shape, lse_shape = result_shapes(q, v)
    call.describe("out", out_shape, code)
    call.describe("lse", lse_shape, lse_code(code))
    if backward:
        for name, like in (("dq", q), ("dk", k), ("dv", v)):
            call.describe(name, like, code)
        call.describe("dout", out_shape, code)
    with call.plan(_abi.BACKWARD if backward else _abi.FORWARD) as plan:
        return Plan(
            _abi.api.hr_plan_explain(plan).decode(),
            json.loads(_abi.api.hr_plan_explain_json(plan)),
            _abi.api.hr_plan_workspace_bytes(plan),
        )


def info() -> dict[str, Any]:
    """What this machine offers: version, SIMD targets, threads, GPUs and their precompiled kernels."""
    return json.loads(_abi.api.hr_info())


def _dtype_code(dtype: Any) -> int:
    name = str(dtype).rpartition(".")[2]  # "torch.float16" too
    names = ["float32", "float16", "bfloat16", "float64"]
    if name not in names:
        raise TypeError(f"dtype: is {dtype!r}; it must be one of {', '.join(names)}")
    return names.index(name)
