#!/usr/bin/env python3
"""How often the GPU kernels leave their fast path, on activations of a real encoder: a simulation of their rules.

Usage: bench/fallback_rate.py OUTPUT.json [examples/data/minilm_qkv.safetensors]   (needs NumPy)

float16, bfloat16 (hopper_forward.cuh): exponents are relative to a reference, the maximum of the tile's first block of
keys, which a thread's sum of a block beyond 2^14 raises. A tile is done again if p passes the largest number of its type
(2^16, 2^128) within a block. float32 (hopper_split_forward.cuh): a warp of 16 rows computes without tensor cores if the
products within its reach pass 2^14, or if the output is small beside the values.

The activations: all heads of all layers of all-MiniLM-L6-v2 over a page of text (examples/capture_minilm.py), stretched
to 2048 tokens by drawing tokens at random, with 5 % of noise. Outliers: one channel of q, of k, or of both, times 40, as
large language models have them. The last row, scores that rise by 200 from block to block, is there to show that the
simulation sees what it looks for."""

import json
import pathlib
import struct
import subprocess
import sys

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOKENS, LOG2E = 2048, 1.4426950408889634
LARGEST_EXPONENT = {"float16": 16.0, "bfloat16": 128.0}


def read(path):
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:8 + size])
    def tensor(name):
        begin, end = header[name]["data_offsets"]
        return np.frombuffer(raw[8 + size + begin:8 + size + end], np.float16).reshape(header[name]["shape"])
    return (tensor(name).astype(np.float32) for name in "qkv")  # [layer, token, head, dim]


def leaves_reference(scores, largest_exponent, keys):
    """Rows of [n, n] scores, in units of log2, that pass the type's range. Blocks are visited from the last on."""
    blocks = scores.reshape(len(scores), -1, keys)[:, ::-1]
    reference, left = blocks[:, 0].max(-1), np.zeros(len(scores), bool)
    for block in np.moveaxis(blocks[:, 1:], 1, 0):
        exponents = block - reference[:, None]
        left |= exponents.max(-1) >= largest_exponent
        # Of every 8 columns a thread has two neighbours; the largest of four threads' sums decides.
        p = np.exp2(np.minimum(exponents, 127.0).astype(np.float64)).reshape(len(block), keys // 8, 4, 2)
        largest = p.sum((1, 3)).max(-1)
        reference += np.where(largest > 16384.0, np.floor(np.log2(np.maximum(largest, 1.0))), 0.0).astype(np.float32)
    return left


def leaves_tensor_cores(q, k, v, scale, keys):
    """Rows whose scores the float16 parts may not hold (by groups of 64 rows), or whose output."""
    def groups(x, rows):
        magnitudes = np.abs(x).reshape(-1, rows, x.shape[1])
        return magnitudes.max((1, 2)), magnitudes.sum(2).max(1)
    (q_largest, q_sum), (k_largest, k_sum), (v_largest, _) = groups(q, 64), groups(k, keys), groups(v, keys)
    reach = scale * (q_sum[:, None] * k_largest + q_largest[:, None] * k_sum)
    left = np.repeat((reach > 16384.0).any(1), 64)
    s = q @ k.T * scale
    p = np.exp(s - s.max(1, keepdims=True))
    of_values = p @ np.repeat(v_largest, keys)
    return left | (of_values > 32768.0 * np.abs(p @ v).max(1))


def rate(rows, group):
    return float(rows.reshape(-1, group).any(1).mean())


def measure(name, heads):
    result = {"inputs": name}
    for dtype, exponent in LARGEST_EXPONENT.items():
        for keys, rows in ((64, 64), (128, 64)):  # of warpgroups: a tile has one to three
            left = [leaves_reference(q @ k.T * np.float32(q.shape[1]**-0.5 * LOG2E), exponent, keys) for q, k, _ in heads]
            result[f"{dtype}, blocks of {keys} keys"] = float(np.mean([rate(x, rows) for x in left]))
    left = [leaves_tensor_cores(q, k, v, q.shape[1]**-0.5, 128) for q, k, v in heads]
    result["float32"] = float(np.mean([rate(x, 16) for x in left]))
    print(result, flush=True)
    return result


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    path = pathlib.Path(sys.argv[2]) if len(sys.argv) == 3 else ROOT / "examples/data/minilm_qkv.safetensors"
    rng = np.random.default_rng()
    q, k, v = read(path)
    heads = []
    for layer in range(q.shape[0]):
        for head in range(q.shape[2]):
            tokens = rng.integers(0, q.shape[1], TOKENS)
            noise = lambda x: x[layer, tokens, head] * (1 + 0.05 * rng.standard_normal((TOKENS, x.shape[3]), np.float32))  # noqa: E731,B023
            heads.append((noise(q), noise(k), noise(v)))
    def outlier(x):
        x = x.copy()
        x[:, rng.integers(0, x.shape[1])] *= 40
        return x
    def outlier_of_both(q, k):
        channel, factor = rng.integers(0, q.shape[1]), np.ones(q.shape[1], np.float32)
        factor[channel] = 40
        return q * factor, k * factor
    rising = np.zeros((TOKENS, q.shape[3]), np.float32), np.zeros((TOKENS, q.shape[3]), np.float32)
    rising[0][:, 0], rising[1][:, 0] = q.shape[3]**0.5, -200.0 * (np.arange(TOKENS) // 128)
    results = [measure("MiniLM", heads),
               measure("MiniLM, a channel of q times 40", [(outlier(q), k, v) for q, k, v in heads]),
               measure("MiniLM, a channel of k times 40", [(q, outlier(k), v) for q, k, v in heads]),
               measure("MiniLM, a channel of both times 40", [(*outlier_of_both(q, k), v) for q, k, v in heads]),
               measure("scores that rise by 200 a block", [(*rising, heads[0][2])])]
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    record = {"commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(), "tokens": TOKENS,
              "heads": len(heads), "meaning": "fraction of warpgroups' tiles of 64 rows (float32: of warps' 16 rows)",
              "results": results}
    pathlib.Path(sys.argv[1]).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
