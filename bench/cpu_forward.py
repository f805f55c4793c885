#!/usr/bin/env python3
"""Streaming against standard attention on this machine's CPU: runs `headrace bench` for head dimensions 64 and 128,
once with everything allocated inside the clock and once before it, and writes one JSON file with the commit, the
commands and the machine's load. Usage: bench/cpu_forward.py build/release/tools/headrace/headrace OUTPUT.json"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile


def cpu_model():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def bench(program, dim, preallocate):
    options = ["--heads", "8", "--dim", str(dim), "--lengths", "2048,4096,8192", "--threads", "2"]
    options += ["--preallocate"] if preallocate else []
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "bench.json"
        subprocess.run([program, "bench", *options, "--json", str(output)], check=True)
        measured = json.loads(output.read_text())
    return {"command": " ".join(["headrace", "bench", *options]), "load_before": round(load, 2), **measured}


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    program, output = sys.argv[1:]
    git = ["git", "-C", str(pathlib.Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    dirty = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "src", "include", "tools"]).returncode != 0
    result = {
        "commit": commit + ("+changes" if dirty else ""),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "runs": [bench(program, dim, preallocate) for preallocate in (False, True) for dim in (64, 128)],
    }
    pathlib.Path(output).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
