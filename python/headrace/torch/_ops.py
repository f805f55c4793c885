"""Custom operators of PyTorch: headrace::attention and headrace::attention_backward, with all that a transformation of
PyTorch asks of an operator: a fake kernel (torch.compile, export), a formula for autograd, and a rule for vmap.
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

library.define("headrace::attention", f"(Tensor q, Tensor k, Tensor v, {_COMMON}) -> (Tensor out, Tensor lse)")
# A gradient that was not asked for is a tensor without elements: operators cannot return None.
library.define(
    "headrace::attention_backward",
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool need_dbias, bool need_dsinks, "
    f"Tensor q, Tensor k, Tensor v, {_COMMON}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
)
_forward_op = torch.ops.headrace.attention.default
_backward_op = torch.ops.headrace.attention_backward.default


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: dict[str, Any], return_lse: bool, options: Options) -> Any:
    """headrace.attention and attention_varlen for PyTorch; `seed` may be a tensor, too. A call that nothing but
    autograd can see goes past the operator, which alone costs more than the rest of a small call."""
    if _is_eager(q, k, v, options):
        return _attend_eagerly(q, k, v, lengths, return_lse, options)
    out, lse = _run(_forward_op, *_arguments(q, k, v, lengths, options))
    return (out, lse) if return_lse else out


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


def _is_eager(q: Any, k: Any, v: Any, options: Any) -> bool:
    """Whether no compiler, transformation or mode of PyTorch has to see the call, and all tensors are plain ones."""
    if torch.compiler.is_compiling() or not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN):
        return False
    if q.is_meta:
        return False  # the operator knows the shapes of results
    for x in options.values():
        if isinstance(x, Tensor) and type(x) not in _PLAIN:
            return False
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state()
    )


def _attend_eagerly(q: Tensor, k: Tensor, v: Tensor, lengths: dict[str, Any], return_lse: bool, options: Any) -> Any:
    seed = options.get("seed")
    if isinstance(seed, Tensor):
        options = {**options, "seed": int(seed)}
    if torch.is_grad_enabled():
        bias, sinks = options.get("bias"), options.get("sinks")
        if (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (bias is not None and bias.requires_grad)
            or (sinks is not None and sinks.requires_grad)
        ):
            out, lse = _apply_eagerly(q, k, v, bias, sinks, lengths, options)
            return (out, lse) if return_lse else out
    return _attention.forward(q, k, v, lengths, return_lse, options)


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
    ) -> tuple[Tensor, Tensor]:
        out, lse = _attention.forward(q, k, v, lengths, True, options)
        ctx.set_materialize_grads(False)
        tensors = {name: x for name, x in options.items() if isinstance(x, Tensor)}
        ctx.save_for_backward(q, k, v, out, lse, *tensors.values())
        ctx.names, ctx.lengths, ctx.options = tuple(tensors), lengths, options
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        _, _, _, need_dbias, need_dsinks, _, _ = ctx.needs_input_grad
        if dout is None:
            dout = torch.zeros_like(out)
        options = {**ctx.options, **dict(zip(ctx.names, tensors))}
        if torch.is_grad_enabled() or not _is_eager(dout, out, lse, options):  # the operator refuses second gradients
            arguments = _arguments(q, k, v, ctx.lengths, options)
            results = _run(_backward_op, dout, dlse, out, lse, need_dbias, need_dsinks, *arguments)
            gradients = dict(zip(("dq", "dk", "dv", "dbias", "dsinks"), results))
        else:
            gradients = _attention.backward(
                dout, q, k, v, out, lse, ctx.lengths, dlse, need_dbias, need_dsinks, options
            )
        return (
            gradients["dq"],
            gradients["dk"],
            gradients["dv"],
            gradients["dbias"] if need_dbias else None,
            gradients["dsinks"] if need_dsinks else None,
            None,
            None,
        )


# What Function.apply does before this is for transformations, of which there are none here, and takes a microsecond.
_apply_eagerly = super(torch.autograd.Function, _Eager).apply


def _split(rest: tuple[Any, ...]) -> tuple[dict[str, Any], Options]:
    """Lengths and options of headrace's functions, from what follows q, k, v."""
    given = dict(zip(_TENSORS, rest))
    block_q, block_k, causal, left, right, scale, softcap, dropout_p, seed, deterministic, batch_invariant = rest[
        len(_TENSORS) :
    ]
    lengths = {name: x for name in _LENGTHS if (x := given.pop(name)) is not None}
    seed_tensor, mask = given.pop("seed_tensor"), given.pop("block_mask")
    return lengths, {
        **given,  # type: ignore[typeddict-item]
        "block_mask": None if mask is None else BlockMask(mask, block_q, block_k),
        "causal": causal or False,
        "window": (left, right),
        "scale": scale,
        "softcap": softcap,
        "dropout_p": dropout_p,
        "seed": (seed if seed_tensor is None else int(seed_tensor)) % 2**64,
        "deterministic": deterministic,
        "batch_invariant": batch_invariant,
    }


@library.impl("headrace::attention", "default")
def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lengths, options = _split(rest)
    return _attention.forward(q, k, v, lengths, True, options)


@library.impl("headrace::attention_backward", "default")
def _backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, need_dbias: bool, need_dsinks: bool, *rest: Any
) -> tuple[Tensor, ...]:
    q, k, v = rest[:3]
    lengths, options = _split(rest[3:])
    gradients = _attention.backward(dout, q, k, v, out, lse, lengths, dlse, need_dbias, need_dsinks, options)
    return tuple(gradients[name] if name in gradients else q.new_empty(0) for name in ("dq", "dk", "dv", "dbias", "dsinks"))


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


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:_FIRST_OPTION], *output)
    ctx.options = inputs[_FIRST_OPTION:]


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, out, lse = ctx.saved_tensors
    bias = 3 + _TENSORS.index("bias")
    sinks = 3 + _TENSORS.index("sinks")
    need_dbias, need_dsinks = ctx.needs_input_grad[bias], ctx.needs_input_grad[sinks]
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv, dbias, dsinks = _run(
        _backward_op, dout, dlse, out, lse, need_dbias, need_dsinks, *inputs, *ctx.options
    )
    gradients: list[Tensor | None] = [dq, dk, dv, *[None] * (len(_TENSORS) + len(ctx.options))]
    if need_dbias:
        gradients[bias] = dbias
    if need_dsinks:
        gradients[sinks] = dsinks
    return tuple(gradients)


library.register_autograd("headrace::attention", _gradients, setup_context=_setup_context)


def _no_second_gradients(ctx: Any, *gradients: Any) -> None:
    raise NotImplementedError("headrace: the gradients of attention cannot be differentiated once more")


library.register_autograd("headrace::attention_backward", _no_second_gradients)


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


class _Forward(torch.autograd.Function):
    """The operator under torch.func: what register_autograd makes does not support its transforms."""

    forward = staticmethod(_forward_op.__call__)
    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_gradients)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        return _vmap(_forward_op, (0, 1, 2), info, in_dims, arguments)  # q, k, v


class _Backward(torch.autograd.Function):
    forward = staticmethod(_backward_op.__call__)
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(_no_second_gradients)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        dense = (0, 1, 2, 3, 6, 7, 8)  # dout, dlse, out, lse, q, k, v
        return _vmap(_backward_op, dense, info, in_dims, arguments)


def _run(operator: Any, *arguments: Any) -> Any:
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return (_Forward if operator is _forward_op else _Backward).apply(*arguments)
    return operator(*arguments)
