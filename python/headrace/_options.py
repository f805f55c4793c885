"""The options that every call of attention takes, as a type."""

from __future__ import annotations

from typing import Any, Optional, TypedDict, Union

Bound = Optional[int]
Causal = Union[bool, str]


class Options(TypedDict, total=False):
    """See `headrace.attention`, where each option is explained."""

    causal: Causal
    window: tuple[Bound, Bound]
    scale: float | None
    softcap: float
    bias: Any
    alibi_slopes: Any
    mask: Any
    block_mask: Any
    sinks: Any
    dropout_p: float
    seed: int
    deterministic: bool
    batch_invariant: bool
