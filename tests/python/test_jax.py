"""headrace.jax: the operation of XLA, its gradients, and what JAX's transformations make of it."""

import os
import shutil
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
DEVICE = os.environ.get("HEADRACE_TEST_DEVICE", "cpu")  # "cuda" runs the same tests on a GPU
jax.config.update("jax_platforms", DEVICE)
jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402

import headrace as hr  # noqa: E402
import headrace.jax as hj  # noqa: E402
from conftest import SCALE  # noqa: E402
from problems import assert_close, draw  # noqa: E402

ROOT = Path(__file__).parents[2]


def to_jax(x):
    if isinstance(x, torch.Tensor):
        x = x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()
    if isinstance(x, hr.BlockMask):
        return hr.BlockMask(to_jax(x.mask), x.block_q, x.block_k)
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def to_torch(x):
    assert isinstance(x, jax.Array)
    if x.dtype == jnp.bfloat16:
        return torch.from_numpy(np.array(x).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(x))


def normal(rng, *shape, n=3):
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(n)]


def test_random_calls_match_float64_autograd(rng):
    computed = 0
    for _ in range(round(60 * SCALE)):
        # GPU kernels have no float64.
        dtype = None if DEVICE == "cpu" else [torch.float32, torch.float16, torch.bfloat16][rng.integers(3)]
        problem = draw(rng, dtype)
        tolerance = problem.tolerance()
        options = {name: to_jax(x) for name, x in problem.options.items()}
        lengths = [jnp.asarray(x) for x in problem.cu_seqlens or ()]
        inputs = {name: to_jax(getattr(problem, name).contiguous()) for name in "qkv"}
        inputs.update((name, options.pop(name)) for name in ("bias", "sinks") if name in options)

        def call(inputs):
            rest = dict(inputs)
            arrays = [rest.pop(name) for name in "qkv"]
            function = hj.attention_varlen if lengths else hj.attention
            return function(*arrays, *lengths, return_lse=True, **options, **rest)

        if rng.random() < 0.5:
            call = jax.jit(call)
        try:
            (out, lse), vjp = jax.vjp(call, inputs)
            try:
                jax.block_until_ready((out, lse))
            except jax.errors.JaxRuntimeError as error:  # what a GPU cannot do yet is refused by name
                assert DEVICE != "cpu" and "UNIMPLEMENTED" in str(error), error
                continue
            computed += 1
            want_out, want_lse, leaves = problem.oracle()
            assert_close("out", to_torch(out), want_out, tolerance)
            assert_close("lse", to_torch(lse), want_lse, max(tolerance / 10, 1e-12) if DEVICE == "cpu" else tolerance)
            dout, dlse = (torch.from_numpy(rng.standard_normal(x.shape)) for x in (out, lse))
            dout, dlse = dout.to(problem.q.dtype), dlse.to(to_torch(lse).dtype)
            (got,) = vjp((to_jax(dout), to_jax(dlse)))
            loss = (want_out * dout).sum() + (want_lse * dlse)[torch.isfinite(want_lse)].sum()
            want = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
            for name, gradient in zip(leaves, want):
                floor = problem.gradient_floor(gradient)
                assert_close(f"d{name}", to_torch(got[name]), gradient, 3 * tolerance, floor)
        except Exception as error:
            raise AssertionError(str(problem)) from error
    assert computed


@pytest.mark.skipif(DEVICE != "cpu", reason="compares bits")
def test_it_is_what_numpy_gets(rng):
    q, k, v = normal(rng, 2, 9, 4, 8)
    out, lse = hj.attention(q, k, v, causal=True, window=(3, None), return_lse=True)
    want = hr.attention(*map(np.asarray, (q, k, v)), causal=True, window=(3, None), return_lse=True)
    assert np.array_equal(out, want[0]) and np.array_equal(lse, want[1])
    assert np.array_equal(hr.attention(q, k, v, causal=True, window=(3, None)), out)  # as any array with DLPack


