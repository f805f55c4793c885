#!/usr/bin/env python3
"""Forward attention on a Hopper GPU beside cuDNN (through PyTorch's scaled_dot_product_attention), in one run.

Usage: bench/attention_gpu_peers.py build/release/libheadrace.so OUTPUT.json [--quick] [--tables grid,latency]

Headrace by itself, and what its options cost, is measured by attention_gpu (attention_gpu.cpp). Needs PyTorch with CUDA.

The grid: batch x seqlen = 16384 tokens, heads x head_dim = 2048, bfloat16, inputs from N(0, 1),
full and causal; and at 4096 tokens float16 and grouped queries (32 / 8 heads). Before each cell a product of 8192 x 8192
matrices runs for 0.2 s, so that the card is at its power limit; then the contestants take turns of 60 ms each, long
enough for the clock to settle at what the contestant's own power allows, and medians of the turns are kept, with the
spread between the quartiles. PyTorch's times include its dispatch on the host where that is
longer than the kernel; Headrace's include hr_plan_execute. TFLOP/s count 4 head_dim for each visible pair.

The second table, latency: batch 1, 16 heads, short sequences. There the host's dispatch is longer than the kernel, so
both contestants are measured twice: captured into a CUDA graph of 20 calls, which leaves the kernels and their launches,
and called one by one ("plain"), which is what a caller without graphs gets."""

import argparse
import ctypes
import json
import pathlib
import statistics
import subprocess
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKENS, WIDTH = 16384, 2048
UNBOUNDED = 2**63 - 1
FLOAT16, BFLOAT16 = 1, 2


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("shape", ctypes.c_int64 * 4), ("stride", ctypes.c_int64 * 4),
                ("ndim", ctypes.c_int32), ("dtype", ctypes.c_int32)]

    @classmethod
    def of(cls, t):
        dtype = {torch.float32: 0, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}[t.dtype]
        pad = [0] * (4 - t.ndim)
        return cls(t.data_ptr(), (ctypes.c_int64 * 4)(*t.shape, *pad), (ctypes.c_int64 * 4)(*t.stride(), *pad), t.ndim,
                   dtype)


class Attention(ctypes.Structure):
    """hr_attention of headrace.h; hr_plan_create checks struct_size."""
    _fields_ = [("struct_size", ctypes.c_size_t)]
    _fields_ += [(name, Tensor) for name in "q k v out lse bias mask alibi_slopes sinks block_mask".split()]
    _fields_ += [("block_q", ctypes.c_int64), ("block_k", ctypes.c_int64)]
    _fields_ += [(name, Tensor) for name in ("cu_seqlens_q cu_seqlens_k seqused_q seqused_k dout dlse dq dk dv dbias "
                                             "dsinks").split()]
    _fields_ += [("causal", ctypes.c_int32), ("has_scale", ctypes.c_int32), ("scale", ctypes.c_double),
                 ("window_left", ctypes.c_int64), ("window_right", ctypes.c_int64), ("softcap", ctypes.c_double),
                 ("dropout_p", ctypes.c_double), ("seed", ctypes.c_uint64), ("deterministic", ctypes.c_int32),
                 ("batch_invariant", ctypes.c_int32), ("threads", ctypes.c_int32), ("backend", ctypes.c_int32),
                 ("device", ctypes.c_int32), ("device_index", ctypes.c_int32), ("stream", ctypes.c_void_p)]


class Headrace:
    """A planned call on torch tensors."""

    def __init__(self, library, q, k, v, causal):
        self.api = library
        self.out = torch.full_like(q, float("nan"))
        self.lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("nan"), device="cuda")
        self.call = Attention()
        library.hr_attention_init(ctypes.byref(self.call))
        for name, tensor in (("q", q), ("k", k), ("v", v), ("out", self.out), ("lse", self.lse)):
            setattr(self.call, name, Tensor.of(tensor))
        self.call.causal, self.call.device = int(causal), 1
        self.call.stream = torch.cuda.current_stream().cuda_stream
        self.plan = ctypes.c_void_p()
        self.check(library.hr_plan_create(ctypes.byref(self.call), 0, ctypes.byref(self.plan)))

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.api.hr_last_error().decode())

    def __call__(self):
        self.check(self.api.hr_plan_execute(self.plan, ctypes.byref(self.call), None, 0))


