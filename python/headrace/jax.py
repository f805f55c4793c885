"""Headrace in JAX: attention as an operation of XLA, on the CPU and on NVIDIA GPUs.

    from headrace.jax import attention
    out = jax.jit(attention, static_argnames="causal")(q, k, v, causal=True)   # [batch, seqlen, heads, dim]

jit, grad and vmap work as with any function of JAX. XLA calls the library itself, without Python and without copies.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from . import _binding
from ._attention import result_shapes
from ._block_mask import BlockMask
from ._options import Bound, Causal, Options

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attention", "attention_varlen"]

_library = ctypes.CDLL(str(Path(__file__).with_name("libheadrace_jax.so")))
for _platform in ("cpu", "cuda"):
    for _name in ("headrace_jax_forward", "headrace_jax_backward"):
        _handler = getattr(_library, f"{_name}_{_platform}")
        jax.ffi.register_ffi_target(_name, jax.ffi.pycapsule(_handler), platform=_platform.replace("cuda", "CUDA"))


class _Static(NamedTuple):
    """The options that are part of the compiled program."""

    causal: Causal
    window: tuple[Bound, Bound]
    scale: float | None
    softcap: float
    dropout_p: float
    seed: int
    deterministic: bool
    batch_invariant: bool
    blocks: tuple[int, int]


def attention(q: Any, k: Any, v: Any, *, return_lse: bool = False, **options: Unpack[Options]) -> Any:
    """`headrace.attention`, with its shapes, options and errors, as an operation of JAX.

    Differentiable in q, k, v, bias and sinks, through out and through lse, once and in reverse. Arrays may be traced;
    other options are part of the program, but for `seed`: it may be an array as well, a uint32 of one or two elements
    (`jax.random.bits(key, 2, jnp.uint32)`), so that one program drops out anew in each step. vmap makes a call for each element.
    """
    return _attention(q, k, v, {}, return_lse, options)


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
    """`headrace.attention_varlen` as an operation of JAX; see `attention`. Where cu_seqlens are traced, XLA reports what
    is wrong with them when the program runs."""
    return _attention(q, k, v, {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}, return_lse, options)


def _attention(q: Any, k: Any, v: Any, lengths: dict[str, Any], return_lse: bool, options: Options) -> Any:
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        raise TypeError(f"attention got an unexpected keyword argument {min(unknown)!r}")
    tensors = {"q": q, "k": k, "v": v}
    tensors.update((name, options.get(name)) for name in ("bias", "mask", "alibi_slopes", "sinks"))
    block = options.get("block_mask")
    if block is not None and not isinstance(block, BlockMask):
        raise TypeError(f"block_mask: is a {type(block).__name__}; it must be a headrace.BlockMask")
    if block is not None:
        tensors["block_mask"] = block.mask
    for name, values in lengths.items():
        array = jnp.asarray(values)
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"{name}: dtype is {array.dtype}; it must be int32")
        tensors[name] = array.astype(jnp.int32)
    seed = options.get("seed", 0)
    if isinstance(seed, (jax.Array, np.ndarray)):
        tensors["seed"] = _seed_words(seed)
        seed = 0
    static = _Static(
        options.get("causal", False),
        tuple(options.get("window", (None, None))),  # type: ignore[arg-type]
        options.get("scale"),
        options.get("softcap", 0.0),
        options.get("dropout_p", 0.0),
        seed,
        options.get("deterministic", False),
        options.get("batch_invariant", False),
        (0, 0) if block is None else (block.block_q, block.block_k),
    )
    out, lse = _attend(static, {name: jnp.asarray(x) for name, x in tensors.items() if x is not None})
    return (out, lse) if return_lse else out


def _seed_words(seed: Any) -> Any:
    """The low and the high 32 bits."""
    if jnp.result_type(seed) != jnp.uint32 or seed.size not in (1, 2):
        raise TypeError(f"seed: is {jnp.result_type(seed)}{list(seed.shape)}; as an array it must be uint32, of 1 or 2 elements")
    return jnp.pad(jnp.ravel(seed), (0, 2 - seed.size))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, tensors: dict[str, Any]) -> tuple[Any, Any]:
    q, v = tensors["q"], tensors["v"]
    template = _template(static, tensors, False, ())
    out, lse = result_shapes(q.shape, v.shape)
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    results = {"out": jax.ShapeDtypeStruct(out, q.dtype), "lse": jax.ShapeDtypeStruct(lse, wide)}
    return tuple(_run("headrace_jax_forward", template, tensors, results))  # type: ignore[return-value]


def _attend_forward(static: _Static, primals: dict[str, Any]) -> tuple[Any, Any]:
    tensors = {name: x.value for name, x in primals.items()}
    # What is computed is part of the program's structure, so it travels in that of the residuals.
    wanted: dict[str, tuple[()]] = {name: () for name in ("bias", "sinks") if name in primals and primals[name].perturbed}
    out, lse = _attend(static, tensors)
    return (out, lse), (tensors, out, lse, wanted)


def _attend_backward(static: _Static, residuals: Any, cotangents: Any) -> tuple[dict[str, Any]]:
    tensors, out, lse, wanted = residuals
    dout, dlse = cotangents
    inputs = {**tensors, "out": out, "lse": lse}
    inputs["dout"] = jnp.zeros(out.shape, out.dtype) if isinstance(dout, SymbolicZero) else dout
    if not isinstance(dlse, SymbolicZero):
        inputs["dlse"] = dlse
    template = _template(static, inputs, True, tuple(wanted))
    names = ["q", "k", "v", *wanted]
    results = {f"d{name}": jax.ShapeDtypeStruct(tensors[name].shape, tensors[name].dtype) for name in names}
    gradients = dict(zip(names, _run("headrace_jax_backward", template, inputs, results)))
    return ({name: gradients.get(name) for name in tensors},)


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


def _template(static: _Static, tensors: dict[str, Any], backward: bool, wanted: tuple[str, ...]) -> np.ndarray:
    """The hr_attention of a call, of arrays that are known by shape and dtype alone; its errors are those of the call."""
    given = {name: (x.shape, x.dtype.name) for name, x in tensors.items()}
    options = static._asdict()
    blocks = options.pop("blocks")
    options.update((name, given[name]) for name in ("bias", "mask", "alibi_slopes", "sinks") if name in given)
    if "block_mask" in given:
        options["block_mask"] = BlockMask(given["block_mask"], *blocks)
    # Lengths are not known yet; any that are legal do to check the rest.
    lengths = {name: np.zeros(shape, np.int32) for name, (shape, _) in given.items() if name.startswith("cu_seqlens")}
    gradients = "dlse" in given, "bias" in wanted, "sinks" in wanted
    *_, template = _binding.plan(given["q"], given["k"], given["v"], lengths, options, backward, None, *gradients)
    return np.frombuffer(template, np.uint8)


def _run(target: str, template: np.ndarray, inputs: dict[str, Any], results: dict[str, Any]) -> Any:
    """Makes a call an operation of the program that is traced."""
    places = np.array([_binding.OFFSETS[name] for name in (*inputs, *results)], np.int64)
    operation = jax.ffi.ffi_call(target, list(results.values()), vmap_method="sequential")
    return operation(*inputs.values(), call=template, places=places)
