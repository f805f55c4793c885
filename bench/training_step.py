#!/usr/bin/env python3
"""A training step of GPT-2 small on the CPU: random weights, batch 2 of 1024 tokens, float32, forward, backward and AdamW.
`time`: with headrace and with PyTorch's sdpa taking turns in one process, the same number of threads; the median of each
counts. `peak`: the memory of a process that makes one step, also with eager attention. DROPOUT is that of attention
weights, 0.1 in GPT-2's own configuration; PyTorch's fast CPU kernel has none. Each run adds its part to OUTPUT.json.
Needs transformers beside the wheel. Usage: bench/training_step.py OUTPUT.json time|peak DROPOUT [ROUNDS]"""

import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time

BATCH, SEQLEN = 2, 1024


def make(dropout):
    import torch
    import transformers

    import headrace.integrations.transformers

    headrace.integrations.transformers.register()
    torch.manual_seed(0)
    config = transformers.GPT2Config(attn_pdrop=dropout)
    model = transformers.GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, config.vocab_size, (BATCH, SEQLEN))

    def step(implementation):
        model.set_attn_implementation(implementation)
        start = time.perf_counter()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    return step


def peak_mib(implementation, dropout):
    """Of a process that makes one step; its weights, gradients and AdamW's state included."""
    command = [sys.executable, __file__, "--peak", implementation, str(dropout)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def cpu_model():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def measure_time(dropout, rounds):
    step, names = make(dropout), ("sdpa", "headrace")
    for name in names:
        step(name)
    seconds = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            seconds[name].append(round(step(name), 3))
    ratio = statistics.median(seconds["sdpa"]) / statistics.median(seconds["headrace"])
    return {"seconds": seconds, "sdpa_over_headrace": round(ratio, 3)}


def main():
    if sys.argv[1:2] == ["--peak"]:
        make(float(sys.argv[3]))(sys.argv[2])
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    if len(sys.argv) not in (4, 5) or sys.argv[2] not in ("time", "peak"):
        sys.exit(__doc__)
    import torch
    import transformers

    output, what, dropout = pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    load = round(os.getloadavg()[0], 2)
    if what == "time":
        part = {**measure_time(dropout, int(sys.argv[4]) if len(sys.argv) == 5 else 3), "load_before": load}
    else:
        part = {"peak_mib": {name: round(peak_mib(name, dropout)) for name in ("eager", "sdpa", "headrace")}}
    cases = json.loads(output.read_text())["dropout_of_weights"] if output.exists() else {}
    cases.setdefault(str(dropout), {}).update(part)
    git = ["git", "-C", str(pathlib.Path(__file__).parent)]
    result = {
        "command": "bench/training_step.py",
        "commit": subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip(),
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": "GPT-2 small, random weights",
        "batch": BATCH,
        "seqlen": SEQLEN,
        "dropout_of_weights": cases,
    }
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(cases, indent=1))


if __name__ == "__main__":
    main()
