"""Attention and its gradients on arrays of any kind."""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _abi
from ._arrays import NumpyArrays, arrays_of
from ._block_mask import BlockMask
from ._call import Call
from ._options import Bound, Causal, Options

if TYPE_CHECKING:
    from typing_extensions import Unpack

_LAYOUT = {4: "[batch, seqlen, heads, dim]", 3: "[total, heads, dim]"}


def attention(
    q: Any,
    k: Any,
    v: Any,
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
    return_lse: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
) -> Any:
    """Exact attention: softmax(scale q k^T) v, with O(seqlen) memory.

    Arrays are NumPy arrays, PyTorch tensors (CPU, CUDA) or other CPU arrays with DLPack, all of one kind and on one
    device; the results are of that kind. Any strides. T is the dtype of q: float32, float16, bfloat16 (in NumPy that of
    ml_dtypes) or float64. `1|n` is 1, which broadcasts, or n.

    Args:
        q: `[batch, seqlen_q, heads_q, head_dim]` T.
        k: `[batch, seqlen_k, heads_kv, head_dim]` T; heads_q is a multiple of heads_kv.
        v: `[batch, seqlen_k, heads_kv, value_dim]` T.
        causal: True or "bottom_right": query i sees the keys j <= i + seqlen_k - seqlen_q; "top_left": j <= i.
        window: (left, right): key j is visible if i + shift - left <= j <= i + shift + right, with the shift of
            `causal`. None = no bound; a negative number is a bound like any other.
        scale: the factor of q k^T, any finite number; 1 / sqrt(head_dim) by default.
        softcap: c > 0 turns scores s into c tanh(s / c); 0 is none.
        bias: `[1|batch, 1|heads_q, 1|seqlen_q, 1|seqlen_k]` float32 or T, added to the scores; -inf hides a key.
        alibi_slopes: `[heads_q]` or `[batch, heads_q]` float32: subtracts slope |i + seqlen_k - seqlen_q - j|.
        mask: bool, the shapes of bias; true = visible. All masks that are given must agree.
        block_mask: a BlockMask.
        sinks: `[heads_q]` float32, logits that take probability and have no value.
        dropout_p, seed: 0 <= p < 1, and 64 bits that alone decide, with the position, what is dropped.
        return_lse: also return the log-sum-exp of the scores (natural logarithm).
        deterministic: the same bits every run; a CPU always gives them.
        batch_invariant: the bits of a row do not depend on the rest of the batch.

    Returns:
        out `[batch, seqlen_q, heads_q, value_dim]` T; with return_lse (out, lse), lse
        `[batch, heads_q, seqlen_q]` float32 (float64 where T is). A row that sees no key: out 0, lse -inf.
        PyTorch tensors that require gradients get them, as from `headrace.torch.attention`.

    Raises:
        TypeError: a wrong kind of array or dtype. ValueError: a shape, range or device. NotImplementedError: what a
        backend refuses. RuntimeError: memory or a device failed. The message names the argument.

    Source: Dao et al., FlashAttention (2022); Milakov and Gimelshein, Online normalizer calculation for softmax (2018).
    """
    options = {
        "causal": causal,
        "window": window,
        "scale": scale,
        "softcap": softcap,
        "bias": bias,
        "alibi_slopes": alibi_slopes,
        "mask": mask,
        "block_mask": block_mask,
        "sinks": sinks,
        "dropout_p": dropout_p,
        "seed": seed,
        "deterministic": deterministic,
        "batch_invariant": batch_invariant,
    }
    return _differentiable(q, k, v, {}, return_lse, options)


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Any:
    """`attention` over a ragged batch: the tokens of all sequences packed, without padding.

    Args:
        q: `[total_q, heads_q, head_dim]` T. k, v: `[total_k, heads_kv, head_dim or value_dim]` T.
        cu_seqlens_q, cu_seqlens_k: `[batch + 1]` int32, where each sequence begins: non-decreasing, first 0, last at
            most the total. int64 is converted. They are read on the host: in GPU memory that costs a synchronisation.
        options: those of `attention`. bias and mask are `[1|batch, 1|heads_q, 1|n, 1|m]`, indexed inside each
            sequence, n and m being at least the longest lengths.

    Returns:
        out `[total_q, heads_q, value_dim]` T; with return_lse (out, lse), lse `[heads_q, total_q]`. Tokens behind
        the last sequence: out 0, lse -inf. Errors are those of `attention`.
    """
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return _differentiable(q, k, v, lengths, return_lse, options)


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    need_dbias: bool = False,
    need_dsinks: bool = False,
    **options: Unpack[Options],
) -> dict[str, Any]:
    """The gradients of `attention`.

    Args:
        dout: the gradient of out, of its shape and dtype.
        q, k, v, options: as in the forward call, with the same seed.
        out, lse: what the forward call returned.
        dlse: the gradient that reaches lse, of its shape and dtype; none by default.
        need_dbias, need_dsinks: also compute the gradient of bias, summed over the dimensions in which bias has size
            1, and of sinks.

    Returns:
        A dict with dq, dk, dv, and dbias, dsinks where asked for, of the shapes and dtypes of their inputs.
        ValueError where a gradient is asked for without its input; other errors are those of `attention`.
    """
    return backward(dout, q, k, v, out, lse, {}, dlse, need_dbias, need_dsinks, options)


