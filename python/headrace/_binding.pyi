"""The extension: the C interface on arrays (python/binding). Arguments are positional, and all of them are given.

Arrays are those of NumPy, PyTorch, or others in the memory of the CPU with DLPack and the array API. Lengths is a dict of
cu_seqlens_* and seqused_*, options one of headrace._options.Options. heads_first: q, k, v and what is of their shape are
`[batch, heads, seqlen, dim]` tensors of PyTorch, and results are, too.
"""

from collections.abc import Mapping
from typing import Any

version: str
OFFSETS: dict[str, int]  # of the tensors, and the seed, in an hr_attention

def forward(
    q: Any, k: Any, v: Any, lengths: Mapping[str, Any], return_lse: bool, options: Mapping[str, Any], heads_first: bool, /
) -> Any: ...
def backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    lengths: Mapping[str, Any],
    dlse: Any,
    need_dbias: bool,
    need_dsinks: bool,
    options: Mapping[str, Any],
    heads_first: bool,
    /,
) -> dict[str, Any]: ...
def merge_states(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, /) -> tuple[Any, Any]: ...
def dropout_mask(shape: tuple[int, ...], dropout_p: float, seed: int, /) -> Any: ...
def plan(
    q: Any,
    k: Any,
    v: Any,
    lengths: Mapping[str, Any],
    options: Mapping[str, Any],
    backward: bool,
    place: tuple[int, int] | None,
    dlse: bool,
    dbias: bool,
    dsinks: bool,
    /,
) -> tuple[str, str, int, bytes]:
    """Arrays may also be (shape, name of dtype). place: (device, index), by default where the arrays are. Returns the
    report as text and as JSON, the bytes of the workspace, and the hr_attention that was planned."""

def info() -> str: ...
def exchange_backend(backend: int, /) -> int: ...
