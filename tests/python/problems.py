"""Random calls over the whole space of options, as torch tensors."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

import headrace as hr
import standard

DTYPES = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-12}


def strided(rng, x):
    """The same values in another layout: a slice of more memory, or other dimensions outermost."""
    layout = rng.integers(3)
    if layout == 1 and x.ndim == 4:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == 2:
        wide = x.new_full((*x.shape[:-1], x.shape[-1] + 3), float("nan") if x.is_floating_point() else 1)
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]
    return x.contiguous()


@dataclass
class Problem:
    """q, k, v and the options of one call; cu_seqlens is a pair or None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens: tuple | None
    options: dict = field(default_factory=dict)
    answered: ClassVar[int] = 0  # how often the oracle was asked

    def call(self, **more):
        if self.cu_seqlens:
            return hr.attention_varlen(self.q, self.k, self.v, *self.cu_seqlens, **self.options, **more)
        return hr.attention(self.q, self.k, self.v, **self.options, **more)

    def backward(self, dout, out, lse, **more):
        arguments = (dout, self.q, self.k, self.v, out, lse)
        if self.cu_seqlens:
            return hr.attention_varlen_backward(*arguments, *self.cu_seqlens, **self.options, **more)
        return hr.attention_backward(*arguments, **self.options, **more)

    def oracle(self):
        """(out, lse, inputs) in float64: inputs by name are leaves that require gradients."""
        Problem.answered += 1
        leaves = {name: getattr(self, name).detach().double().requires_grad_() for name in "qkv"}
        options = dict(self.options)
        for name in ("bias", "sinks"):
            if name in options:
                leaves[name] = options[name] = options[name].detach().double().requires_grad_()
        seed = options.pop("seed", 0)
        if options.get("dropout_p"):
            lengths = self.longest()
            batch = len(self.cu_seqlens[0]) - 1 if self.cu_seqlens else self.q.shape[0]
            keep = hr.dropout_mask(batch, self.q.shape[-2], *lengths, options["dropout_p"], seed)
            options["keep"] = torch.from_numpy(keep)
        if "block_mask" in options:
            block = options["block_mask"]
            options["block_mask"] = (block.mask, block.block_q, block.block_k)
        arguments = [leaves[name] for name in "qkv"]
        if self.cu_seqlens:
            out, lse = standard.attention_varlen(*arguments, *self.cu_seqlens, **options)
        else:
            out, lse = standard.attention(*arguments, **options)
        return out, lse, leaves

    def longest(self):
        if self.cu_seqlens:
            return [max(np.diff(cu).max(initial=0), 0) for cu in self.cu_seqlens]
        return self.q.shape[1], self.k.shape[1]

    def tolerance(self):
        """Of out: that of the type, and what rounding a score makes of a probability, where distances make scores large."""
        slopes = self.options.get("alibi_slopes")
        largest = 0.0 if slopes is None or not slopes.numel() else float(slopes.abs().max()) * max(self.longest())
        return DTYPES[self.q.dtype] + largest * (2**-53 if self.q.dtype == torch.float64 else 2**-24)

    def gradient_floor(self, gradient):
        """How large the terms are that cancel in an element of a gradient: sums over dout and v, and over all scores
        that share the element."""
        scores = self.q.shape[-2] * self.q.numel() / max(self.q.shape[-1] * self.q.shape[-2], 1) * max(self.longest()[1], 1)
        terms = max(scores / max(gradient.numel(), 1), 1) ** 0.5
        factor = max(abs(self.options.get("scale", 1)), 1) / (1 - self.options.get("dropout_p", 0))
        return 0.2 * self.v.shape[-1] ** 0.5 * terms * factor

    def __str__(self):
        shapes = [f"{name} {tuple(getattr(self, name).shape)}" for name in "qkv"]
        return f"{self.q.dtype} {shapes} {self.cu_seqlens} {self.options}"


