"""Masks of transformers as what they are made of, instead of a matrix.

transformers describes a mask by a function of (batch, head, query, key) beside a padding mask, and lets each attention
implementation make of it what it needs. The functions of its usual masks are recognised here: causal, windows, packed
sequences. A mask made of those and of padding becomes a PatternMask of O(seqlen) memory, which Headrace turns into its
own options; any other mask becomes the boolean matrix that SDPA gets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import Tensor
from transformers import masking_utils

_and, _window, _two_sided, _remapped, _packed = (
    "and_masks",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "remap_positions_for_packed_sequence",
    "packed_sequence_mask_function",
)


@dataclass
class Pattern:
    """Key j is visible to query i if i + shift - left <= j <= i + shift + right, where the bounds are given, if
    `padding` `[batch, seqlen_k]` shows j, and if `packed` `[batch, seqlen]` has the same number at i and j."""

    left: int | None = None
    right: int | None = None
    packed: Tensor | None = None
    padding: Tensor | None = None
    shift: int = 0
    lengths: dict[str, Tensor] | None = None  # of the ragged call that it becomes; empty: it becomes none

    def meet(self, function: Callable[..., Any]) -> bool:
        """Adds what a function of transformers hides; False if it is none that this module knows."""
        name = function.__qualname__.partition(".")[0]
        if function.__module__ != masking_utils.__name__:
            return False
        if name == "causal_mask_function":
            self.right = 0 if self.right is None else min(self.right, 0)
            return True
        if name == "bidirectional_mask_function":
            return True
        held = dict(zip(function.__code__.co_freevars, (x.cell_contents for x in function.__closure__ or ())))
        if name == _and:
            return all(self.meet(part) for part in held["mask_functions"])
        if name == _remapped:  # positions count from the start of each packed sequence: what is relative stays
            return self.meet(held["mask_function"])
        if name == _window:
            self._bound(held["sliding_window"] - 1)
            return True
        if name == _two_sided:
            self._bound(held["sliding_window"])
            self.right = held["sliding_window"] if self.right is None else min(self.right, held["sliding_window"])
            return True
        if name == _packed and self.packed is None:
            self.packed = held["packed_sequence_mask"]
            return True
        return False

    def _bound(self, left: int) -> None:
        self.left = left if self.left is None else min(self.left, left)


class PatternMask(Tensor):
    """A boolean mask `[batch, 1, seqlen_q, seqlen_k]` that is a Pattern. Whatever but Headrace looks into it, a model
    that slices it for instance, sees the matrix, which is made then."""

    pattern: Pattern
    matrix: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], device: Any, pattern: Pattern, matrix: Callable[[], Tensor]) -> PatternMask:
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)  # type: ignore[attr-defined]
        self.pattern, self.matrix = pattern, matrix
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PatternMask({tuple(self.shape)}, {self.pattern})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def seen(x: Any) -> Any:
            return x.matrix() if isinstance(x, PatternMask) else x

        return function(
            *torch.utils._pytree.tree_map(seen, args), **torch.utils._pytree.tree_map(seen, kwargs or {})
        )


def make_mask(
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    **arguments: Any,
) -> Tensor | None:
    """What transformers calls for the mask of a model (AttentionMaskInterface), with the arguments of its sdpa_mask."""
    given = dict(arguments, batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset)
    given.update(mask_function=mask_function, attention_mask=attention_mask)
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return masking_utils.sdpa_mask(**given)

    def matrix() -> Any:
        return masking_utils.sdpa_mask(**{**given, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})

    if "cache_position" in arguments:  # transformers 4
        positions = arguments["cache_position"]
        q_length, q_offset, device = positions.shape[0], positions[0], positions.device
    else:
        q_length, q_offset, device = arguments["q_length"], arguments.get("q_offset", 0), arguments.get("device", "cpu")
    pattern = Pattern()
    if arguments.get("use_vmap") or not pattern.meet(mask_function):
        return matrix()
    if attention_mask is not None:
        padding = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        padding = torch.nn.functional.pad(padding, (0, kv_length - padding.shape[1]))  # free slots of a static cache
        pattern.padding = None if padding.all() else padding
    pattern.shift = int(q_offset) - kv_offset
    return PatternMask((batch_size, 1, q_length, kv_length), device, pattern, matrix)