def test_one_program_drops_out_anew_with_each_seed(rng):
    q, k, v = normal(rng, 1, 8, 2, 8)
    traces = []

    @jax.jit
    def step(seed):
        traces.append(seed)
        return hj.attention(q, k, v, dropout_p=0.5, seed=seed)

    for _ in range(3):
        seed = rng.integers(2**32, size=2, dtype=np.uint32)
        number = int(seed[0]) | int(seed[1]) << 32
        assert np.array_equal(step(seed), hj.attention(q, k, v, dropout_p=0.5, seed=number))
    assert len(traces) == 1
    one = np.uint32([7])
    assert np.array_equal(hj.attention(q, k, v, dropout_p=0.5, seed=one), hj.attention(q, k, v, dropout_p=0.5, seed=7))
    assert jax.grad(lambda q: hj.attention(q, k, v, dropout_p=0.5, seed=seed).sum())(q).shape == q.shape
    with pytest.raises(TypeError, match="^seed: "):
        hj.attention(q, k, v, dropout_p=0.5, seed=np.float32([1]))


def test_vmap(rng):
    q, k, v = normal(rng, 3, 2, 5, 4, 8)
    want = jnp.stack([hj.attention(*x, causal=True) for x in zip(q, k, v)])
    assert np.array_equal(jax.vmap(lambda *x: hj.attention(*x, causal=True))(q, k, v), want)
    each = jax.vmap(jax.grad(lambda q, k: hj.attention(q, k, k).sum(), (0, 1)), (0, None))(q, k[0])
    alone = [jax.grad(lambda q, k: hj.attention(q, k, k).sum(), (0, 1))(x, k[0]) for x in q]
    for got, *parts in zip(each, *alone):
        assert np.array_equal(got, jnp.stack(parts))


def test_only_the_gradients_that_are_wanted_are_computed(rng):
    q, k, v = normal(rng, 1, 5, 2, 8)
    bias = jnp.zeros((1, 1, 5, 5), jnp.float32)

    def loss(q, bias):
        return hj.attention(q, k, v, bias=bias).sum()

    def results(wanted):
        (call,) = [
            e for e in jax.make_jaxpr(jax.grad(loss, wanted))(q, bias).eqns if "backward" in str(e.params.get("target_name"))
        ]
        return len(call.outvars), len(call.invars)

    assert results(0) == (3, 7)  # q, k, v, bias, out, lse, dout: no gradient reaches lse
    assert results((0, 1)) == (4, 7)


def test_errors(rng):
    q, k, v = normal(rng, 1, 5, 2, 8)
    for change, error, name in [
        (dict(k=k[..., :4]), ValueError, "k"),
        (dict(q=q[0]), ValueError, "q"),
        (dict(v=v.astype(jnp.float16)), TypeError, "v"),
        (dict(causal="yes"), ValueError, "causal"),
        (dict(softcap=-1.0), ValueError, "softcap"),
        (dict(bias=jnp.zeros((1, 1, 3, 5), jnp.float32)), ValueError, "bias"),
        (dict(sinks=jnp.zeros(3, jnp.float32)), ValueError, "sinks"),
        (dict(block_mask=q), TypeError, "block_mask"),
    ]:
        with pytest.raises(error, match=f"^{name}: "):
            jax.jit(lambda: hj.attention(**{"q": q, "k": k, "v": v, **change}))()
    with pytest.raises(TypeError, match="'windows'"):
        hj.attention(q, k, v, windows=3)
    with pytest.raises(TypeError, match="^cu_seqlens_q: "):
        hj.attention_varlen(q[0], k[0], v[0], [0.0, 5.0], [0, 5])
    with pytest.raises(jax.errors.JaxRuntimeError, match="cu_seqlens_[qk]: "):  # on a GPU ragged batches are refused
        jax.block_until_ready(hj.attention_varlen(q[0], k[0], v[0], [0, 5], [0, 6]))


