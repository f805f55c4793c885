"""headrace.flash_attn: names, order and meaning of arguments are those of flash-attn 2.8."""

import inspect
import itertools

import pytest
import torch

import headrace as hr
import headrace.flash_attn as fa
import headrace.torch as ht
import standard
from headrace.flash_attn.bert_padding import pad_input, unpad_input
from problems import assert_close

TAIL = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"


@pytest.fixture(autouse=True)
def seed(rng):
    torch.manual_seed(int(rng.integers(2**31)))


@pytest.mark.parametrize(
    "function, arguments",
    [
        (fa.flash_attn_func, f"q k v {TAIL}"),
        (
            fa.flash_attn_varlen_func,
            f"q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k {TAIL} block_table",
        ),
        (
            fa.flash_attn_with_kvcache,
            "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table "
            "softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse",
        ),
    ],
)
def test_argument_order(function, arguments):
    assert list(inspect.signature(function).parameters) == arguments.split()


def test_dense_and_packed():
    qkv = torch.randn(2, 9, 3, 4, 8, requires_grad=True)
    q, k, v = qkv.unbind(2)
    slopes = torch.rand(4)
    arguments = (0.0, 0.3, True, (4, -1), 5.0, slopes, True, True)
    out, lse, probabilities = fa.flash_attn_func(q, k, v, *arguments)
    options = dict(scale=0.3, causal=True, window=(4, None), softcap=5.0, alibi_slopes=slopes)
    want_out, want_lse = hr.attention(q, k, v, return_lse=True, **options)
    assert torch.equal(out, want_out) and torch.equal(lse, want_lse) and probabilities is None
    assert torch.equal(fa.flash_attn_qkvpacked_func(qkv, *arguments)[0], out)
    assert torch.equal(fa.flash_attn_kvpacked_func(q, qkv[:, :, 1:], *arguments)[0], out)
    out.sum().backward()
    assert qkv.grad.abs().sum() > 0
    assert torch.equal(fa.flash_attn_func(q, k, v, window_size=(-1, -1)), hr.attention(q, k, v))
    with pytest.raises(ValueError, match="^kv: "):
        fa.flash_attn_kvpacked_func(q, qkv)


def test_ragged_and_packed():
    qkv, cu_seqlens = torch.randn(12, 3, 4, 8), torch.tensor([0, 5, 12], dtype=torch.int32)
    q, k, v = qkv.unbind(1)
    want = hr.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, causal=True, return_lse=True)
    got = fa.flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, 7, 7, causal=True, return_attn_probs=True
    )
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    packed = fa.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 7, causal=True)
    assert torch.equal(packed, want[0])
    packed = fa.flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], cu_seqlens, cu_seqlens, 7, 7, causal=True)
    assert torch.equal(packed, want[0])

    pages = torch.randn(2, 6, 4, 4, 8)  # keys and values: 6 pages of 4 tokens
    table = torch.tensor([[3, 1, 77], [0, 5, -9]], dtype=torch.int32)  # the last entries are not reached
    k, v = (x[table[:, :2].long()].flatten(1, 2)[:, :7].flatten(0, 1)[:-1] for x in pages)
    cu_seqlens_k = torch.tensor([0, 7, 13], dtype=torch.int32)
    got = fa.flash_attn_varlen_func(q, *pages, cu_seqlens, cu_seqlens_k, 7, 7, block_table=table)
    assert torch.equal(got, hr.attention_varlen(q, k, v, cu_seqlens, cu_seqlens_k))


def test_dropout_follows_the_generator():
    q = torch.randn(1, 30, 2, 8)
    state = torch.get_rng_state()
    first, second = (fa.flash_attn_func(q, q, q, dropout_p=0.5) for _ in range(2))
    torch.set_rng_state(state)
    assert torch.equal(fa.flash_attn_func(q, q, q, 0.5), first) and not torch.equal(first, second)


