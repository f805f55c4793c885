#!/usr/bin/env python3
"""What a call from Python costs beyond the C interface: the smallest attention, timed as the package's functions and as
the foreign call alone on an hr_attention that was filled before. The clock runs over 2000 calls; the median of 25 such
rounds, the two alternating, is what counts. Run it with the Python where the wheel is installed.
Usage: bench/python_overhead.py OUTPUT.json"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import numpy as np
import torch

import headrace as hr
import headrace.torch
from headrace import _abi, _attention
from headrace.flash_attn import flash_attn_func
from headrace.torch import _ops

CALLS, ROUNDS = 2000, 25
SHAPE = (1, 1, 1, 8)


def microseconds(function):
    start = time.perf_counter()
    for _ in range(CALLS):
        function()
    return (time.perf_counter() - start) / CALLS * 1e6


def measure(call, foreign):
    rounds = [(microseconds(foreign), microseconds(call)) for _ in range(ROUNDS)]
    c_call, whole = (statistics.median(x) for x in zip(*rounds))
    return {"c_call_us": round(c_call, 2), "whole_us": round(whole, 2), "overhead_us": round(whole - c_call, 2)}


def filled(x, return_lse, **options):
    call, *_ = _attention.prepare(x, x, x, {})
    call.options(**options)
    call.output("out", SHAPE, _abi.FLOAT32)
    if return_lse:
        call.output("lse", (1, 1, 1), _abi.FLOAT32)
    function, memory = _abi.api.hr_forward, call.memory
    return call, lambda: function(memory)


def through_the_operator(q, k, v, **options):
    """What torch.compile leaves in a program."""
    arguments = _ops._arguments(q, k, v, {}, options)
    return torch.ops.headrace.attention.default(*arguments)


def cpu_model():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    x = np.ones(SHAPE, np.float32)
    t = torch.from_numpy(x)
    leaf, heads_first = t.clone().requires_grad_(), t.transpose(1, 2)
    both = {"causal": True, "return_lse": True}
    cases = {
        "numpy": (hr.attention, x, {}),
        "numpy, causal, lse": (hr.attention, x, both),
        "torch": (hr.attention, t, {}),
        "torch, causal, lse": (hr.attention, t, both),
        "headrace.torch": (headrace.torch.attention, t, {}),
        "headrace.torch, causal, lse": (headrace.torch.attention, t, both),
        "headrace.flash_attn": (flash_attn_func, t, {}),
        "headrace.torch, scaled_dot_product_attention": (headrace.torch.scaled_dot_product_attention, heads_first, {}),
        "headrace.torch, keeping what gradients need": (headrace.torch.attention, leaf, both),
        "headrace.torch, through the operator": (through_the_operator, t, both),
    }
    results = {}
    for name, (function, array, options) in cases.items():
        rest = {key: value for key, value in options.items() if key != "return_lse"}
        kept, foreign = filled(array, options.get("return_lse", False), **rest)
        results[name] = measure(lambda: function(array, array, array, **options), foreign)
    git = ["git", "-C", str(pathlib.Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    dirty = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "src", "include", "python"]).returncode != 0
    result = {
        "command": "bench/python_overhead.py",
        "commit": commit + ("+changes" if dirty else ""),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "torch": torch.__version__,
        "load_before": round(os.getloadavg()[0], 2),
        "shape": SHAPE,
        "cases": results,
    }
    pathlib.Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
