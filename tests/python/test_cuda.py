"""CUDA tensors of PyTorch. These run where there is a GPU, and CI has none."""

import pytest
import torch

import headrace as hr
import headrace.torch as ht
from conftest import SCALE
from problems import Problem, assert_close, draw

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def on_gpu(problem):
    """The same call with its tensors on the GPU; lengths stay on the host, as callers may have them."""
    options = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in problem.options.items()}
    if "block_mask" in options:
        block = options["block_mask"]
        options["block_mask"] = hr.BlockMask(block.mask.cuda(), block.block_q, block.block_k)
    q, k, v = (getattr(problem, name).cuda() for name in "qkv")
    return Problem(q, k, v, problem.cu_seqlens, options)


def refused(error):
    """What a GPU cannot do yet is refused by name; anything else is a fault."""
    return isinstance(error, NotImplementedError) and ":" in str(error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_random_calls_match_float64_autograd(rng, dtype):
    computed = gradients = 0
    for _ in range(round(60 * SCALE)):
        problem = draw(rng, dtype)
        mine = on_gpu(problem)
        try:
            out, lse = mine.call(return_lse=True)
        except NotImplementedError as error:
            assert refused(error)
            continue
        computed += 1
        want_out, want_lse, leaves = problem.oracle()
        assert out.is_cuda and lse.is_cuda
        assert_close("out", out.cpu(), want_out, problem.tolerance())
        assert_close("lse", lse.cpu(), want_lse, 1e-3)
        dout = torch.from_numpy(rng.standard_normal(out.shape)).to(dtype)
        need = {f"need_d{name}": name in leaves for name in ("bias", "sinks")}
        try:
            got = mine.backward(dout.cuda(), out, lse, **need)
        except NotImplementedError as error:
            assert refused(error)
            continue
        gradients += 1
        want = torch.autograd.grad(
            (want_out * dout).sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
        )
        for name, gradient in zip(leaves, want):
            floor = problem.gradient_floor(gradient)
            assert_close(f"d{name}", got[f"d{name}"].cpu(), gradient, 3 * problem.tolerance(), floor)
    assert computed
    print(f"{computed} forward, {gradients} backward")


def test_the_current_stream_and_device_are_used():
    x = torch.randn(1, 2048, 8, 64, device="cuda", dtype=torch.bfloat16)
    want = hr.attention(x, x, x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        y = x.clone()
        for _ in range(20):
            y = y * 1.0  # queued before the call, on the same stream alone
        got = hr.attention(y, y, y)
    stream.synchronize()
    assert torch.equal(got, want) and got.device == x.device


def test_a_cuda_graph_captures_a_call():
    q = torch.randn(1, 256, 4, 64, device="cuda", dtype=torch.bfloat16)
    ht.attention(q, q, q)  # compiles what has to be
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ht.attention(q, q, q)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(out, ht.attention(q, q, q))


def test_devices_are_not_mixed():
    x = torch.randn(1, 8, 2, 64, device="cuda", dtype=torch.float16)
    for change, name in [(dict(k=x.cpu()), "k"), (dict(v=x.cpu()), "v"), (dict(bias=torch.zeros(1, 1, 8, 8)), "bias")]:
        with pytest.raises(ValueError, match=f"^{name}: "):
            hr.attention(**{"q": x, "k": x, "v": x, **change})
    with pytest.raises(NotImplementedError, match="^out_a: "):
        hr.merge_states(x, x[..., 0], x, x[..., 0])


@pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="this torch has no such registry"
)
def test_registered_as_an_implementation_of_flash_attention(monkeypatch):
    calls = []
    forward = hr._attention.forward
    monkeypatch.setattr(hr._attention, "forward", lambda *a, **o: calls.append(a[0].shape) or forward(*a, **o))
    q = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
    ht.register()
    torch.nn.attention.activate_flash_attention_impl("headrace")
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert len(calls) == 1
    wide = q.float()
    want = torch.nn.functional.scaled_dot_product_attention(wide, wide, wide, is_causal=True)
    torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=2e-2)