def attention_varlen_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    dlse: Any = None,
    need_dbias: bool = False,
    need_dsinks: bool = False,
    **options: Unpack[Options],
) -> dict[str, Any]:
    """The gradients of `attention_varlen`: as `attention_backward`. Those of tokens of no sequence are 0."""
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return backward(dout, q, k, v, out, lse, lengths, dlse, need_dbias, need_dsinks, options)


def merge_states(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """Merges attention over two disjoint sets of keys into attention over both.

    lse = log(exp(lse_a) + exp(lse_b)), out = the mean of out_a and out_b, weighted by exp(lse_a) and exp(lse_b).

    Args:
        out_a, out_b: `[batch, seqlen_q, heads, value_dim]` T. lse_a, lse_b: `[batch, heads, seqlen_q]` float32
            (float64 where T is). Any strides. PyTorch tensors may be on a GPU, and those that require gradients get
            them.

    Returns:
        (out, lse). Where one lse is -inf the other side comes back bit for bit; both -inf give (0, -inf).
    """
    arrays = arrays_of("out_a", out_a)
    if arrays.device or _requires_grad(out_a, lse_a, out_b, lse_b):
        from .torch._merge import merge_states as merge_tensors

        return merge_tensors(out_a, lse_a, out_b, lse_b)
    size = _abi.TENSOR.size
    buffer = bytearray(6 * size)
    inputs = (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b))
    kept = [arrays.pack(name, x, buffer, i * size, name[0] == "o") for i, (name, x) in enumerate(inputs)]
    out, lse = (arrays.empty(tuple(x.shape), arrays.code[x.dtype]) for x in kept[:2])
    for i, (name, x) in enumerate((("out", out), ("lse", lse)), start=4):
        arrays.pack(name, x, buffer, i * size, False)
    tensors = (_abi.Tensor * 6).from_buffer(buffer)
    _abi.check(_abi.api.hr_merge_states(*map(ctypes.byref, tensors)))
    return arrays.result(out), arrays.result(lse)


