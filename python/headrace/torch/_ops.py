"""Custom operators of PyTorch, with all that a transformation of PyTorch asks of an operator: a fake kernel
(torch.compile, export), a formula for autograd, and a rule for vmap.

headrace::attention is what programs call. Where PyTorch has taken gradients apart, it is headrace::attention_forward and
headrace::attention_backward, which have no formula and so cost a compiled program half as much to call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from .. import _attention
from .._attention import result_shapes
from .._block_mask import BlockMask
from .._options import Options

# Optional tensors and options of both operators, in the order of their schemas.
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
_TENSORS = ("bias", "mask", "alibi_slopes", "sinks", "block_mask", *_LENGTHS, "seed_tensor")
_OPTIONS = (
    "int block_q, int block_k, str causal, int? window_left, int? window_right, float? scale, float softcap, "
    "float dropout_p, int seed, bool deterministic, bool batch_invariant"
)
# No argument has a default, so that every rule below sees all of them.
_COMMON = ", ".join(f"Tensor? {name}" for name in _TENSORS) + ", " + _OPTIONS
_FIRST_OPTION = 3 + len(_TENSORS)
_GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")  # what backward returns, in this order

for _name in ("attention", "attention_forward"):
    library.define(f"headrace::{_name}", f"(Tensor q, Tensor k, Tensor v, {_COMMON}) -> (Tensor out, Tensor lse)")
# A gradient that was not asked for is a tensor without elements: operators cannot return None.
library.define(
    "headrace::attention_backward",
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool need_dbias, bool need_dsinks, "
    f"Tensor q, Tensor k, Tensor v, {_COMMON}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
)
_attention_op = torch.ops.headrace.attention.default
_forward_op = torch.ops.headrace.attention_forward.default
_backward_op = torch.ops.headrace.attention_backward.default


def attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: dict[str, Any], return_lse: bool, options: Options, heads_first: bool = False
) -> Any:
    """headrace.attention and attention_varlen for PyTorch; `seed` may be a tensor, too. heads_first: q, k, v and out are
    `[batch, heads, seqlen, dim]`. A call that nothing but autograd can see goes past the operator, which alone costs more
    than the rest of a small call."""
    if _is_eager(q, k, v, options):
        return _attend_eagerly(q, k, v, lengths, return_lse, options, heads_first)
    if heads_first:
        q, k, v = _exchange(q, k, v)
    arguments = _arguments(q, k, v, lengths, options)
    out, lse = _Attention.apply(*arguments) if _is_transformed() else _attention_op(*arguments)
    if heads_first:
        (out,) = _exchange(out)
    return (out, lse) if return_lse else out


def _exchange(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Heads for rows."""
    return tuple(x.transpose(1, 2) for x in tensors)