def test_a_program_for_gpus_calls_the_handler_for_gpus(rng):
    q, k, v = normal(rng, 1, 5, 2, 8)
    program = jax.jit(jax.grad(lambda q: hj.attention(q, k, v).sum())).trace(q).lower(lowering_platforms=("cuda",))
    for name in ("headrace_jax_forward", "headrace_jax_backward"):
        assert f"@{name}" in program.as_text()
        assert getattr(hj._library, f"{name}_cuda")


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_the_layout_is_that_of_xla(tmp_path):
    pairs = {
        "Extension": ("XLA_FFI_Extension_Base", dict(struct_size="struct_size", type="type", next="next")),
        "ApiVersion": ("XLA_FFI_Api_Version", dict(major_version="major_version", minor_version="minor_version")),
        "Metadata": ("XLA_FFI_Metadata", dict(api_version="api_version", traits="traits")),
        "MetadataExtension": ("XLA_FFI_Metadata_Extension", dict(metadata="metadata")),
        "ErrorCreateArgs": ("XLA_FFI_Error_Create_Args", dict(message="message", code="errc")),
        "Api": (
            "XLA_FFI_Api",
            dict(api_version="api_version", error_create="XLA_FFI_Error_Create", stream_get="XLA_FFI_Stream_Get"),
        ),
        "StreamGetArgs": ("XLA_FFI_Stream_Get_Args", dict(struct_size="struct_size", context="ctx", stream="stream")),
        "Buffer": ("XLA_FFI_Buffer", dict(dtype="dtype", data="data", rank="rank", dims="dims")),
        "Buffers": ("XLA_FFI_Args", dict(size="size", types="types", items="args")),
        "ByteSpan": ("XLA_FFI_ByteSpan", dict(data="ptr", size="len")),
        "Array": ("XLA_FFI_Array", dict(dtype="dtype", size="size", data="data")),
        "Attributes": ("XLA_FFI_Attrs", dict(size="size", types="types", names="names", items="attrs")),
        "CallFrame": (
            "XLA_FFI_CallFrame",
            dict(api="api", context="ctx", stage="stage", arguments="args", results="rets", attributes="attrs"),
        ),
    }
    lines = ["#include <xla/ffi/api/c_api.h>", '#include "xla_ffi.hpp"', "namespace ours = headrace::xla;"]
    for ours, (theirs, fields) in pairs.items():
        lines += [
            f"static_assert(offsetof(ours::{ours}, {a}) == offsetof({theirs}, {b}) && sizeof(ours::{ours}::{a}) == "
            f"sizeof({theirs}::{b}));"
            for a, b in fields.items()
        ]
    for name, value in [
        ("static_cast<int>(ours::ErrorCode::invalid_argument)", "XLA_FFI_Error_Code_INVALID_ARGUMENT"),
        ("static_cast<int>(ours::ErrorCode::unimplemented)", "XLA_FFI_Error_Code_UNIMPLEMENTED"),
        ("static_cast<int>(ours::ErrorCode::internal)", "XLA_FFI_Error_Code_INTERNAL"),
        ("ours::attribute_array", "XLA_FFI_AttrType_ARRAY"),
        ("ours::extension_metadata", "XLA_FFI_Extension_Metadata"),
        ("ours::api_major", "XLA_FFI_API_MAJOR"),
    ]:
        lines.append(f"static_assert({name} == static_cast<int>({value}));")
    if not (ROOT / "python/jax_ffi/xla_ffi.hpp").exists():
        pytest.skip("needs the sources")
    source = tmp_path / "layout.cpp"
    source.write_text("\n".join(lines) + "\n")
    include = ["-I", jax.ffi.include_dir(), "-I", str(ROOT / "python/jax_ffi")]
    subprocess.run(["g++", "-std=c++20", "-fsyntax-only", *include, str(source)], check=True)
