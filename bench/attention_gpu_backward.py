"""The backward pass beside cuDNN: the tables `backward`, `both`, `options` and `memory` of attention_gpu_peers.py, which
says how contestants are timed.

Backward: TFLOP/s count 10 head_dim for each visible pair, of forward and backward together 14. cuDNN is called through
PyTorch's autograd, as everybody calls it. Gradients of two heads are compared with float64 before anything is timed."""

import ctypes
import math

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_gpu_library import BACKWARD, FORWARD, LENGTHS, SMALL_LENGTHS, TOKENS, WIDTH, Planned, Tensor, race, smi

DIMS = (64, 128, 256)
CONTRACT = {torch.float32: 6e-6, torch.float16: 3e-3, torch.bfloat16: 2.4e-2}

# TFLOP/s of FlashAttention-3 (August 2026) and of cuDNN 9.19 through PyTorch 2.11 on another H200, bfloat16, the same
# grid and protocol, 2026-11-29: by (head_dim, causal), over LENGTHS. Only their ratio is comparable with another run.
FLASH_ATTENTION_3 = {
    (64, False): ((324, 281), (393, 368), (450, 400), (480, 425), (512, 435), (513, 448)),
    (64, True): ((194, 171), (297, 252), (386, 324), (444, 370), (499, 406), (531, 431)),
    (128, False): ((343, 338), (433, 443), (510, 473), (550, 507), (575, 525), (580, 529)),
    (128, True): ((224, 215), (341, 311), (425, 394), (496, 470), (560, 493), (587, 522)),
    (256, False): ((291, 243), (358, 305), (407, 348), (423, 367), (442, 358), (449, 357)),
    (256, True): ((200, 180), (288, 254), (355, 302), (403, 340), (427, 373), (450, 380)),
}


def exact_gradients(t, b, kv, causal, kept=None):
    """dq of the query heads that read key head kv of sequence b, its dk and dv, and dbias of those query heads (empty
    without a bias), in float64. kept: the dropout mask over (head, query, key), already divided by 1 - p."""
    group, n, dim = t["q"].shape[2] // t["k"].shape[2], t["q"].shape[1], t["q"].shape[3]
    k, v = t["k"][b, :, kv].double(), t["v"][b, :, kv].double()
    dk, dv, dq, dbias = torch.zeros_like(k), torch.zeros_like(v), [], []
    for h in range(kv * group, (kv + 1) * group):
        q, dout = t["q"][b, :, h].double(), t["dout"][b, :, h].double()
        rows = []
        for begin in range(0, n, 1024):
            part = slice(begin, begin + 1024)
            s = q[part] @ k.T * dim**-0.5
            if "bias" in t:
                s += t["bias"][b, h, part].double()
            if causal:
                hidden = torch.arange(n, device="cuda")[None] > torch.arange(n, device="cuda")[part, None]
                s = s.masked_fill(hidden, float("-inf"))
            p = torch.softmax(s, -1)
            weight = p if kept is None else p * kept[h, part]
            dp = dout[part] @ v.T
            if kept is not None:
                dp = dp * kept[h, part]
            ds = p * (dp - (p * dp).sum(-1, keepdim=True))
            if "bias" in t:
                dbias.append(ds)
            ds = ds * dim**-0.5
            rows.append(ds @ k)
            dk += ds.T @ q[part]
            dv += weight.T @ dout[part]
        dq.append(torch.cat(rows))
    return torch.stack(dq, 1), dk, dv, torch.cat(dbias) if dbias else None


def relative_error(got, exact):
    return float((got.double() - exact).norm() / exact.norm())