def _is_transformed() -> bool:
    """Whether torch.func has to see a call; it knows no formula of an operator, but that of a Function."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def _arguments(q: Tensor, k: Tensor, v: Tensor, lengths: dict[str, Any], options: Any) -> tuple[Any, ...]:
    """The arguments that both operators share."""
    seed = options.get("seed", 0)
    on_tensor = isinstance(seed, Tensor)
    block = options.get("block_mask")
    if block is not None and not isinstance(block, BlockMask):
        raise TypeError(f"block_mask: is a {type(block).__name__}; it must be a headrace.BlockMask")
    causal = options.get("causal", False)
    if not isinstance(causal, (bool, str)):
        raise ValueError(f"causal: is {causal!r}; it must be False, True, 'bottom_right' or 'top_left'")
    left, right = options.get("window", (None, None))
    if not on_tensor and not 0 <= seed < 2**64:
        raise ValueError(f"seed: is {seed}; it must be at least 0 and below {2**64}")
    return (
        q,
        k,
        v,
        *(options.get(name) for name in ("bias", "mask", "alibi_slopes", "sinks")),
        None if block is None else block.mask,
        *(None if lengths.get(name) is None else torch.as_tensor(lengths[name]) for name in _LENGTHS),
        seed if on_tensor else None,
        1 if block is None else block.block_q,
        1 if block is None else block.block_k,
        causal if isinstance(causal, str) else "bottom_right" if causal else "",
        left,
        right,
        options.get("scale"),
        options.get("softcap", 0.0),
        options.get("dropout_p", 0.0),
        # An int of a schema has 64 bits and a sign.
        0 if on_tensor else seed - 2**64 if seed >= 2**63 else seed,
        options.get("deterministic", False),
        options.get("batch_invariant", False),
    )


_PLAIN = (Tensor, torch.nn.Parameter)
_MAY_BE_TENSORS = frozenset(("bias", "mask", "alibi_slopes", "sinks", "seed"))
_SAVED = ("bias", "sinks", "mask", "alibi_slopes")  # what backward finds changed, if it was

def _is_eager(q: Any, k: Any, v: Any, options: Any) -> bool:
    """Whether no compiler, transformation or mode of PyTorch has to see the call, and all tensors are plain ones."""
    if torch.compiler.is_compiling() or not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN):
        return False
    if q.is_meta:
        return False  # the operator knows the shapes of results
    for name, x in options.items():
        if name in _MAY_BE_TENSORS and type(x) not in _PLAIN and isinstance(x, Tensor):
            return False
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state()
    )


def _attend_eagerly(
    q: Tensor, k: Tensor, v: Tensor, lengths: dict[str, Any], return_lse: bool, options: Any, heads_first: bool
) -> Any:
    if isinstance(options.get("seed", 0), Tensor):
        options = {**options, "seed": int(options["seed"])}
    if torch.is_grad_enabled():
        bias, sinks = options.get("bias"), options.get("sinks")
        if (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (bias is not None and bias.requires_grad)
            or (sinks is not None and sinks.requires_grad)
        ):
            out, lse = _apply_eagerly(q, k, v, bias, sinks, lengths, options, heads_first)
            return (out, lse) if return_lse else out
    return _attention.forward(q, k, v, lengths, return_lse, options, heads_first)


class _Eager(torch.autograd.Function):
    """Autograd of a call that goes past the operator."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        lengths: dict[str, Any],
        options: Any,
        heads_first: bool,
    ) -> tuple[Tensor, Tensor]:
        out, lse = _attention.forward(q, k, v, lengths, True, options, heads_first)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, bias, sinks, options.get("mask"), options.get("alibi_slopes"))
        ctx.rest = lengths, options, heads_first
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        lengths, options, heads_first = ctx.rest
        _, _, _, need_dbias, need_dsinks, _, _, _ = ctx.needs_input_grad
        if dout is None:
            dout = torch.zeros_like(out)
        options = {**options, **dict(zip(_SAVED, tensors))}
        if torch.is_grad_enabled() or not _is_eager(dout, out, lse, options):
            if heads_first:
                dout, q, k, v, out = _exchange(dout, q, k, v, out)
            arguments = _arguments(q, k, v, lengths, options)
            results = _run_backward(dout, dlse, out, lse, need_dbias, need_dsinks, *arguments)
            gradients = dict(zip(_GRADIENTS, results))
            if heads_first:
                gradients.update(zip(_GRADIENTS, _exchange(*results[:3])))
        else:
            gradients = _attention.backward(
                dout, q, k, v, out, lse, lengths, dlse, need_dbias, need_dsinks, options, heads_first
            )
        return (
            gradients["dq"],
            gradients["dk"],
            gradients["dv"],
            gradients["dbias"] if need_dbias else None,
            gradients["dsinks"] if need_dsinks else None,
            None,
            None,
            None,
        )


# What Function.apply does before this is for transformations, of which there are none here, and takes a microsecond.
_apply_eagerly = super(torch.autograd.Function, _Eager).apply


def _split(rest: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Lengths and options of headrace's functions, from what follows q, k, v."""
    bias, mask, alibi_slopes, sinks, blocks, *lengths, seed_tensor, block_q, block_k = rest[: len(_TENSORS) + 2]
    causal, left, right, scale, softcap, dropout_p, seed, deterministic, batch_invariant = rest[len(_TENSORS) + 2 :]
    return {name: x for name, x in zip(_LENGTHS, lengths) if x is not None}, {
        "bias": bias,
        "mask": mask,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "block_mask": None if blocks is None else BlockMask(blocks, block_q, block_k),
        "causal": causal or False,
        "window": (left, right),
        "scale": scale,
        "softcap": softcap,
        "dropout_p": dropout_p,
        "seed": (seed if seed_tensor is None else int(seed_tensor)) % 2**64,
        "deterministic": deterministic,
        "batch_invariant": batch_invariant,
    }


@library.impl("headrace::attention_forward", "default")
def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lengths, options = _split(rest)
    return _attention.forward(q, k, v, lengths, True, options, False)


@library.impl("headrace::attention_backward", "default")
def _backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, need_dbias: bool, need_dsinks: bool, *rest: Any
) -> tuple[Tensor, ...]:
    q, k, v = rest[:3]
    lengths, options = _split(rest[3:])
    gradients = _attention.backward(dout, q, k, v, out, lse, lengths, dlse, need_dbias, need_dsinks, options, False)
    return tuple(gradients[name] if name in gradients else q.new_empty(0) for name in _GRADIENTS)


