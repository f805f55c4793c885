"""The functions of headrace itself: numerics, kinds of arrays, layouts, errors."""

import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
import torch

import headrace as hr
from conftest import SCALE
from headrace._backend import use_backend
from problems import DTYPES, assert_close, draw


@pytest.mark.parametrize("part", range(10))
def test_random_calls_match_float64_autograd(rng, part):
    for _ in range(round(200 * SCALE)):
        problem = draw(rng)
        tolerance = problem.tolerance()
        try:
            out, lse = problem.call(return_lse=True)
            want_out, want_lse, leaves = problem.oracle()
            assert_close("out", out, want_out, tolerance)
            assert_close("lse", lse, want_lse, max(tolerance / 10, 1e-12))

            dout = torch.from_numpy(rng.standard_normal(out.shape)).to(out.dtype)
            dlse = torch.from_numpy(rng.standard_normal(lse.shape)).to(lse.dtype) if rng.random() < 0.5 else None
            need = {f"need_d{name}": name in leaves for name in ("bias", "sinks")}
            got = problem.backward(dout, out, lse, dlse=dlse, **need)
            loss = (want_out * dout).sum()
            if dlse is not None:
                loss = loss + (want_lse * dlse)[torch.isfinite(want_lse)].sum()
            want = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
            assert list(got) == [f"d{name}" for name in leaves]
            for name, gradient in zip(leaves, want):
                assert got[f"d{name}"].dtype == (problem.options.get(name, problem.q)).dtype
                assert_close(f"d{name}", got[f"d{name}"], gradient, 3 * tolerance, problem.gradient_floor(gradient))
        except Exception as error:
            raise AssertionError(str(problem)) from error


def test_reference_backend_agrees(rng):
    for _ in range(round(100 * SCALE)):
        problem = draw(rng)
        out, lse = problem.call(return_lse=True)
        with use_backend("reference"):
            want_out, want_lse = problem.call(return_lse=True)
        assert_close("out", out, want_out, problem.tolerance())
        assert_close("lse", lse, want_lse, problem.tolerance())


def arrays(rng, *shape, dtype=np.float32, n=3):
    return [rng.standard_normal(shape).astype(dtype) for _ in range(n)]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_numpy_and_torch_give_the_same_bits(rng, dtype):
    q, k, v = arrays(rng, 2, 33, 4, 16, dtype=dtype)
    out, lse = hr.attention(q, k, v, causal=True, return_lse=True)
    assert type(out) is np.ndarray and out.dtype == q.dtype
    if dtype is ml_dtypes.bfloat16:
        tensors = [torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) for x in (q, k, v)]
    else:
        tensors = [torch.from_numpy(x) for x in (q, k, v)]
    out_torch, lse_torch = hr.attention(*tensors, causal=True, return_lse=True)
    assert type(out_torch) is torch.Tensor and out_torch.dtype == tensors[0].dtype
    assert np.array_equal(out_torch.double().numpy(), out.astype(np.float64))
    assert np.array_equal(lse_torch.numpy(), lse)


def test_any_layout(rng):
    q, k, v = arrays(rng, 2, 20, 3, 8)
    want = hr.attention(q, k, v)
    fields = np.zeros(q.shape, [("odd", np.int8), ("value", np.float32)])
    fields["value"] = q
    read_only = q.copy()
    read_only.flags.writeable = False
    for other in (
        np.ascontiguousarray(q[::-1, ::-1])[::-1, ::-1],
        np.asfortranarray(q),
        np.ascontiguousarray(q[..., ::-1])[..., ::-1],
        fields["value"],
        read_only,
    ):
        assert np.array_equal(hr.attention(other, k, v), want)
    transposed = torch.from_numpy(np.asfortranarray(q))
    assert np.array_equal(hr.attention(transposed, torch.from_numpy(k), torch.from_numpy(v)).numpy(), want)
    one = np.broadcast_to(q[:1, :1], q.shape)
    assert np.array_equal(hr.attention(one, k, v), hr.attention(one.copy(), k, v))
    unaligned = np.frombuffer(b"-" + q.tobytes(), np.float32, offset=1).reshape(q.shape)
    assert not unaligned.flags.aligned and np.array_equal(hr.attention(unaligned, k, v), want)


