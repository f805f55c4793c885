#!/usr/bin/env python3
"""Attention on this machine's CPU beside PyTorch's scaled_dot_product_attention, in one run.

Usage: PYTHONPATH=python OMP_NUM_THREADS=2 bench/attention_cpu_peers.py OUTPUT.json [--passes forward,backward] [--lengths ...]

Headrace beside the ceilings of the machine is measured by attention_cpu (attention_cpu.cpp). Needs PyTorch, and
libheadrace.so beside the Python files. One sequence, 8 heads, inputs from N(0, 1). The contestants take turns; medians
are kept, with the spread between the quartiles. Both calls allocate what they need, as they do in a program.
PyTorch's backward is that of autograd, after a forward pass that does not count; Headrace's is attention_backward."""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import time

import torch

import headrace as hr

HEADS = 8


def seconds(function, runs):
    start = time.perf_counter()
    for _ in range(runs):
        function()
    return (time.perf_counter() - start) / runs


def race(contestants, rounds, budget):
    """Medians and quartile spreads in seconds, of contestants that take turns; turns of at least 20 ms."""
    runs, times = {}, {name: [] for name in contestants}
    for name, function in contestants.items():
        function()
        runs[name] = max(1, round(0.02 / seconds(function, 1)))
    end = time.monotonic() + budget
    while len(next(iter(times.values()))) < 3 or (len(next(iter(times.values()))) < rounds and time.monotonic() < end):
        for name, function in contestants.items():
            times[name].append(seconds(function, runs[name]))
    result = {}
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        result[name] = {"seconds": middle, "spread": (high - low) / middle, "turns": len(values)}
    return result


def relative(got, exact):
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def measure(flags, backward, dtype, dim, causal, seqlen):
    q, k, v, dout = (torch.randn(1, seqlen, HEADS, dim).to(dtype) for _ in range(4))
    transposed = [t.transpose(1, 2).contiguous().requires_grad_(backward) for t in (q, k, v)]

    def torch_forward():
        return torch.nn.functional.scaled_dot_product_attention(*transposed, is_causal=causal)

    out, lse = hr.attention(q, k, v, causal=causal, return_lse=True)
    theirs = torch_forward()
    agreement = relative(out.transpose(1, 2), theirs.detach())
    contestants = {"headrace": lambda: hr.attention(q, k, v, causal=causal), "torch": torch_forward}
    if backward:
        gradient = dout.transpose(1, 2).contiguous()

        def torch_backward():
            return torch.autograd.grad(theirs, transposed, gradient, retain_graph=True)

        def headrace_backward():
            return hr.attention_backward(dout, q, k, v, out, lse, causal=causal)

        agreement = relative(headrace_backward()["dq"].transpose(1, 2), torch_backward()[0])
        contestants = {"headrace": headrace_backward, "torch": torch_backward}
    if not agreement < (5e-2 if dtype is torch.bfloat16 else 1e-3):
        raise SystemExit(f"the contestants disagree by {agreement} at {seqlen=} {dim=} {causal=} {dtype=}")
    times = race(contestants, flags.rounds, flags.budget)
    cell = {"pass": "backward" if backward else "forward", "dtype": str(dtype).split(".")[1], "head_dim": dim,
            "causal": causal, "seqlen": seqlen, "difference": agreement, "load": os.getloadavg()[0], **times,
            "ratio": times["torch"]["seconds"] / times["headrace"]["seconds"]}
    print(f"{cell['pass']:8} {cell['dtype']:8} d {dim:3} {'causal' if causal else 'full':6} n {seqlen:5}: "
          f"{1e3 * times['headrace']['seconds']:9.2f} ms, PyTorch {1e3 * times['torch']['seconds']:9.2f} ms, "
          f"ratio {cell['ratio']:.2f}", flush=True)
    return cell


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output")
    parser.add_argument("--passes", default="forward,backward")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--lengths", default="512,2048,8192")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=2.0, help="seconds after which no new turn of a cell begins")
    parser.add_argument("--append", action="store_true", help="add to what the file holds")
    flags = parser.parse_args()
    threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count()))
    torch.set_num_threads(threads)
    torch.manual_seed(20261130)
    folder = pathlib.Path(__file__).parent
    commit = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    model = next((line.split(":", 1)[1].strip() for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
                  if line.startswith("model name")), "unknown")
    result = {"commit": commit.stdout.strip(), "cpu": model, "threads": threads, "torch": torch.__version__,
              "cells": []}
    output = pathlib.Path(flags.output)
    if flags.append and output.exists():
        result = json.loads(output.read_text())
    for pass_ in flags.passes.split(","):
        for dtype in flags.dtypes.split(","):
            for dim in flags.dims.split(","):
                for causal in (False, True):
                    for seqlen in flags.lengths.split(","):
                        result["cells"].append(measure(flags, pass_ == "backward", getattr(torch, dtype), int(dim),
                                                       causal, int(seqlen)))
    output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