@library.register_fake("headrace::attention_forward")
@library.register_fake("headrace::attention")
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out, lse = result_shapes(q.shape, v.shape)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(out), q.new_empty(lse, dtype=lse_dtype)


@library.register_fake("headrace::attention_backward")
def _backward_fake(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, need_dbias: bool, need_dsinks: bool, *rest: Any
) -> tuple[Tensor, ...]:
    q, k, v = rest[:3]
    given = dict(zip(_TENSORS, rest[3:]))
    bias, sinks = given["bias"], given["sinks"]
    return (
        *(x.new_empty(x.shape) for x in (q, k, v)),
        bias.new_empty(bias.shape) if need_dbias and bias is not None else q.new_empty(0),
        sinks.new_empty(sinks.shape) if need_dsinks and sinks is not None else q.new_empty(0),
    )


def _vmap(operator: Any, dense: tuple[int, ...], info: Any, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
    """Dense calls without other tensors become one call of a larger batch, others a call each. `dense` are the
    arguments whose first dimension is the batch."""
    tensors = [i for i, x in enumerate(arguments) if isinstance(x, Tensor)]
    dropout_p = arguments[[argument.name for argument in operator._schema.arguments].index("dropout_p")]
    if set(tensors) <= set(dense) and not dropout_p:
        folded = list(arguments)
        for i in tensors:
            x, dim = arguments[i], in_dims[i]
            folded[i] = (x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
        results = [
            x.unflatten(0, (info.batch_size, -1)) if x.ndim > 1 else x.expand(info.batch_size, 0)
            for x in operator(*folded)
        ]
    else:
        calls = [
            operator(*(x if dim is None else x.select(dim, i) for x, dim in zip(arguments, in_dims)))
            for i in range(info.batch_size)
        ]
        results = [torch.stack(x) for x in zip(*calls)]
    return tuple(results), (0,) * len(results)


class _Attention(torch.autograd.Function):
    """The formula of headrace::attention."""

    forward = staticmethod(_forward_op.__call__)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:_FIRST_OPTION], *output)
        ctx.options = inputs[_FIRST_OPTION:]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors
        bias = 3 + _TENSORS.index("bias")
        sinks = 3 + _TENSORS.index("sinks")
        need_dbias, need_dsinks = ctx.needs_input_grad[bias], ctx.needs_input_grad[sinks]
        if dout is None:
            dout = torch.zeros_like(out)
        results = _run_backward(dout, dlse, out, lse, need_dbias, need_dsinks, *inputs, *ctx.options)
        gradients: list[Tensor | None] = [*results[:3], *[None] * (len(_TENSORS) + len(ctx.options))]
        if need_dbias:
            gradients[bias] = results[3]
        if need_dsinks:
            gradients[sinks] = results[4]
        return tuple(gradients)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        return _vmap(_forward_op, (0, 1, 2), info, in_dims, arguments)  # q, k, v


class _Backward(torch.autograd.Function):
    """headrace::attention_backward where somebody may want gradients of gradients, of which there are none."""

    forward = staticmethod(_backward_op.__call__)
    setup_context = staticmethod(lambda ctx, inputs, output: None)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        raise NotImplementedError("headrace: the gradients of attention cannot be differentiated once more")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        dense = (0, 1, 2, 3, 6, 7, 8)  # dout, dlse, out, lse, q, k, v
        return _vmap(_backward_op, dense, info, in_dims, arguments)


def _run_backward(*arguments: Any) -> tuple[Tensor, ...]:
    return _Backward.apply(*arguments) if torch.is_grad_enabled() or _is_transformed() else _backward_op(*arguments)


def _with_formula(*arguments: Any) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
        return _Attention.apply(*arguments)
    return _forward_op(*arguments)


_implementations = library.Library("headrace", "IMPL")
_implementations.impl("attention", _with_formula, "Autograd")
_implementations.impl("attention", _forward_op, "CompositeExplicitAutograd")