def test_gradients_of_any_layout(rng):
    q, k, v, dout = (torch.from_numpy(x) for x in arrays(rng, 2, 20, 3, 8, n=4))
    out, lse = hr.attention(q, k, v, return_lse=True)
    want = hr.attention_backward(dout, q, k, v, out, lse)
    spread = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (dout, q, k, v, out)]  # rows are not contiguous
    outermost = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in (dout, q, k, v, out)]
    for tensors in (spread, outermost):
        for name, gradient in hr.attention_backward(*tensors, lse).items():
            assert torch.equal(gradient, want[name])


def test_other_arrays_with_dlpack(rng):
    class Namespace:
        @staticmethod
        def asarray(x):
            return Array(x)

    class Array:
        def __init__(self, x):
            self.x = x

        def __array_namespace__(self):
            return Namespace

        def __dlpack__(self):
            return self.x.__dlpack__()

        def __dlpack_device__(self):
            return self.x.__dlpack_device__()

        def __array__(self, dtype=None, copy=None):
            return self.x

    q, k, v = arrays(rng, 1, 9, 2, 8)
    out = hr.attention(Array(q), Array(k), Array(v))
    assert type(out) is Array and np.array_equal(out.x, hr.attention(q, k, v))


def test_merged_halves_are_the_whole(rng):
    q, k, v = arrays(rng, 2, 17, 3, 8)
    whole = hr.attention(q, k, v, return_lse=True)
    a = hr.attention(q, k[:, :7], v[:, :7], return_lse=True)
    b = hr.attention(q, k[:, 7:], v[:, 7:], return_lse=True)
    for got, want in zip(hr.merge_states(*a, *b), whole):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    for got, want in zip(hr.merge_states(*map(torch.from_numpy, (*a, *b))), whole):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-6)


def test_merging_tensors_has_gradients_and_the_guarantees(rng):
    def state(dtype=torch.float64):
        out, lse = torch.from_numpy(rng.standard_normal((2, 5, 3, 4))), torch.from_numpy(rng.standard_normal((2, 3, 5)))
        return out.to(dtype).requires_grad_(), lse.to(torch.float64 if dtype == torch.float64 else torch.float32)

    a, b = state(), state()
    assert torch.autograd.gradcheck(lambda *x: hr.merge_states(*x), [x.detach().requires_grad_() for x in (*a, *b)])
    for dtype, tolerance in DTYPES.items():
        (out_a, lse_a), (out_b, lse_b) = state(dtype), state(dtype)
        lse_a[0, 0], lse_b[0, :2] = -torch.inf, -torch.inf
        with torch.no_grad():
            out_b[0, :, 0] = torch.nan  # no key, so nothing
            want_out, want_lse = hr.merge_states(out_a, lse_a, out_b, lse_b)  # the library's
        out, lse = hr.merge_states(out_a, lse_a, out_b, lse_b)
        assert_close("out", out, want_out, tolerance), assert_close("lse", lse, want_lse, tolerance)
        assert torch.equal(out[0, :, 1], out_a[0, :, 1]) and torch.equal(lse[0, 1], lse_a[0, 1])
        out.sum().backward()
        assert torch.isfinite(out_a.grad).all() and (out_b.grad[0, :, :2] == 0).all()


@pytest.mark.parametrize(
    "error, argument, change",
    [
        (TypeError, "out_a", lambda x: (x.int(), x[..., 0], x, x[..., 0])),
        (ValueError, "out_a", lambda x: (x[0], x[..., 0], x, x[..., 0])),
        (TypeError, "lse_a", lambda x: (x, x[..., 0].half(), x, x[..., 0])),
        (ValueError, "lse_a", lambda x: (x, x[..., :2, 0], x, x[..., 0])),
        (TypeError, "out_b", lambda x: (x, x[..., 0], x.half(), x[..., 0])),
        (TypeError, "lse_b", lambda x: (x, x[..., 0], x, x[..., 0].double())),
        (TypeError, "lse_b", lambda x: (x, x[..., 0], x, x[..., 0].numpy())),
        (ValueError, "lse_b", lambda x: (x, x[..., 0], x, x[..., 0].to("meta"))),
    ],
)
def test_errors_of_merging_tensors(error, argument, change):
    x = torch.ones(1, 3, 3, 3)
    for tensors in (change(x), [x.requires_grad_(i == 0 and x.is_floating_point()) if isinstance(x, torch.Tensor) else x
                               for i, x in enumerate(change(x.clone()))]):
        with pytest.raises(error, match=f"^{argument}: "):
            hr.merge_states(*tensors)


