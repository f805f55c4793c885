"""Standard attention in torch float64, written from docs/semantics.md alone: the oracle of these tests.

Autograd differentiates it, so it knows nothing of the library's own formulas either.
"""

import math

import torch


def scores(q, k, b, causal, window, scale, softcap, bias, alibi_slopes):
    """The scores of one sequence, `[heads_q, seqlen_q, seqlen_k]`, hidden ones -inf; q, k: `[seqlen, heads, dim]`."""
    seqlen_q, heads_q, dim = q.shape
    seqlen_k, heads_kv, _ = k.shape
    k = k.repeat_interleave(heads_q // heads_kv, 1)
    s = torch.einsum("ihd,jhd->hij", q, k) * (1 / math.sqrt(dim) if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None, :]
    if bias is not None:
        one = bias[b if bias.shape[0] > 1 else 0]
        one = one[:, : max(seqlen_q, 1), : max(seqlen_k, 1)]  # ragged: indexed inside the sequence
        s = s + one.expand(heads_q, seqlen_q, seqlen_k)
    if alibi_slopes is not None:
        slopes = alibi_slopes if alibi_slopes.ndim == 1 else alibi_slopes[b]
        s = s - slopes.double()[:, None, None] * (i + seqlen_k - seqlen_q - j).abs()
    shift = 0 if causal == "top_left" else seqlen_k - seqlen_q
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if causal:
        visible &= j <= i + shift
    if window[0] is not None:
        visible &= j >= i + shift - window[0]
    if window[1] is not None:
        visible &= j <= i + shift + window[1]
    return s.masked_fill(~visible, -math.inf)


def expand(mask, b, heads_q, seqlen_q, seqlen_k):
    one = mask[b if mask.shape[0] > 1 else 0]
    return one[:, : max(seqlen_q, 1), : max(seqlen_k, 1)].expand(heads_q, seqlen_q, seqlen_k)


def sequence(
    q,
    k,
    v,
    b=0,
    *,
    causal=False,
    window=(None, None),
    scale=None,
    softcap=0.0,
    bias=None,
    alibi_slopes=None,
    mask=None,
    block_mask=None,
    sinks=None,
    keep=None,
    dropout_p=0.0,
):
    """out `[seqlen_q, heads_q, value_dim]` and lse `[heads_q, seqlen_q]` of one sequence."""
    s = scores(q, k, b, causal, window, scale, softcap, bias, alibi_slopes)
    heads_q, seqlen_q, seqlen_k = s.shape
    if mask is not None:
        s = s.masked_fill(~expand(mask, b, heads_q, seqlen_q, seqlen_k), -math.inf)
    if block_mask is not None:
        blocks, block_q, block_k = block_mask
        blocks = blocks.repeat_interleave(block_q, 2).repeat_interleave(block_k, 3)
        s = s.masked_fill(~expand(blocks, b, heads_q, seqlen_q, seqlen_k), -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double()[:, None, None].expand(heads_q, seqlen_q, 1)], 2)
    seen = torch.isfinite(s).any(2)
    safe = torch.where(seen[..., None], s, 0.0)  # a row of -inf would give NaN, also to autograd
    if s.shape[2] == 0:
        lse = torch.full((heads_q, seqlen_q), -math.inf, dtype=torch.float64)
    else:
        lse = torch.where(seen, torch.logsumexp(safe, 2), -math.inf)
    p = torch.where(seen[..., None], torch.exp(s - torch.where(seen, lse, 0.0)[..., None]), 0.0)[..., :seqlen_k]
    if keep is not None:
        p = p * keep[b, :, :seqlen_q, :seqlen_k] / (1 - dropout_p)
    v = v.repeat_interleave(heads_q // v.shape[1], 1)
    return torch.einsum("hij,jhd->ihd", p, v), lse


def attention(q, k, v, **options):
    """As headrace.attention, dense; `keep` is the dropout mask, block_mask (mask, block_q, block_k)."""
    parts = [sequence(q[b], k[b], v[b], b, **options) for b in range(q.shape[0])]
    return torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])


def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **options):
    """As headrace.attention_varlen."""
    outs, lses = [], []
    for b in range(len(cu_seqlens_q) - 1):
        tokens_q, tokens_k = (slice(int(cu[b]), int(cu[b + 1])) for cu in (cu_seqlens_q, cu_seqlens_k))
        out, lse = sequence(q[tokens_q], k[tokens_k], v[tokens_k], b, **options)
        outs.append(out), lses.append(lse)
    rest = q.shape[0] - int(cu_seqlens_q[-1])
    outs.append(q.new_zeros(rest, q.shape[1], v.shape[2]))
    lses.append(q.new_full((q.shape[1], rest), -math.inf))
    return torch.cat(outs), torch.cat(lses, 1)
