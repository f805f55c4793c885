"""Attention and its gradients on arrays of any kind."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _binding
from ._binding import backward, forward
from ._block_mask import BlockMask
from ._options import Bound, Causal, Options

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
    return backward(dout, q, k, v, out, lse, {}, dlse, need_dbias, need_dsinks, options, False)


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
    return backward(dout, q, k, v, out, lse, lengths, dlse, need_dbias, need_dsinks, options, False)


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
    if getattr(out_a, "is_cuda", False) or _requires_grad(out_a, lse_a, out_b, lse_b):
        from .torch._merge import merge_states as merge_tensors

        return merge_tensors(out_a, lse_a, out_b, lse_b)
    return _binding.merge_states(out_a, lse_a, out_b, lse_b)


def dropout_mask(
    batch: int, heads: int, seqlen_q: int, seqlen_k: int, dropout_p: float, seed: int
) -> np.ndarray:
    """What every backend keeps: a NumPy bool array `[batch, heads, seqlen_q, seqlen_k]`, true = kept.

    In a ragged batch, batch is the index of the sequence and positions count inside it. Philox4x32-10 (Salmon et al.,
    Parallel random numbers: as easy as 1, 2, 3, SC 2011). ValueError unless 0 <= dropout_p < 1 and 0 <= seed < 2^64.
    """
    return _binding.dropout_mask((batch, heads, seqlen_q, seqlen_k), dropout_p, seed)


def check() -> None:
    """Waits for PyTorch's current CUDA device, if a program uses one, and raises what went wrong there.

    A call checks lengths before it returns, since it reads them on the host. A kernel that fails does so later, and would
    be reported by whatever uses the device next.

    Raises:
        RuntimeError: a kernel failed.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def result_shapes(q: tuple[int, ...], v: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of out and lse, of those of q and v."""
    return (*q[:-1], v[-1]), (*q[:-3], q[-2], q[-3])


def _differentiable(q: Any, k: Any, v: Any, lengths: dict[str, Any], return_lse: bool, options: Any) -> Any:
    if _wants_gradients(q, k, v, options):
        from .torch import attend

        return attend(q, k, v, lengths, return_lse, options)
    return forward(q, k, v, lengths, return_lse, options, False)


def _wants_gradients(q: Any, k: Any, v: Any, options: Any) -> bool:
    return _requires_grad(q, k, v, options.get("bias"), options.get("sinks"))


def _requires_grad(first: Any, *others: Any) -> bool:
    if isinstance(first, np.ndarray):
        return False
    for array in (first, *others):
        if getattr(array, "requires_grad", False):
            return sys.modules["torch"].is_grad_enabled()
    return False