def test_dropout_mask():
    keep = hr.dropout_mask(2, 3, 64, 64, 0.25, 2**64 - 1)
    assert keep.shape == (2, 3, 64, 64) and keep.dtype == np.bool_
    assert abs(keep.mean() - 0.75) < 0.03
    with pytest.raises(ValueError, match="^seed: "):
        hr.dropout_mask(1, 1, 1, 1, 0.5, -1)
    with pytest.raises(ValueError, match="^dropout_p: "):
        hr.dropout_mask(1, 1, 1, 1, 1.0, 0)


def test_explain(rng):
    q, k, v = arrays(rng, 1, 300, 4, 64)
    plan = hr.explain(q, k, v, causal=True)
    assert "kernel" in str(plan) and plan.details["backend"] == "cpu"
    shape = (1, 300, 4, 64)
    assert str(hr.explain(shape, shape, shape, causal=True)) == str(plan)
    large = (8, 10**6, 32, 128)
    assert hr.explain(large, large, large, dtype="bfloat16", backward=True).details["pass"] == "backward"
    ragged = (600, 4, 64)
    assert "2" in str(hr.explain(ragged, ragged, ragged, cu_seqlens_q=[0, 300, 600], cu_seqlens_k=[0, 1, 600]))
    with pytest.raises(ValueError, match="^device: "):
        hr.explain(q, k, v, device="tpu")


def test_info():
    assert hr.info()["version"] == hr.__version__


def test_nothing_is_wrong():
    assert hr.check() is None


def test_metadata_of_any_integer_type(rng):
    q, k, v = arrays(rng, 10, 2, 8)
    want = hr.attention_varlen(q, k, v, np.array([0, 4, 10], np.int32), [0, 5, 10])
    strided = np.array([0, -1, 4, -1, 10, -1], np.int32)[::2]
    for first, second in [
        (np.array([0, 4, 10]), torch.tensor([0, 5, 10])),
        (strided, torch.tensor([0, 5, 10], dtype=torch.int32)),
        (torch.from_numpy(strided.copy()).repeat_interleave(2)[::2], torch.tensor([0, 5, 10], dtype=torch.uint8)),
    ]:
        assert np.array_equal(hr.attention_varlen(q, k, v, first, second), want)
    assert hr.attention_varlen(q[:0], k, v, [0], [0]).shape == (0, 2, 8)


Q = np.ones((2, 4, 2, 8), np.float32)


@pytest.mark.parametrize(
    "error, argument, change",
    [
        (TypeError, "q", dict(q=[1.0])),
        (TypeError, "q", dict(q=Q.astype(">f4"))),
        (TypeError, "k", dict(k=Q.astype(np.float16))),
        (TypeError, "k", dict(k=torch.from_numpy(Q))),
        (ValueError, "q", dict(q=Q[0])),
        (ValueError, "k", dict(k=Q[..., :4])),
        (ValueError, "v", dict(v=Q[None])),
        (ValueError, "v", dict(v=Q[:1])),
        (ValueError, "q", dict(q=torch.empty(Q.shape, device="meta"))),
        (ValueError, "causal", dict(causal="yes")),
        (ValueError, "causal", dict(causal=1)),
        (ValueError, "window", dict(window=3)),
        (TypeError, "window_left", dict(window=(0.5, None))),
        (ValueError, "window_right", dict(window=(None, 2**63))),
        (TypeError, "scale", dict(scale="x")),
        (ValueError, "scale", dict(scale=float("nan"))),
        (ValueError, "softcap", dict(softcap=-1)),
        (TypeError, "softcap", dict(softcap=None)),
        (ValueError, "dropout_p", dict(dropout_p=1)),
        (ValueError, "seed", dict(seed=2**64)),
        (ValueError, "seed", dict(seed=-1)),
        (TypeError, "seed", dict(seed=0.5)),
        (TypeError, "bias", dict(bias=np.zeros((1, 1, 1, 1), np.int32))),
        (ValueError, "bias", dict(bias=np.zeros((4, 4), np.float32))),
        (ValueError, "bias", dict(bias=np.zeros((), np.float32))),
        (TypeError, "mask", dict(mask=Q)),
        (ValueError, "sinks", dict(sinks=np.zeros(3, np.float32))),
        (ValueError, "alibi_slopes", dict(alibi_slopes=np.zeros(3, np.float32))),
        (TypeError, "block_mask", dict(block_mask=np.ones((1, 1, 1, 1), bool))),
        (ValueError, "block_mask", dict(block_mask=hr.BlockMask(np.ones((1, 1, 2, 1), bool), 4, 4))),
    ],
)
def test_errors_name_the_argument(error, argument, change):
    with pytest.raises(error, match=f"^{argument}: "):
        hr.attention(**{"q": Q, "k": Q, "v": Q, **change})