def draw(rng, dtype=None):
    """A random problem: small, but larger than the smallest tiles of the kernels now and then."""

    def chance(p):
        return rng.random() < p

    def normal(*shape):
        return torch.from_numpy(rng.standard_normal(shape))

    dtype = dtype or list(DTYPES)[rng.choice(4, p=[0.4, 0.15, 0.15, 0.3])]
    batch, heads_kv, group = (int(x) for x in rng.integers(1, 4, 3))
    heads_q = heads_kv * group
    dim, value_dim = (int(x) for x in rng.integers(1, 40, 2))
    longest = 300 if chance(0.05) else 40
    options = {}
    if chance(0.3):
        lengths = [rng.integers(0, longest, batch) for _ in range(2)]
        cu_seqlens = tuple(np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in lengths)
        max_q, max_k = (int(x.max()) for x in lengths)
        totals = [int(cu[-1] + rng.integers(0, 3)) for cu in cu_seqlens]
        shapes = [(totals[0], heads_q, dim), (totals[1], heads_kv, dim), (totals[1], heads_kv, value_dim)]
    else:
        cu_seqlens = None
        max_q, max_k = (int(x) for x in rng.integers(0 if chance(0.1) else 1, longest, 2))
        shapes = [(batch, max_q, heads_q, dim), (batch, max_k, heads_kv, dim), (batch, max_k, heads_kv, value_dim)]
    q, k, v = (strided(rng, normal(*shape).to(dtype)) for shape in shapes)

    def broadcast():
        full = (batch, heads_q, max_q, max_k)
        return [size if chance(0.6) else 1 for size in full]

    options["causal"] = [False, True, "bottom_right", "top_left"][rng.integers(4)]
    if chance(0.3):
        options["window"] = tuple(None if chance(0.3) else int(rng.integers(-5, longest)) for _ in range(2))
    if chance(0.3):
        options["scale"] = float(rng.normal())
    if chance(0.3):
        options["softcap"] = float(rng.uniform(0.5, 20))
    if chance(0.3):
        bias = normal(*broadcast()).to(torch.float32 if chance(0.5) else dtype)
        options["bias"] = torch.where(torch.from_numpy(rng.random(bias.shape) < 0.1), -torch.inf, bias)
    if chance(0.3):
        options["mask"] = torch.from_numpy(rng.random(broadcast()) < 0.7)
    if chance(0.2):
        options["alibi_slopes"] = normal(*([heads_q] if chance(0.5) else [batch, heads_q])).float()
    if chance(0.3):
        options["sinks"] = normal(heads_q).float()
    if chance(0.2):
        blocks = [int(x) for x in rng.integers(1, 20, 2)]
        shape = [batch, heads_q, -(-max_q // blocks[0]), -(-max_k // blocks[1])]
        shape[:2] = [size if chance(0.5) else 1 for size in shape[:2]]
        options["block_mask"] = hr.BlockMask(torch.from_numpy(rng.random(shape) < 0.7), *blocks)
    if chance(0.2):
        options.update(dropout_p=float(rng.uniform(0, 0.6)), seed=int(rng.integers(2**63)))
    return Problem(q, k, v, cu_seqlens, options)


def assert_close(name, got, want, tolerance, floor=1e-2):
    """Within tolerance of the norm of what is wanted, each element counting as at least `floor`; infinities where it
    has them."""
    assert got.shape == want.shape, name
    tolerance = max(tolerance, DTYPES[got.dtype])  # sinks and their gradients are float32 in a float64 call, too
    got, want = got.detach().double(), want.detach().double()
    finite = torch.isfinite(want)
    assert torch.equal(got[~finite], want[~finite]), f"{name}: infinities differ"
    error = (got[finite] - want[finite]).norm()
    scale = (want[finite].square() + floor**2).sum().sqrt()
    assert error <= tolerance * scale, f"{name}: error {error} of {scale}"