class Problem:
    """Tensors of a call [batch, n, heads, dim], filled from N(0, 1), and what runs on them."""

    def __init__(self, library, *, batch, n, heads, dim, causal, dtype=torch.bfloat16, heads_kv=None, bias=None):
        self.api, self.causal, self.dtype = library, causal, dtype
        self.batch, self.n, self.heads, self.heads_kv, self.dim = batch, n, heads, heads_kv or heads, dim
        new = lambda h: torch.randn(batch, n, h, dim, device="cuda", dtype=dtype)  # noqa: E731
        self.tensors = {"q": new(heads), "k": new(self.heads_kv), "v": new(self.heads_kv), "dout": new(heads)}
        t = self.tensors
        t["out"] = torch.full_like(t["q"], math.nan)
        t["lse"] = torch.full((batch, heads, n), math.nan, device="cuda")
        t.update({"d" + name: torch.full_like(t[name], math.nan) for name in "qkv"})
        if bias is not None:
            t["bias"] = bias

    def planned(self, which, **options):
        """A pass by Headrace; before a backward pass the forward pass runs once with the same options."""
        names = "q k v out lse".split() + (["dout", "dq", "dk", "dv"] if which == BACKWARD else [])
        names += [name for name in ("bias",) if name in self.tensors]
        tensors = {name: self.tensors[name] for name in names}
        tensors.update(options.pop("outputs", {}) if which == BACKWARD else {})
        if which == BACKWARD:
            self.planned(FORWARD, **{k: v for k, v in options.items() if k != "deterministic"})()
        return Planned(self.api, which, tensors, causal=int(self.causal), **options)

    def checked_backward(self, kept=None, **options):
        """A backward pass whose gradients of the first and the last key head have been compared with float64."""
        backward = self.planned(BACKWARD, **options)
        got, group, worst = backward.tensors, self.heads // self.heads_kv, 0.0
        for name in got:
            if name in ("dq", "dk", "dv", "dbias"):
                got[name].fill_(math.nan)
        backward()
        for b, kv in {(0, 0), (self.batch - 1, self.heads_kv - 1)}:
            heads = slice(kv * group, (kv + 1) * group)
            dq, dk, dv, dbias = exact_gradients(self.tensors, b, kv, self.causal, kept)
            worst = max(worst, relative_error(got["dq"][b, :, heads], dq), relative_error(got["dk"][b, :, kv], dk),
                        relative_error(got["dv"][b, :, kv], dv))
            if "dbias" in got:
                worst = max(worst, relative_error(got["dbias"][b, heads].flatten(0, 1), dbias))
        if not worst < CONTRACT[self.dtype]:
            raise RuntimeError(f"wrong gradients: relative error {worst}")
        backward.error = worst
        return backward

    def cudnn(self, dropout_p=0.0):
        """(forward, backward, both) through PyTorch."""
        inputs = [self.tensors[name].transpose(1, 2).detach().requires_grad_() for name in "qkv"]
        dout = self.tensors["dout"].transpose(1, 2)

        def forward():
            return torch.nn.functional.scaled_dot_product_attention(
                *inputs, is_causal=self.causal, dropout_p=dropout_p, enable_gqa=self.heads != self.heads_kv)

        out = forward()
        return (forward, lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True),
                lambda: torch.autograd.grad(forward(), inputs, dout))

    def flops(self, of_pair):
        return of_pair * self.dim * self.batch * self.heads * self.n * self.n * (0.5 if self.causal else 1.0)

    def cell(self, name, times, of_pair, contestants):
        """What was measured, with the rate of each contestant beside that of `headrace`."""
        cell = {"name": name, "batch": self.batch, "seqlen": self.n, "heads": self.heads, "heads_kv": self.heads_kv,
                "head_dim": self.dim, "causal": self.causal, "dtype": str(self.dtype).split(".")[1],
                "clock_power": smi("clocks.sm,power.draw")}
        for key, value in times.items():
            flops = contestants["cublas"].flops if key == "cublas" else self.flops(of_pair)
            cell[key] = {**value, "tflops": flops / value["ms"] / 1e9}
            if "headrace" in times:
                cell[key]["of_headrace"] = times["headrace"]["ms"] / value["ms"]
            if hasattr(contestants[key], "error"):
                cell[key]["error"] = contestants[key].error
        if "cudnn" in times and "headrace" in times:
            cell["ratio"] = times["cudnn"]["ms"] / times["headrace"]["ms"]
        if "cublas" in times and "headrace" in times:
            cell["of_cublas"] = cell["headrace"]["tflops"] / cell["cublas"]["tflops"]
        rates = ", ".join(f"{key} {cell[key]['tflops']:.0f}" for key in times)
        ratios = "".join(f", {key} {cell[key]:.3f}" for key in ("ratio", "of_cublas") if key in cell)
        print(f"{name:16} {cell['dtype']:8} d {self.dim:3} {'causal' if self.causal else 'full  '} n {self.n:5} heads "
              f"{self.heads}/{self.heads_kv}: {rates}{ratios}", flush=True)
        return cell