def test_errors_of_other_calls():
    out, lse = hr.attention(Q, Q, Q, return_lse=True)
    with pytest.raises(ValueError, match="^need_dbias: "):
        hr.attention_backward(out, Q, Q, Q, out, lse, need_dbias=True)
    with pytest.raises(ValueError, match="^need_dsinks: "):
        hr.attention_backward(out, Q, Q, Q, out, lse, need_dsinks=True)
    with pytest.raises(ValueError, match="^dout: "):
        hr.attention_backward(out[:1], Q, Q, Q, out, lse)
    with pytest.raises(ValueError, match="^cu_seqlens_q: "):
        hr.attention_varlen(Q[0], Q[0], Q[0], [0, 5], [0, 4])
    with pytest.raises(ValueError, match="^cu_seqlens_k: "):
        hr.attention_varlen(Q[0], Q[0], Q[0], [0, 4], [])
    with pytest.raises(TypeError, match="^cu_seqlens_k: "):
        hr.attention_varlen(Q[0], Q[0], Q[0], [0, 4], [0.0, 4.0])
    with pytest.raises(ValueError, match="^block_q: "):
        hr.BlockMask(np.ones((1, 1, 1, 1), bool), 0, 4)
    with pytest.raises(TypeError, match="unexpected keyword argument 'windows'"):
        hr.attention_varlen(Q[0], Q[0], Q[0], [0, 4], [0, 4], windows=3)


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_references_are_given_back(rng, convert):
    q, k, v = map(convert, arrays(rng, 1, 5, 2, 8))
    bias = convert(np.zeros((1, 1, 5, 5), np.float32))
    edges = np.array([0, 5], np.int32)

    def calls():
        out, lse = hr.attention(q, k, v, bias=bias, causal=True, window=(3, None), return_lse=True)
        hr.attention_backward(out, q, k, v, out, lse, bias=bias, need_dbias=True)
        hr.merge_states(out, lse, out, lse)
        hr.attention_varlen(q[0], k[0], v[0], edges, edges)
        hr.explain(q, k, v, bias=bias)
        for change in (dict(causal=3), dict(k=k[..., :4]), dict(mask=bias), dict(window=3), dict(odd=1)):
            with pytest.raises((TypeError, ValueError)):
                hr.attention(**{"q": q, "k": k, "v": v, "bias": bias, **change})

    def counts():
        return [sys.getrefcount(x) for x in (q, k, v, bias, edges, q.dtype, True, None, hr.attention, ValueError)]

    calls()
    before = counts()
    for _ in range(100):
        calls()
    assert all(abs(a - b) < 20 for a, b in zip(before, counts()))


def test_other_threads_run_during_a_call():
    q = np.ones((1, 4000, 8, 64), np.float32)
    counter, stop = [0], threading.Event()

    def count():
        while not stop.wait(0.001):
            counter[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = counter[0]
        hr.attention(q, q, q)
        during = counter[0] - before
    finally:
        stop.set()
        thread.join()
    assert during > 5  # with the GIL held it were 0 or 1


def test_needs_no_torch():
    program = "import sys; sys.modules['torch'] = None; import numpy as np, headrace as hr; x = np.ones((1, 2, 1, 4)); "
    program += "assert (hr.attention(x, x, x) == 1).all() and 'ml_dtypes' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_command_line():
    result = subprocess.run([sys.executable, "-m", "headrace", "info"], check=True, capture_output=True, text=True)
    assert hr.__version__ in result.stdout
