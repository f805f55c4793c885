#!/usr/bin/env python3
"""Time and memory of attention on the CPU over the sequence length: eager (softmax of a stored matrix), PyTorch's
scaled_dot_product_attention, and Headrace; forward and backward, causal, float32. The cells can be run one by one.

    pip install headrace torch matplotlib
    examples/python/plot_attention.py [--lengths 512,1024,2048,4096] [--json FILE] FIGURE
"""

# %% The three of them. q, k, v: [batch, heads, seqlen, dim].
import argparse
import json
import multiprocessing
import statistics
import time

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

import headrace.torch

HEADS, DIM, ROUNDS = 8, 64, 5


def eager(q, k, v):
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v


def sdpa(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def ours(q, k, v):
    return headrace.torch.scaled_dot_product_attention(q, k, v, is_causal=True)


METHODS = {"eager": eager, "PyTorch sdpa": sdpa, "Headrace": ours}


# %% Time: the methods take turns, and the median of each counts. Memory: how far one step raises a fresh process.
def step(method, q, k, v):
    out = method(q, k, v)
    torch.autograd.grad(out, (q, k, v), out)


def inputs(seqlen):
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, seqlen, DIM, requires_grad=True) for _ in range(3)]


def seconds(seqlen):
    tensors = inputs(seqlen)
    times = {name: [] for name in METHODS}
    for round_number in range(ROUNDS + 1):  # the first is not counted
        for name, method in METHODS.items():
            start = time.perf_counter()
            step(method, *tensors)
            if round_number:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(x) for name, x in times.items()}


def high_water():
    """Of this process in MiB; getrusage also knows the parent's."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))


def peak(arguments):
    name, seqlen = arguments
    step(METHODS[name], *inputs(16))  # what is loaded once is not counted
    tensors = inputs(seqlen)
    before = high_water()
    step(METHODS[name], *tensors)
    return high_water() - before


def mebibytes(seqlen):
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        return dict(zip(METHODS, pool.map(peak, [(name, seqlen) for name in METHODS], chunksize=1)))


# %% The figure.
def plot(lengths, times, memory, path):
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    for axis, title, data in ((axes[0], "seconds", times), (axes[1], "MiB above the inputs", memory)):
        for name in METHODS:
            axis.plot(lengths, [x[name] for x in data], marker="o", label=name)
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=title, xticks=lengths, xticklabels=lengths)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle(f"Causal attention, forward and backward: {HEADS} heads of {DIM}, float32, {torch.get_num_threads()} threads")
    figure.tight_layout()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", help="where it goes: .svg, .png, .pdf")
    parser.add_argument("--lengths", default="512,1024,2048,4096")
    parser.add_argument("--json", help="where the numbers go")
    options = parser.parse_args()
    lengths = [int(x) for x in options.lengths.split(",")]
    times, memory = [seconds(n) for n in lengths], [mebibytes(n) for n in lengths]
    for n, s, m in zip(lengths, times, memory):
        print(n, *(f"{name}: {s[name]:.4f} s, {m[name]:.0f} MiB;" for name in METHODS))
    plot(lengths, times, memory, options.figure)
    if options.json:
        result = {"command": "examples/python/plot_attention.py", "torch": torch.__version__}
        result.update(threads=torch.get_num_threads(), heads=HEADS, dim=DIM, lengths=lengths)
        with open(options.json, "w") as file:
            json.dump({**result, "seconds": times, "mebibytes": memory}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
