"""CUDA tensors of PyTorch. These run where there is a GPU, and CI has none."""

import pytest
import torch
import torch.utils.checkpoint

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


# Most of the time is compilation of kernels: parts, so that pytest-xdist can share it among processes.
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_random_calls_match_float64_autograd(rng, dtype, part):
    computed = gradients = 0
    for _ in range(round(10 * SCALE)):
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
        assert_close("lse", lse.cpu(), want_lse, 1e-5 if dtype == torch.float32 else 1e-3)
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
    assert hr.check() is None  # waits
    assert torch.equal(got, want) and got.device == x.device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cuda_graph_captures_both_passes(dtype):
    q, k, v = (torch.randn(1, 256, 4, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))

    def step():
        out, lse = ht.attention(q, k, v, causal=True, deterministic=True, return_lse=True)
        return out, torch.autograd.grad(out.float().square().sum() + lse.sum(), (q, k, v))

    stream = torch.cuda.Stream()  # autograd works on the stream of the forward pass, and none but it may be captured
    with torch.cuda.stream(stream):
        step()  # compiles what has to be
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out, gradients = step()
    with torch.no_grad():
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
    for x in (out, *gradients):
        x.fill_(torch.nan)
    graph.replay()
    want_out, want_gradients = step()
    assert torch.equal(out, want_out)
    for got, want in zip(gradients, want_gradients):
        assert torch.equal(got, want)


def test_compiled_programs_are_the_eager_ones():
    layer = ht.SelfAttention(64, 4, 2, rotary_base=10000.0, causal=True, deterministic=True).cuda().bfloat16()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 40, 64, device="cuda", dtype=torch.bfloat16)
    results = []
    for function in (layer, compiled):
        out = function(x)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), list(layer.parameters()))))
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_gradients_go_through_autograd_and_checkpoints():
    q, k, v = (torch.randn(2, 60, 4, 64, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3))
    options = dict(causal=True, deterministic=True, dropout_p=0.2, seed=5)
    out, lse = hr.attention(q, k, v, return_lse=True, **options)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), dout)
    want = hr.attention_backward(dout, q.detach(), k.detach(), v.detach(), out.detach(), lse.detach(), **options)
    again = torch.utils.checkpoint.checkpoint(lambda *x: ht.attention(*x, **options), q, k, v, use_reentrant=False)
    for a, b, c in zip(got, want.values(), torch.autograd.grad(again, (q, k, v), dout)):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_merged_halves_are_the_whole():
    q, k, v = (torch.randn(2, 70, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    halves = [hr.attention(q, k[:, part], v[:, part], return_lse=True) for part in (slice(30), slice(30, None))]
    out, lse = hr.merge_states(*halves[0], *halves[1])
    want, want_lse = hr.attention(q, k, v, return_lse=True)
    assert out.is_cuda and out.dtype == want.dtype
    torch.testing.assert_close(out.float(), want.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)


def test_the_drop_in_and_the_functions_of_flash_attn():
    from headrace.flash_attn import flash_attn_func

    q, k, v = (torch.randn(2, 4, 50, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    want = torch.nn.functional.scaled_dot_product_attention(*(x.float() for x in (q, k, v)), is_causal=True)
    for got in (
        ht.scaled_dot_product_attention(q, k, v, is_causal=True),
        flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).transpose(1, 2),
    ):
        torch.testing.assert_close(got.float(), want, rtol=5e-3, atol=5e-3)


def test_vmap():
    x = torch.randn(3, 2, 20, 4, 64, device="cuda", dtype=torch.float16)
    want = torch.stack([hr.attention(a, a, a, causal=True) for a in x])
    assert torch.equal(torch.func.vmap(lambda a: ht.attention(a, a, a, causal=True))(x), want)


def test_devices_are_not_mixed():
    x = torch.randn(1, 8, 2, 64, device="cuda", dtype=torch.float16)
    for change, name in [(dict(k=x.cpu()), "k"), (dict(v=x.cpu()), "v"), (dict(bias=torch.zeros(1, 1, 8, 8)), "bias")]:
        with pytest.raises(ValueError, match=f"^{name}: "):
            hr.attention(**{"q": x, "k": x, "v": x, **change})
    lse = torch.zeros(1, 2, 8, device="cuda")
    with pytest.raises(ValueError, match="^lse_b: "):
        hr.merge_states(x, lse, x, lse.cpu())


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