def load(path):
    library = ctypes.CDLL(str(pathlib.Path(path).resolve()))
    library.hr_last_error.restype = ctypes.c_char_p
    library.hr_version.restype = ctypes.c_char_p
    library.hr_plan_execute.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return library


def event_ms(function, calls):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def warm_up(product, seconds=0.2):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        product()
        torch.cuda.synchronize()


def race(contestants, product, rounds, turn_ms=60.0):
    """Medians and quartile spreads in ms, of contestants that take turns."""
    for function in contestants.values():
        function()
    warm_up(product)
    calls = {name: max(1, round(turn_ms / event_ms(function, 3))) for name, function in contestants.items()}
    times = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, function in contestants.items():
            times[name].append(event_ms(function, calls[name]))
    result = {}
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        result[name] = {"ms": middle, "spread": (high - low) / middle}
    return result


def smi(query):
    output = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True)
    return output.stdout.strip()


def error_of(headrace, q, k, v, causal):
    """Relative error of the last rows of the first and last head, against float64."""
    headrace.out.fill_(float("nan"))
    headrace()
    n, rows, worst = q.shape[1], min(64, q.shape[1]), 0.0
    for head in (0, q.shape[2] - 1):
        kv = head // (q.shape[2] // k.shape[2])
        s = q[-1, n - rows:, head].double() @ k[-1, :, kv].double().T * q.shape[3]**-0.5
        if causal:
            visible = torch.arange(n, device="cuda")[None] <= torch.arange(n - rows, n, device="cuda")[:, None]
            s = s.masked_fill(~visible, float("-inf"))
        exact = torch.softmax(s, -1) @ v[-1, :, kv].double()
        worst = max(worst, float((headrace.out[-1, n - rows:, head].double() - exact).norm() / exact.norm()))
    return worst


def measure(library, product, *, seqlen, dim, causal, dtype=torch.bfloat16, heads_kv=None, rounds=7):
    batch, heads = TOKENS // seqlen, WIDTH // dim
    heads_kv = heads_kv or heads
    if heads_kv != heads:
        heads = 4 * heads_kv
    q = torch.randn(batch, seqlen, heads, dim, device="cuda", dtype=dtype)
    k, v = (torch.randn(batch, seqlen, heads_kv, dim, device="cuda", dtype=dtype) for _ in range(2))
    ours = Headrace(library, q, k, v, causal)
    error = error_of(ours, q, k, v, causal)
    if not error < 8e-3:
        raise SystemExit(f"wrong result: relative error {error} at {seqlen=} {dim=} {causal=}")
    transposed = [t.transpose(1, 2) for t in (q, k, v)]
    cudnn = lambda: torch.nn.functional.scaled_dot_product_attention(  # noqa: E731
        *transposed, is_causal=causal, enable_gqa=heads != heads_kv)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        times = race({"headrace": ours, "cudnn": cudnn}, product, rounds)
    library.hr_plan_destroy(ours.plan)
    flops = 4.0 * batch * heads * seqlen * seqlen * dim * (0.5 if causal else 1.0)
    cell = {"batch": batch, "seqlen": seqlen, "heads": heads, "heads_kv": heads_kv, "head_dim": dim, "causal": causal,
            "dtype": str(dtype).split(".")[1], "error": error, "clock_power": smi("clocks.sm,power.draw")}
    for name, time_ in times.items():
        cell[name] = {**time_, "tflops": flops / time_["ms"] / 1e9}
    cell["ratio"] = times["cudnn"]["ms"] / times["headrace"]["ms"]
    print(f"{cell['dtype']:9} d {dim:3} {'causal' if causal else 'full  '} n {seqlen:5} heads {heads}/{heads_kv}: headrace "
          f"{cell['headrace']['tflops']:4.0f}, cuDNN {cell['cudnn']['tflops']:4.0f}, ratio {cell['ratio']:.3f}", flush=True)
    return cell