def of_grid(library, n, dim, causal, **more):
    return Problem(library, batch=TOKENS // n, n=n, heads=WIDTH // dim, dim=dim, causal=causal, **more)


class Tables:
    """run: gets a table's name, the arguments that say which cell, and a function that measures it; it keeps to the time
    that is left and notes what failed."""

    def __init__(self, library, product, run, *, small):
        self.api, self.product, self.run, self.small = library, product, run, small
        self.rounds, self.turn_ms = 5, 40.0 if small else 60.0

    def race(self, contestants, rounds=None, **cudnn):
        """Times. cudnn: functions that make the contestants of that name; one that PyTorch refuses is left out, by a
        message."""
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            for name, make in cudnn.items():
                try:
                    function = make()
                    function()
                    contestants[name] = function
                except RuntimeError as error:
                    print(f"{name} is refused: {error}", flush=True)
            return race(contestants, self.product, rounds or self.rounds, self.turn_ms)

    def backward(self):
        """Every cell of the grid, deterministic and not; at 16384 tokens the cuBLAS product takes its turns too."""
        for dim in DIMS:
            for causal in (False, True):
                for n in SMALL_LENGTHS if self.small else LENGTHS:
                    self.run("cells", {"dim": dim, "causal": causal, "n": n}, self.backward_cell)

    def backward_cell(self, dim, causal, n):
        problem = of_grid(self.api, n, dim, causal)
        contestants = {"headrace": problem.checked_backward(),
                       "headrace_deterministic": problem.checked_backward(deterministic=1)}
        if n == 16384:
            contestants["cublas"] = self.product
        times = self.race(contestants, cudnn=lambda: problem.cudnn()[1])
        cell = problem.cell("backward", times, 10.0, contestants)
        print(f"{'':17}deterministic {cell['headrace_deterministic']['of_headrace']:.3f} of that", end="")
        if "ratio" in cell:
            ours, theirs = FLASH_ATTENTION_3[dim, causal][LENGTHS.index(n)]
            cell["flash_attention_3_ratio"] = ours / theirs
            cell["of_flash_attention_3"] = cell["ratio"] * theirs / ours
            print(f", ratio {cell['of_flash_attention_3']:.3f} of FlashAttention-3's", end="")
        print(flush=True)
        return cell

    def both(self):
        """Forward and backward of a training step."""
        for dim in DIMS:
            for causal in (False, True):
                for n in (16384,) if self.small else SMALL_LENGTHS:
                    self.run("both", {"dim": dim, "causal": causal, "n": n}, self.both_cell)

    def both_cell(self, dim, causal, n):
        problem = of_grid(self.api, n, dim, causal)
        forward = problem.planned(FORWARD)
        contestants = {}
        for name, deterministic in (("headrace", 0), ("headrace_deterministic", 1)):
            backward = problem.planned(BACKWARD, deterministic=deterministic)
            contestants[name] = lambda backward=backward: (forward(), backward())
        times = self.race(contestants, cudnn=lambda: problem.cudnn()[2])
        return problem.cell("forward+backward", times, 14.0, contestants)

    def options(self):
        """Backward: float16, grouped heads, dropout, a bias and its gradient, each beside the plain call; and a bias
        forward."""
        for causal in (False, True):
            for dim in (128,) if self.small else (64, 128):
                for n in (4096,) if self.small else (4096, 16384):
                    for cell in (self.float16_cell, self.grouped_cell, self.dropout_cell):
                        self.run("options", {"dim": dim, "causal": causal, "n": n}, cell)
            for dim in (64, 128):
                for cell in (self.bias_forward_cell, self.dbias_cell):
                    self.run("options", {"dim": dim, "causal": causal, "n": 4096}, cell)

    def float16_cell(self, dim, causal, n):
        plain = of_grid(self.api, n, dim, causal)
        problem = of_grid(self.api, n, dim, causal, dtype=torch.float16)
        contestants = {"headrace": plain.planned(BACKWARD), "headrace_float16": problem.checked_backward()}
        times = self.race(contestants, cudnn_float16=lambda: problem.cudnn()[1])
        return problem.cell("float16", times, 10.0, contestants)

    def grouped_cell(self, dim, causal, n):
        """32 query heads on 8 key heads, beside 32 on 32."""
        size = {"batch": max(1, TOKENS * 64 // (n * dim)), "n": n, "heads": 32, "dim": dim, "causal": causal}
        plain, problem = Problem(self.api, **size), Problem(self.api, **size, heads_kv=8)
        contestants = {"headrace": plain.planned(BACKWARD), "headrace_grouped": problem.checked_backward()}
        times = self.race(contestants, cudnn_grouped=lambda: problem.cudnn()[1])
        return problem.cell("grouped", times, 10.0, contestants)

    def dropout_cell(self, dim, causal, n):
        p, seed = 0.1, 7
        small = Problem(self.api, batch=1, n=512, heads=4, dim=dim, causal=causal)
        keep = torch.empty(1, 4, 512, 512, dtype=torch.bool)
        self.api.hr_dropout_mask.argtypes = [ctypes.c_void_p, ctypes.c_double, ctypes.c_uint64]
        if self.api.hr_dropout_mask(ctypes.byref(Tensor.of(keep)), p, seed) != 0:
            raise RuntimeError(self.api.hr_last_error().decode())
        error = small.checked_backward(kept=keep[0].cuda().double() / (1 - p), dropout_p=p, seed=seed).error
        problem = of_grid(self.api, n, dim, causal)
        contestants = {"headrace": problem.planned(BACKWARD),
                       "headrace_dropout": problem.planned(BACKWARD, dropout_p=p, seed=seed)}
        contestants["headrace_dropout"].error = error
        times = self.race(contestants, cudnn_dropout=lambda: problem.cudnn(dropout_p=p)[1])
        return problem.cell("dropout", times, 10.0, contestants)

    def with_bias(self, dim, causal, n):
        """A problem without and with a bias [1, heads, n, n], and that bias."""
        heads = WIDTH // dim
        bias = torch.randn(1, heads, n, n, device="cuda", dtype=torch.bfloat16)
        size = {"batch": 1, "n": n, "heads": heads, "dim": dim, "causal": causal}
        return Problem(self.api, **size), Problem(self.api, **size, bias=bias), bias

    def bias_forward_cell(self, dim, causal, n):
        plain, problem, _ = self.with_bias(dim, causal, n)
        problem.checked_backward()  # needs a right forward pass
        contestants = {"headrace": plain.planned(FORWARD), "headrace_bias": problem.planned(FORWARD)}
        return problem.cell("bias forward", self.race(contestants), 4.0, contestants)

    def dbias_cell(self, dim, causal, n):
        """A bias and its gradient: its own traffic is twice its size."""
        plain, problem, bias = self.with_bias(dim, causal, n)
        contestants = {"headrace": plain.planned(BACKWARD), "headrace_bias": problem.checked_backward(),
                       "headrace_dbias": problem.checked_backward(outputs={"dbias": torch.empty_like(bias)})}
        cell = problem.cell("dbias", self.race(contestants), 10.0, contestants)
        cell["bias_bytes"] = bias.numel() * bias.element_size()
        more = cell["headrace_dbias"]["ms"] - cell["headrace"]["ms"]
        cell["bias_gb_per_s"] = 2 * cell["bias_bytes"] / more / 1e6
        return cell

    def memory(self):
        for causal in (False, True):
            self.run("memory", {"dim": 128, "causal": causal, "n": 65536}, self.memory_cell)

    def memory_cell(self, dim, causal, n):
        """What a backward pass needs beside its inputs and outputs."""
        problem = Problem(self.api, batch=1, n=n, heads=16, dim=dim, causal=causal)
        dq_bytes = 4 * problem.tensors["dq"].numel()
        contestants, cell = {}, {}
        for name, deterministic in (("headrace", 0), ("headrace_deterministic", 1)):
            backward = contestants[name] = problem.planned(BACKWARD, deterministic=deterministic)
            backward()  # what the driver needs of its own is there now
            torch.cuda.synchronize()
            free = torch.cuda.mem_get_info()[0]
            backward()
            cell[name] = {"workspace_bytes": backward.workspace_bytes(),
                          "other_bytes": free - torch.cuda.mem_get_info()[0],
                          "of_dq_in_float32": backward.workspace_bytes() / dq_bytes}
        times = self.race(contestants, 2, cudnn=lambda: problem.cudnn()[1])
        if "cudnn" in contestants:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            gradients = contestants["cudnn"]()
            bytes_ = torch.cuda.max_memory_allocated() - before - sum(g.numel() * g.element_size() for g in gradients)
            cell["cudnn"] = {"workspace_bytes": bytes_, "of_dq_in_float32": bytes_ / dq_bytes}
        measured = problem.cell("memory", times, 10.0, contestants)
        for name, value in cell.items():
            measured[name].update(value)
        print(f"{'':17}workspace of dq in float32: " +
              ", ".join(f"{name} {value['of_dq_in_float32']:.3f}" for name, value in cell.items()), flush=True)
        return measured
