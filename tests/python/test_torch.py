"""headrace.torch: what PyTorch's transformations make of the operators."""

import copy

import numpy as np
import pytest
import torch
from torch import library
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import headrace as hr
import headrace.torch as ht
import standard
from problems import DTYPES, assert_close, draw

sdpa = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def seed(rng):
    torch.manual_seed(int(rng.integers(2**31)))


def leaves(*shapes, dtype=torch.float64):
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes]


def test_gradcheck():
    q, k, v, bias = leaves((2, 5, 4, 3), (2, 6, 2, 3), (2, 6, 2, 4), (1, 4, 5, 6))
    options = dict(softcap=3.0, causal=True, dropout_p=0.2, seed=2**64 - 5)
    assert torch.autograd.gradcheck(
        lambda q, k, v, bias: ht.attention(q, k, v, bias=bias, return_lse=True, **options), (q, k, v, bias)
    )
    q, k, v = leaves((9, 4, 3), (8, 2, 3), (8, 2, 4))
    cu_seqlens = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([0, 6, 8], dtype=torch.int32)
    assert torch.autograd.gradcheck(
        lambda q, k, v: ht.attention_varlen(q, k, v, *cu_seqlens, window=(2, 3), return_lse=True), (q, k, v)
    )


def test_any_subset_of_inputs_may_require_gradients(rng):
    for _ in range(100):
        problem = draw(rng, torch.float32)
        options = dict(problem.options)
        inputs = {name: getattr(problem, name) for name in "qkv"}
        inputs.update({name: options.pop(name) for name in ("bias", "sinks") if name in options})
        wanted = [name for name in inputs if rng.random() < 0.5]
        mine = {name: x.detach().clone().requires_grad_(name in wanted) for name, x in inputs.items()}
        function, lengths = (hr.attention_varlen, problem.cu_seqlens) if problem.cu_seqlens else (hr.attention, ())
        out, lse = function(
            mine.pop("q"), mine.pop("k"), mine.pop("v"), *lengths, return_lse=True, **options, **mine
        )
        assert out.requires_grad == lse.requires_grad == bool(wanted)


def test_autograd_gives_the_bits_of_the_functions(rng):
    for _ in range(100):
        problem = draw(rng)
        options = dict(problem.options)
        inputs = {name: getattr(problem, name) for name in "qkv"}
        inputs.update({name: options.pop(name) for name in ("bias", "sinks") if name in options})
        mine = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        arguments = [mine[name] for name in "qkv"]
        rest = {name: x for name, x in mine.items() if name not in "qkv"}
        function = ht.attention
        if problem.cu_seqlens:
            function, lengths = ht.attention_varlen, [torch.from_numpy(x) for x in problem.cu_seqlens]
            arguments += lengths
        out, lse = function(*arguments, return_lse=True, **options, **rest)
        want_out, want_lse = problem.call(return_lse=True)
        assert torch.equal(out, want_out) and torch.equal(lse, want_lse)
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        got = torch.autograd.grad((out, lse), list(mine.values()), (dout, dlse))
        need = {f"need_d{name}": True for name in rest}
        want = problem.backward(dout, want_out, want_lse, dlse=dlse, **need)
        for name, gradient in zip(mine, got):
            assert torch.equal(gradient, want[f"d{name}"]), f"{name} of {problem}"


def test_modes_see_the_operator():
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x = torch.randn(1, 5, 2, 8, requires_grad=True)
    with Mode():
        out = ht.attention(x, x, x)
    assert "headrace.attention_forward.default" in seen
    torch.testing.assert_close(out, ht.attention(x, x, x))
    with torch._subclasses.FakeTensorMode() as fake:
        y = fake.from_tensor(x)
        assert ht.attention(y, y, y).shape == x.shape


def test_tensors_without_data_have_shapes():
    x = torch.empty(2, 5, 4, 8, device="meta", requires_grad=True)
    out, lse = ht.attention(x, x, x, return_lse=True)
    assert out.is_meta and out.shape == x.shape and lse.shape == (2, 4, 5)