def graph_of(function, calls):
    """A CUDA graph of so many calls, as a function that launches it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function(stream)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            function(stream)
    return graph.replay


def measure_latency(library, product, *, seqlen, dim, causal, rounds=7, calls=20):
    heads = 16
    q, k, v = (torch.randn(1, seqlen, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ours = Headrace(library, q, k, v, causal)
    error = error_of(ours, q, k, v, causal)
    if not error < 8e-3:
        raise SystemExit(f"wrong result: relative error {error} at {seqlen=} {dim=} {causal=}")
    transposed = [t.transpose(1, 2) for t in (q, k, v)]

    def headrace(stream=None):
        ours.call.stream = (stream or torch.cuda.current_stream()).cuda_stream
        ours()

    def cudnn(_stream=None):
        torch.nn.functional.scaled_dot_product_attention(*transposed, is_causal=causal)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        graphs = {"headrace": graph_of(headrace, calls), "cudnn": graph_of(cudnn, calls)}
        in_graph = race(graphs, product, rounds, turn_ms=30.0)
        plain = race({"headrace": headrace, "cudnn": cudnn}, product, rounds, turn_ms=30.0)
    library.hr_plan_destroy(ours.plan)
    cell = {"batch": 1, "seqlen": seqlen, "heads": heads, "head_dim": dim, "causal": causal, "dtype": "bfloat16",
            "error": error, "clock_power": smi("clocks.sm,power.draw"), "calls_of_graph": calls}
    for name in ("headrace", "cudnn"):
        cell[name] = {"graph_us": in_graph[name]["ms"] * 1e3 / calls, "graph_spread": in_graph[name]["spread"],
                      "plain_us": plain[name]["ms"] * 1e3, "plain_spread": plain[name]["spread"]}
    cell["ratio"] = cell["cudnn"]["graph_us"] / cell["headrace"]["graph_us"]
    cell["plain_ratio"] = cell["cudnn"]["plain_us"] / cell["headrace"]["plain_us"]
    print(f"d {dim:3} {'causal' if causal else 'full  '} n {seqlen:5}: in a graph headrace "
          f"{cell['headrace']['graph_us']:6.2f} us, cuDNN {cell['cudnn']['graph_us']:6.2f}, ratio {cell['ratio']:.3f}; plain "
          f"{cell['headrace']['plain_us']:6.2f}, {cell['cudnn']['plain_us']:6.2f}, {cell['plain_ratio']:.3f}", flush=True)
    return cell


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared_object", help="libheadrace.so")
    parser.add_argument("output")
    parser.add_argument("--commit", default="unknown", help="of the library, for the record")
    parser.add_argument("--quick", action="store_true", help="three lengths of the grid instead of six")
    parser.add_argument("--tables", default="grid,latency", help="which of grid, latency")
    flags = parser.parse_args()
    library = load(flags.shared_object)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = lambda: a @ b  # noqa: E731

    def product_tflops():
        warm_up(product)
        return 2 * 8192.0**3 / statistics.median(event_ms(product, 1) for _ in range(9)) / 1e9

    lengths = (512, 2048, 16384) if flags.quick else (512, 1024, 2048, 4096, 8192, 16384)
    result = {"version": library.hr_version().decode(), "commit": flags.commit, "gpu": torch.cuda.get_device_name(),
              "driver": smi("driver_version"), "power_limit": smi("power.limit"), "torch": torch.__version__,
              "cudnn": torch.backends.cudnn.version(), "cublas_8192_tflops": [product_tflops()], "cells": []}
    tables = flags.tables.split(",")
    if "latency" in tables:
        result["latency"] = [measure_latency(library, product, seqlen=seqlen, dim=dim, causal=causal)
                             for dim in (64, 128) for causal in (False, True) for seqlen in (128, 256, 512, 1024)]
    if "grid" in tables:
        for dim in (64, 128, 256):
            for causal in (False, True):
                for seqlen in lengths:
                    result["cells"].append(measure(library, product, seqlen=seqlen, dim=dim, causal=causal))
        for causal in (False, True):
            result["cells"].append(
                measure(library, product, seqlen=4096, dim=128, causal=causal, dtype=torch.float16))
            result["cells"].append(measure(library, product, seqlen=4096, dim=64, causal=causal, heads_kv=8))
    result["cublas_8192_tflops"].append(product_tflops())
    pathlib.Path(flags.output).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
