"""What a call would do, and what the machine offers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from . import _binding
from ._options import Options

if TYPE_CHECKING:
    from typing_extensions import Unpack


_DEVICES = {"cpu": 0, "cuda": 1}


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
        name = str(dtype).rpartition(".")[2]  # "torch.float16" too
        if name not in ("float32", "float16", "bfloat16", "float64"):
            raise TypeError(f"dtype: is {dtype!r}; it must be one of float32, float16, bfloat16, float64")
        q, k, v = (q, name), (k, name), (v, name)
    place = None
    if device is not None:
        kind, _, index = device.partition(":")
        if kind not in _DEVICES or not (index or "0").isdigit():
            raise ValueError(f"device: is {device!r}; it must be 'cpu', 'cuda' or 'cuda:N'")
        if kind == "cpu" or not getattr(q, "is_cuda", False):
            place = (_DEVICES[kind], int(index or 0))
    text, details, workspace_bytes, _ = _binding.plan(q, k, v, lengths, options, backward, place, False, False, False)
    return Plan(text, json.loads(details), workspace_bytes)


def info() -> dict[str, Any]:
    """What this machine offers: version, SIMD targets, threads, GPUs and their precompiled kernels."""
    return json.loads(_binding.info())