@pytest.mark.parametrize("paged, causal, interleaved", itertools.product([False, True], repeat=3))
def test_kvcache(paged, causal, interleaved, rng):
    batch, new, heads_q, heads_kv, dim, capacity, page = 3, 2, 4, 2, 8, 16, 4
    q = torch.randn(batch, new, heads_q, dim)
    k, v = torch.randn(2, batch, new, heads_kv, dim)
    held = torch.tensor([0, 5, 14], dtype=torch.int32)
    cos, sin = ht.rotary_tables(capacity, dim)
    if paged:
        caches = torch.randn(2, batch * capacity // page, page, heads_kv, dim)
        table = torch.from_numpy(rng.permutation(batch * capacity // page)).int().view(batch, -1)
        dense = caches[:, table.long()].flatten(2, 3).clone()
        more = {"block_table": table}
    else:
        caches = torch.randn(2, batch + 1, capacity, heads_kv, dim)
        entries = torch.tensor([2, 0, 3])
        dense = caches[:, entries].clone()
        more = {"cache_batch_idx": entries}
    out, lse = fa.flash_attn_with_kvcache(
        q, *caches, k, v, cos, sin, held, causal=causal, rotary_interleaved=interleaved, return_softmax_lse=True, **more
    )
    for b in range(batch):
        n = int(held[b])
        at = slice(n, n + new)
        rotate = lambda x, at: ht.apply_rotary(x[None], cos[at], sin[at], interleaved)[0]  # noqa: E731
        dense[0, b, at], dense[1, b, at] = rotate(k[b], at), v[b]
        rotated = rotate(q[b], at if causal else slice(n, n + 1))
        parts = (x.double() for x in (rotated, *dense[:, b, : n + new]))
        want_out, want_lse = standard.sequence(*parts, causal=causal)
        assert_close("out", out[b], want_out, 1e-5)
        assert_close("lse", lse[b], want_lse, 1e-5)
    now = caches[:, table.long()].flatten(2, 3) if paged else caches[:, entries]
    assert torch.equal(now, dense)  # the new tokens are in the cache, and nothing else has changed


def test_kvcache_lengths_and_padding():
    q, cache = torch.randn(2, 1, 4, 8), torch.randn(2, 2, 10, 2, 8)
    full = hr.attention(q, *cache)
    assert torch.equal(fa.flash_attn_with_kvcache(q, *cache), full)
    torch.testing.assert_close(fa.flash_attn_with_kvcache(q, *cache, cache_seqlens=10), full)
    leftpad = torch.tensor([3, 0], dtype=torch.int32)
    got = fa.flash_attn_with_kvcache(q, *cache, cache_seqlens=torch.tensor([8, 2]), cache_leftpad=leftpad, causal=True)
    torch.testing.assert_close(got[0], hr.attention(q[:1], *cache[:, :1, 3:8])[0])
    torch.testing.assert_close(got[1], hr.attention(q[1:], *cache[:, 1:, :2])[0])
    with pytest.raises(ValueError, match="^cache_seqlens: "):
        fa.flash_attn_with_kvcache(q, *cache, *cache[:, :, :1], cache_seqlens=10)
    with pytest.raises(ValueError, match="^k, v: "):
        fa.flash_attn_with_kvcache(q, *cache, cache[0, :, :1], cache_seqlens=1)


def test_padding():
    x = torch.randn(3, 5, 2, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    tokens, indices, cu_seqlens, longest, used = unpad_input(x, mask)
    assert tokens.shape == (8, 2) and longest == 5
    assert cu_seqlens.tolist() == [0, 3, 3, 8] and cu_seqlens.dtype == torch.int32 and used.tolist() == [3, 0, 5]
    padded = pad_input(tokens, indices, 3, 5)
    assert torch.equal(padded, x * mask[..., None])
    padded.sum().backward()
    assert torch.equal(x.grad, mask[..., None].expand_as(x).float())
    unused = torch.zeros_like(mask)
    unused[1, 0] = 1
    assert unpad_input(x, mask, unused)[2].tolist() == [0, 3, 4, 9]