def dropout_mask(
    batch: int, heads: int, seqlen_q: int, seqlen_k: int, dropout_p: float, seed: int
) -> np.ndarray:
    """What every backend keeps: a NumPy bool array `[batch, heads, seqlen_q, seqlen_k]`, true = kept.

    In a ragged batch, batch is the index of the sequence and positions count inside it. Philox4x32-10 (Salmon et al.,
    Parallel random numbers: as easy as 1, 2, 3, SC 2011). ValueError unless 0 <= dropout_p < 1 and 0 <= seed < 2^64.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed: is {seed}; it must be at least 0 and below 2^64")
    keep = np.empty((batch, heads, seqlen_q, seqlen_k), np.bool_)
    buffer = bytearray(_abi.TENSOR.size)
    NumpyArrays().pack("keep", keep, buffer, 0, False)
    _abi.check(_abi.api.hr_dropout_mask(ctypes.byref(_abi.Tensor.from_buffer(buffer)), dropout_p, seed))
    return keep


def prepare(q: Any, k: Any, v: Any, lengths: dict[str, Any]) -> tuple[Call, Any, Any, Any]:
    """A call with what both passes read, and q, k, v as the library will read them."""
    call = Call("q", q)
    q, k, v = call.rows(q, k, v)
    if lengths or not q.ndim == k.ndim == v.ndim == 4:
        check_ranks(q, k, v, "cu_seqlens_q" in lengths)
        for name, values in lengths.items():
            call.lengths(name, values)
    return call, q, k, v


def check_ranks(q: Any, k: Any, v: Any, ragged: bool) -> None:
    ndim = 3 if ragged else 4
    if not q.ndim == k.ndim == v.ndim == ndim:
        name, array = next(x for x in (("q", q), ("k", k), ("v", v)) if x[1].ndim != ndim)
        raise ValueError(f"{name}: has {array.ndim} dimensions; it must have {ndim}: {_LAYOUT[ndim]}")


def result_shapes(q: tuple[int, ...], v: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of out and lse, of those of q and v."""
    return (*q[:-1], v[-1]), (*q[:-3], q[-2], q[-3])


def lse_code(code: int) -> int:
    return _abi.FLOAT64 if code == _abi.FLOAT64 else _abi.FLOAT32


def _differentiable(q: Any, k: Any, v: Any, lengths: dict[str, Any], return_lse: bool, options: Any) -> Any:
    if _wants_gradients(q, k, v, options):
        from .torch import attend

        return attend(q, k, v, lengths, return_lse, options)
    return forward(q, k, v, lengths, return_lse, options)


def forward(q: Any, k: Any, v: Any, lengths: dict[str, Any], return_lse: bool, options: Any) -> Any:
    """The forward pass; lengths are cu_seqlens_* and seqused_*, those that are given."""
    call, q, k, v = prepare(q, k, v, lengths)
    call.options(**options)
    code = call.arrays.code[q.dtype]
    shape, value_dim = tuple(q.shape), v.shape[-1]  # slices of a torch.Size are slow
    out = call.output_like("out", q) if shape[-1] == value_dim else call.output("out", (*shape[:-1], value_dim), code)
    if not return_lse:
        call.run(_abi.api.hr_forward)
        return call.arrays.result(out)
    lse = call.output("lse", (*shape[:-3], shape[-2], shape[-3]), lse_code(code))
    call.run(_abi.api.hr_forward)
    return call.arrays.result(out), call.arrays.result(lse)


def backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    lengths: dict[str, Any],
    dlse: Any,
    need_dbias: bool,
    need_dsinks: bool,
    options: Any,
) -> dict[str, Any]:
    """The backward pass; lengths as in forward."""
    call, q, k, v = prepare(q, k, v, lengths)
    call.options(**options)
    call.input("out", out, True)
    call.input("lse", lse)
    call.input("dout", dout, True)
    if dlse is not None:
        call.input("dlse", dlse)
    gradients = {"dq": q, "dk": k, "dv": v}
    for wanted, name in ((need_dbias, "bias"), (need_dsinks, "sinks")):
        if wanted:
            if name not in call.kept:
                raise ValueError(f"need_d{name}: is True, but there is no {name}")
            gradients[f"d{name}"] = call.kept[name]
    results = {name: call.output_like(name, like) for name, like in gradients.items()}
    call.run(_abi.api.hr_backward)
    return {name: call.arrays.result(array) for name, array in results.items()}


def _wants_gradients(q: Any, k: Any, v: Any, options: Any) -> bool:
    return _requires_grad(q, k, v, options.get("bias"), options.get("sinks"))


def _requires_grad(first: Any, *others: Any) -> bool:
    if isinstance(first, np.ndarray):
        return False
    for array in (first, *others):
        if getattr(array, "requires_grad", False):
            return sys.modules["torch"].is_grad_enabled()
    return False