def test_changing_an_input_before_backward_is_noticed():
    q, bias = torch.randn(1, 5, 2, 8, requires_grad=True), torch.randn(1, 1, 5, 5)
    out = ht.attention(q, q, q, bias=bias)
    bias.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradients_reach_everything_through_out_and_lse(rng):
    q, k, v, bias = leaves((2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8), (2, 1, 7, 9))
    sinks = torch.randn(4, requires_grad=True)
    out, lse = ht.attention(q, k, v, bias=bias, sinks=sinks, return_lse=True)
    want_out, want_lse = standard.attention(q, k, v, bias=bias, sinks=sinks)
    inputs = (q, k, v, bias, sinks)
    for part, want in ((out, want_out), (lse, want_lse), (out.sum() + lse.square().sum(), None)):
        if want is None:
            want = want_out.sum() + want_lse.square().sum()
        weight = torch.randn_like(want)
        got = torch.autograd.grad((part * weight).sum(), inputs, allow_unused=True, retain_graph=True)
        expected = torch.autograd.grad((want * weight).sum(), inputs, allow_unused=True, retain_graph=True)
        for name, a, b in zip("qkvbs", got, expected):
            assert_close(name, a, torch.zeros_like(a) if b is None else b, 1e-11)


def test_second_gradients_are_refused():
    q, k, v = leaves(*[(1, 3, 1, 4)] * 3)
    (dq,) = torch.autograd.grad(ht.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="once more"):
        dq.sum().backward()


OPERATOR_CASES = {
    "plain": {},
    "all": dict(bias=(2, 1, 5, 6), sinks=(4,), left=3, causal="bottom_right", softcap=2.0, dropout_p=0.1),
}


@pytest.mark.parametrize("case", OPERATOR_CASES)
def test_opcheck(case):
    options = OPERATOR_CASES[case]
    q, k, v = leaves((2, 5, 4, 3), (2, 6, 2, 3), (2, 6, 2, 4))
    bias, sinks = (torch.randn(options[x], requires_grad=True) if x in options else None for x in ("bias", "sinks"))
    common = (q, k, v, bias, None, None, sinks, *[None] * 6, 1, 1, options.get("causal", ""), options.get("left"), None)
    common += (None, options.get("softcap", 0.0), options.get("dropout_p", 0.0), 3, False, False)
    library.opcheck(torch.ops.headrace.attention.default, common)
    with torch.no_grad():
        out, lse = torch.ops.headrace.attention.default(*common)
        gradients = (torch.randn_like(out), None, out, lse, bias is not None, sinks is not None)
        inputs = [x.detach() if isinstance(x, torch.Tensor) else x for x in common]
    library.opcheck(torch.ops.headrace.attention_backward.default, (*gradients, *inputs))


def test_compile_fullgraph():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(32)
            self.attention = ht.SelfAttention(32, 4, 2, rotary_base=10000.0, causal=True)

        def forward(self, x):
            return x + self.attention(self.norm(x))

    model = Model()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    for seqlen in (7, 12, 20):
        x = torch.randn(2, seqlen, 32)
        want, got = model(x), compiled(x)
        torch.testing.assert_close(got, want)
        want.square().sum().backward(), got.square().sum().backward()
    for a, b in zip(model.parameters(), compiled.parameters()):
        torch.testing.assert_close(b.grad, a.grad)


def test_compiled_programs_call_the_operators_without_a_formula():
    programs = []

    def compiler(program, inputs):
        programs.append(program.code)
        return program

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    x = torch.randn(1, 5, 2, 8, requires_grad=True)
    torch.compile(lambda x: ht.attention(x, x, x), fullgraph=True, backend=backend)(x).sum().backward()
    for program, name in zip(programs, ("attention_forward", "attention_backward"), strict=True):
        assert f"torch.ops.headrace.{name}.default" in program and "headrace.attention.default" not in program


