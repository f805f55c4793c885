#!/usr/bin/env python3
"""What a call from Python costs beyond the C interface: the smallest attention, timed as the package's functions, and as
the C function alone, called by a loop in C on an hr_attention that was filled before. Floors are what PyTorch itself
charges for such a call: an operator of the same schema, and an autograd.Function, that allocate their results and do
nothing. The clock runs over 2000 calls; the median of 25 such rounds, all of them taking turns, is what counts. Run it
with the Python where the wheel is installed; it needs a C compiler.
Usage: bench/python_overhead.py OUTPUT.json"""

import ctypes
import json
import os
import pathlib
import statistics
import struct
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch
from torch import library

import headrace as hr
import headrace.torch
from headrace import _binding
from headrace.flash_attn import flash_attn_func, flash_attn_varlen_func
from headrace.torch import _ops

CALLS, ROUNDS = 2000, 25
SHAPE = (1, 1, 1, 8)
OPERATOR = "headrace.torch, the operator in a compiled program"
LOOP = """
#include <time.h>
double seconds(int (*function)(const void*), const void* argument, int calls) {
  struct timespec begin, end;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  for (int i = 0; i < calls; ++i) function(argument);
  clock_gettime(CLOCK_MONOTONIC, &end);
  return (end.tv_sec - begin.tv_sec) + (end.tv_nsec - begin.tv_nsec) * 1e-9;
}
"""


def compiled_loop():
    with tempfile.TemporaryDirectory() as folder:
        source, shared_object = pathlib.Path(folder, "loop.c"), pathlib.Path(folder, "loop.so")
        source.write_text(LOOP)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", shared_object, source], check=True)
        function = ctypes.CDLL(str(shared_object)).seconds
    function.restype, function.argtypes = ctypes.c_double, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    return function


LOOP_IN_C = compiled_loop()
HR_FORWARD = ctypes.CDLL(str(pathlib.Path(hr.__file__).with_name("libheadrace.so"))).hr_forward


def python_call(function):
    def microseconds():
        start = time.perf_counter()
        for _ in range(CALLS):
            function()
        return (time.perf_counter() - start) / CALLS * 1e6

    return microseconds


def c_call(x, return_lse, lengths, options):
    """The same call on memory of its own."""
    *_, planned = _binding.plan(x, x, x, lengths, options, False, None, False, False, False)
    attention = ctypes.create_string_buffer(planned, len(planned))
    results = np.empty(8, np.float32), np.empty(8, np.float32)
    struct.pack_into("P", attention, _binding.OFFSETS["out"], results[0].ctypes.data)
    if return_lse:
        struct.pack_into("P", attention, _binding.OFFSETS["lse"], results[1].ctypes.data)
    else:
        end = _binding.OFFSETS["bias"]  # what follows lse
        struct.pack_into(f"{end - _binding.OFFSETS['lse']}x", attention, _binding.OFFSETS["lse"])
    kept = (x, lengths, results)

    def microseconds():
        assert kept
        return LOOP_IN_C(HR_FORWARD, attention, CALLS) / CALLS * 1e6

    return microseconds


def empty_results(q, k, v, *rest):
    return torch.empty_like(q), q.new_empty((1, 1, 1))


def define_floors():
    schema = str(torch.ops.headrace.attention_forward.default._schema).partition("(")[2]
    library.define("headrace_floor::empty", "(" + schema)
    library.impl("headrace_floor::empty", "default", empty_results)

    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, lse = empty_results(q, k, v)
            ctx.save_for_backward(q, k, v, out, lse)
            return out, lse

        @staticmethod
        def backward(ctx, dout, dlse):
            return dout, dout, dout

    return torch.ops.headrace_floor.empty.default, Empty.apply


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
    leaf, heads_first, packed = t.clone().requires_grad_(), t.transpose(1, 2), t[0]
    both = {"causal": True, "return_lse": True}
    edges = torch.tensor([0, 1], dtype=torch.int32)
    state = hr.attention(x, x, x, return_lse=True)
    cases = {
        "numpy": (hr.attention, x, {}),
        "numpy, causal, lse": (hr.attention, x, both),
        "torch": (hr.attention, t, {}),
        "torch, causal, lse": (hr.attention, t, both),
        "headrace.torch": (headrace.torch.attention, t, {}),
        "headrace.torch, causal, lse": (headrace.torch.attention, t, both),
        "headrace.torch, ragged": (lambda *a: headrace.torch.attention_varlen(*a, edges, edges), packed, {}),
        "headrace.flash_attn": (flash_attn_func, t, {}),
        "headrace.flash_attn, ragged": (lambda *a: flash_attn_varlen_func(*a, edges, edges, 1, 1), packed, {}),
        "headrace.torch, scaled_dot_product_attention": (headrace.torch.scaled_dot_product_attention, heads_first, {}),
        "headrace.torch, keeping what gradients need": (headrace.torch.attention, leaf, both),
    }
    runs = {}
    for name, (function, array, options) in cases.items():
        rest = {key: value for key, value in options.items() if key != "return_lse"}
        lengths = {"cu_seqlens_q": edges, "cu_seqlens_k": edges} if array is packed else {}
        return_lse = options.get("return_lse", False)
        runs[name, "whole_us"] = python_call(lambda f=function, a=array, o=options: f(a, a, a, **o))
        runs[name, "c_call_us"] = c_call(t if array is heads_first else array, return_lse, lengths, rest)
    # What torch.compile leaves in a program: the operator, and no gradients to think of.
    arguments = _ops._arguments(t, t, t, {}, {"causal": True})
    operator = torch.ops.headrace.attention_forward.default
    runs[OPERATOR, "whole_us"] = torch.no_grad()(python_call(lambda: operator(*arguments)))
    runs[OPERATOR, "c_call_us"] = c_call(t, True, {}, {"causal": True})
    empty_operator, empty_function = define_floors()
    runs["merge_states, numpy", "whole_us"] = python_call(lambda: hr.merge_states(*state, *state))
    runs["floor: an empty operator of the same schema", "whole_us"] = torch.no_grad()(python_call(lambda: empty_operator(*arguments)))
    runs["floor: an empty autograd.Function", "whole_us"] = python_call(lambda: empty_function(leaf, leaf, leaf))
    rounds = [{key: run() for key, run in runs.items()} for _ in range(ROUNDS)]
    results = {}
    for name, what in runs:
        results.setdefault(name, {})[what] = round(statistics.median(x[name, what] for x in rounds), 2)
    for case in results.values():
        if "c_call_us" in case:
            case["overhead_us"] = round(case["whole_us"] - case["c_call_us"], 2)
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
