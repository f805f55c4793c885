#!/usr/bin/env python3
"""Attention on a Hopper GPU beside cuDNN (through PyTorch's scaled_dot_product_attention), in one run.

Usage: bench/attention_gpu_peers.py build/release/libheadrace.so OUTPUT.json [--grid small]
       bench/attention_gpu_peers.py build/release/libheadrace.so OUTPUT.json --tables backward,options,memory,both

Headrace by itself, and what its options cost, is measured by attention_gpu (attention_gpu.cpp). The tables of the backward
pass are in attention_gpu_backward.py. Needs PyTorch with CUDA.

The grid: batch x seqlen = 16384 tokens, heads x head_dim = 2048, bfloat16, inputs from N(0, 1),
full and causal; and at 4096 tokens float16 and grouped queries (32 / 8 heads). Before each cell a product of 8192 x 8192
matrices runs for 0.2 s, so that the card is at its power limit; then the contestants take turns in random order, of 20 ms
that are not timed, so that the clock settles at what the contestant's own power allows, and 60 ms that are. Medians of
the turns are kept, with the spread between the quartiles. PyTorch's times include its dispatch on the host where that is
longer than the kernel; Headrace's include hr_plan_execute. TFLOP/s count 4 head_dim for each visible pair.

The second table, latency: batch 1, 16 heads, short sequences. There the host's dispatch is longer than the kernel, so
both contestants are measured twice: captured into a CUDA graph of 20 calls, which leaves the kernels and their launches,
and called one by one ("plain"), which is what a caller without graphs gets."""

import argparse
import json
import pathlib
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_gpu_backward import Tables
from attention_gpu_library import FORWARD, LENGTHS, SMALL_LENGTHS, TOKENS, WIDTH, Planned, Product, load, race, smi


class Forward(Planned):
    """The forward pass, into tensors of its own."""

    def __init__(self, library, q, k, v, causal):
        self.out = torch.full_like(q, float("nan"))
        self.lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("nan"), device="cuda")
        super().__init__(library, FORWARD, {"q": q, "k": k, "v": v, "out": self.out, "lse": self.lse}, causal=int(causal))


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
    ours = Forward(library, q, k, v, causal)
    error = error_of(ours, q, k, v, causal)
    if not error < 8e-3:
        raise SystemExit(f"wrong result: relative error {error} at {seqlen=} {dim=} {causal=}")
    transposed = [t.transpose(1, 2) for t in (q, k, v)]
    cudnn = lambda: torch.nn.functional.scaled_dot_product_attention(  # noqa: E731
        *transposed, is_causal=causal, enable_gqa=heads != heads_kv)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        times = race({"headrace": ours, "cudnn": cudnn}, product, rounds)
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
    ours = Forward(library, q, k, v, causal)
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


class Run:
    """Measures cells into `result` while there is time: a cell that would begin later is noted as left out, and one that
    the library refuses or gets wrong is noted with its error."""

    def __init__(self, result, seconds):
        self.result, self.end, self.failed = result, time.monotonic() + seconds, False

    def __call__(self, table, which, measure_cell):
        cells = self.result.setdefault(table, [])
        if time.monotonic() > self.end:
            self.result.setdefault("left_out", []).append({"table": table, **which})
            return
        try:
            cells.append(measure_cell(**which))
        except RuntimeError as error:
            self.failed = True
            cells.append({**which, "name": measure_cell.__name__, "error": str(error)})
            print(f"{table} {which}: {error}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared_object", help="libheadrace.so")
    parser.add_argument("output")
    parser.add_argument("--commit", default="unknown", help="of the library, for the record")
    parser.add_argument("--grid", choices=("full", "small"), default="full",
                        help="small: three lengths instead of six and shorter turns, about a minute for a pass")
    parser.add_argument("--tables", default="grid,latency",
                        help="which of grid, latency (forward), backward, both, options, memory (backward)")
    parser.add_argument("--seconds", type=float, help="no cell begins later than that (540; small: 55)")
    flags = parser.parse_args()
    small, names = flags.grid == "small", flags.tables.split(",")
    library, product = load(flags.shared_object), Product()
    result = {"version": library.hr_version().decode(), "commit": flags.commit, "gpu": torch.cuda.get_device_name(),
              "driver": smi("driver_version"), "power_limit": smi("power.limit"), "torch": torch.__version__,
              "cudnn": torch.backends.cudnn.version(), "tables": names, "cublas_8192_tflops": [product.tflops()]}
    run = Run(result, flags.seconds or (55.0 if small else 540.0))
    if "latency" in names:
        for dim in (64, 128):
            for causal in (False, True):
                for seqlen in (128, 256, 512, 1024):
                    run("latency", {"seqlen": seqlen, "dim": dim, "causal": causal},
                        lambda **which: measure_latency(library, product, **which))
    if "grid" in names:
        measure_cell = lambda **which: measure(library, product, **which)  # noqa: E731
        for dim in (64, 128, 256):
            for causal in (False, True):
                for seqlen in SMALL_LENGTHS if small else LENGTHS:
                    run("cells", {"seqlen": seqlen, "dim": dim, "causal": causal}, measure_cell)
        for causal in (False, True):
            run("cells", {"seqlen": 4096, "dim": 128, "causal": causal, "dtype": torch.float16}, measure_cell)
            run("cells", {"seqlen": 4096, "dim": 64, "causal": causal, "heads_kv": 8}, measure_cell)
    tables = Tables(library, product, run, small=small)
    for name in ("backward", "options", "memory", "both"):  # the most wanted first
        if name in names:
            getattr(tables, name)()
    result["cublas_8192_tflops"].append(product.tflops())
    pathlib.Path(flags.output).write_text(json.dumps(result, indent=1, default=str) + "\n")
    for cell in result.get("left_out", []):
        print(f"left out, no time: {cell}")
    if run.failed:
        raise SystemExit("some cells failed")


if __name__ == "__main__":
    main()