def test_compiled_dropout_draws_its_seed():
    x = torch.randn(1, 2, 16, 8)
    function = torch.compile(
        lambda x: ht.scaled_dot_product_attention(x, x, x, dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )
    assert not torch.equal(function(x), function(x))


def test_export():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return ht.attention(q, k, v, causal=True)

    inputs = tuple(torch.randn(2, 9, 2, 8) for _ in range(3))
    program = torch.export.export(Attention(), inputs)
    torch.testing.assert_close(program.module()(*inputs), hr.attention(*inputs, causal=True))


def test_vmap():
    x = torch.randn(3, 2, 5, 4, 8)
    want = torch.stack([hr.attention(a, a, a, causal=True) for a in x])
    torch.testing.assert_close(torch.func.vmap(lambda a: ht.attention(a, a, a, causal=True))(x), want)
    torch.testing.assert_close(
        torch.func.vmap(lambda a: ht.attention(a, x[0], x[1], causal=True), in_dims=2)(x.movedim(0, 2)),
        torch.stack([hr.attention(a, x[0], x[1], causal=True) for a in x]),
    )
    bias = torch.randn(3, 1, 4, 5, 5)
    torch.testing.assert_close(
        torch.func.vmap(lambda a, b: ht.attention(a, a, a, bias=b))(x, bias),
        torch.stack([hr.attention(a, a, a, bias=b) for a, b in zip(x, bias)]),
    )


def test_gradients_per_sample():
    x, sinks = torch.randn(3, 2, 5, 4, 8), torch.randn(4)

    def loss(a, sinks):
        return ht.attention(a, a, a, causal=True, sinks=sinks).square().sum()

    got = torch.func.vmap(torch.func.grad(loss, (0, 1)), (0, None))(x, sinks)
    for i, a in enumerate(x):
        inputs = a.clone().requires_grad_(), sinks.clone().requires_grad_()
        for part, want in zip(got, torch.autograd.grad(loss(*inputs), inputs)):
            torch.testing.assert_close(part[i], want)
    plain = torch.func.vmap(torch.func.grad(lambda a: ht.attention(a, a, a).square().sum()))(x)
    y = x.clone().requires_grad_()
    sum(ht.attention(a, a, a).square().sum() for a in y).backward()
    torch.testing.assert_close(plain, y.grad)


def test_checkpointing():
    q, k, v = leaves(*[(1, 2, 9, 8)] * 3)
    state = torch.get_rng_state()
    ht.scaled_dot_product_attention(q, k, v, dropout_p=0.3).square().sum().backward()
    want = q.grad.clone()
    q.grad = None
    torch.set_rng_state(state)
    function = lambda *x: ht.scaled_dot_product_attention(*x, dropout_p=0.3)  # noqa: E731
    checkpoint(function, q, k, v, use_reentrant=False).square().sum().backward()
    assert torch.equal(q.grad, want)


def test_autocast():
    q, k, v = leaves(*[(1, 5, 2, 8)] * 3, dtype=torch.float32)
    bias = torch.randn(1, 1, 5, 5, dtype=torch.float16)
    with torch.autocast("cpu", torch.bfloat16):
        out = ht.attention(q, k, v, bias=bias)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert q.grad.dtype == torch.float32


def random_sdpa(rng):
    dtype = [torch.float32, torch.bfloat16, torch.float64][rng.integers(3)]
    leading = [(), (2,), (2, 3)][rng.integers(3)]
    heads, dim, value_dim = (int(x) for x in rng.integers(1, 5, 3) * [1, 4, 4])
    seqlen_q, seqlen_k = (int(x) for x in rng.integers(1, 30, 2))
    q, k, v = (
        torch.randn(*leading, heads, n, d, dtype=dtype, requires_grad=True)
        for n, d in ((seqlen_q, dim), (seqlen_k, dim), (seqlen_k, value_dim))
    )
    options = {"scale": None if rng.random() < 0.5 else float(rng.uniform(0.1, 1))}
    kind = rng.integers(4)
    if kind == 1:
        options["is_causal"] = True
    elif kind > 1:
        shape = [*leading, heads, seqlen_q, seqlen_k][rng.integers(len(leading) + 2) :]
        shape = [size if rng.random() < 0.7 else 1 for size in shape]
        options["attn_mask"] = torch.rand(shape) < 0.7 if kind == 2 else torch.randn(shape, dtype=dtype)
        if kind == 2 and torch.__version__ < "2.5":
            options["attn_mask"][..., 0] = True  # it gave NaN to rows that see nothing
    return q, k, v, options


def test_sdpa_is_that_of_torch(rng):
    for _ in range(150):
        q, k, v, options = random_sdpa(rng)
        out = ht.scaled_dot_product_attention(q, k, v, **options)
        wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
        mask = options.get("attn_mask")
        if mask is not None and mask.dtype != torch.bool:
            options["attn_mask"] = mask.double()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            want = sdpa(*wide, **options)
        assert_close("out", out, want, DTYPES[q.dtype])
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
        for name, got, expected in zip("qkv", gradients, torch.autograd.grad(want.sum(), wide)):
            assert_close(f"d{name}", got, expected, 3 * DTYPES[q.dtype], 2)


def test_sdpa_keeps_no_layout_but_its_own():
    (x,) = leaves((2, 4, 5, 8))
    for layout in ((0, 1, 2, 3), (0, 2, 1, 3), (1, 2, 0, 3)):  # what lies outermost, and so on
        q = x.detach().permute(layout).contiguous().permute(tuple(np.argsort(layout))).requires_grad_()
        out = ht.scaled_dot_product_attention(q, q, q)
        assert out.shape == q.shape and out.transpose(1, 2).is_contiguous()
        torch.testing.assert_close(out, sdpa(q, q, q))
        for got, want in zip(*(torch.autograd.grad(x.square().sum(), q) for x in (out, sdpa(q, q, q)))):
            torch.testing.assert_close(got, want)


def test_sdpa_arguments():
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    each = k.repeat_interleave(2, 1)  # torch 2.4 has no enable_gqa
    torch.testing.assert_close(ht.scaled_dot_product_attention(q, k, k, enable_gqa=True), sdpa(q, each, each))
    with pytest.raises(ValueError, match="^key: .*enable_gqa"):
        ht.scaled_dot_product_attention(q, k, k)
    with pytest.raises(ValueError, match="^attn_mask: "):
        ht.scaled_dot_product_attention(q, q, q, torch.ones(5, 5, dtype=torch.bool), is_causal=True)
    torch.testing.assert_close(ht.scaled_dot_product_attention(q[0, 0], q[0, 0], q[0, 0]), sdpa(*[q[0, 0]] * 3))


@pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="this torch has no such registry"
)
def test_registered_as_an_implementation_of_flash_attention(rng, monkeypatch):
    calls = []
    for name in ("forward", "backward"):
        function = getattr(hr._attention, name)
        monkeypatch.setattr(
            hr._attention, name, lambda *a, _name=name, _f=function, **o: calls.append(_name) or _f(*a, **o)
        )
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 10, 32, requires_grad=True)
    want = layer(x)
    (want_gradient,) = torch.autograd.grad(want.square().sum(), x)
    ht.register()
    torch.nn.attention.activate_flash_attention_impl("headrace")
    try:
        assert torch.nn.attention.current_flash_attention_impl() == "headrace"
        got = layer(x)
        (gradient,) = torch.autograd.grad(got.square().sum(), x)
        assert calls == ["forward", "backward"]
        for mask in (None, torch.rand(10, 10) < 0.8, torch.randn(2, 1, 10, 10)):
            q = torch.randn(2, 4, 10, 8)
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                expected = sdpa(q, q, q, mask)
            torch.testing.assert_close(sdpa(q, q, q, mask), expected)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    count = len(calls)
    assert count == 5
    sdpa(q, q, q)
    assert len(calls) == count
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradient, want_gradient)


def test_module_ragged_is_dense():
    module = ht.SelfAttention(24, 4, 2, rotary_base=100.0, rotary_dim=4, bias=True, causal=True)
    x = torch.randn(2, 6, 24)
    positions = torch.arange(6).repeat(2)
    ragged = module(x.flatten(0, 1), torch.tensor([0, 6, 12], dtype=torch.int32), positions)
    torch.testing.assert_close(ragged.unflatten(0, (2, 6)), module(x))
    with pytest.raises(ValueError, match="^num_heads: "):
        ht.SelfAttention(24, 4, 3)
    with pytest.raises(ValueError, match="^positions: "):
        module(x[0], torch.tensor([0, 6]))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_keeps_relative_positions(interleaved):
    q, k = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 1, 8, dtype=torch.float64)
    cos, sin = ht.rotary_tables(50, 8)

    def product(i, j):
        rotate = lambda x, at: ht.apply_rotary(x, cos[at : at + 1], sin[at : at + 1], interleaved)  # noqa: E731
        return (rotate(q, i) * rotate(k, j)).sum()

    torch.testing.assert_close(product(3, 10), product(33, 40), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ht.apply_rotary(q, cos[:1], sin[:1], interleaved), q)


def test_threads_of_torch_are_used():
    threads = torch.get_num_threads()
    x = torch.randn(1, 500, 4, 32)
    want = hr.attention(x, x, x)
    try:
        torch.set_num_threads(1)
        assert hr.explain(x, x, x).details["threads"] == 1
        assert torch.equal(hr.attention(x, x, x), want)
    finally:
        torch.set_num_threads(threads)


def test_errors_name_the_argument():
    x = torch.randn(1, 4, 2, 8, requires_grad=True)
    for change, error, name in [
        (dict(k=x[..., :4]), ValueError, "k"),
        (dict(v=x.double()), TypeError, "v"),
        (dict(causal=3), ValueError, "causal"),
        (dict(seed=-1), ValueError, "seed"),
        (dict(block_mask=x), TypeError, "block_mask"),
        (dict(mask=torch.ones(1, 1, 4, 5, dtype=torch.bool)), ValueError, "mask"),
        (dict(sinks=torch.ones(2, dtype=torch.float64)), TypeError, "sinks"),
    ]:
        with pytest.raises(error, match=f"^{name}: "):
            ht.attention(**{"q": x, "k": x, "v": x, **change})
    assert np.isfinite(hr.attention(x, x, x).detach().numpy()).all()
