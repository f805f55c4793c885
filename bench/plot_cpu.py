#!/usr/bin/env python3
"""Draws a result of attention_cpu as SVG: each cell of one length as a fraction of its ceiling, a bar each.

Usage: bench/plot_cpu.py [bench/results/cpu_attention.json [docs/img/cpu_attention.svg [SEQLEN [THREADS]]]]

Needs nothing but Python."""

import json
import pathlib
import sys
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parent.parent
LEFT, WIDTH, TOP, ROW = 250, 440, 58, 24
STYLE = """
    .ink { fill: #1f2328 } .soft { fill: #59636e } .grid { stroke: #d1d9e0; stroke-width: 1 }
    .fma { fill: #0969da } .bf16_pairs { fill: #9a6700 }
    @media (prefers-color-scheme: dark) {
      .ink { fill: #f0f6fc } .soft { fill: #9198a1 } .grid { stroke: #3d444d }
      .fma { fill: #58a6ff } .bf16_pairs { fill: #e3b341 }
    }"""


def svg(result, seqlen, threads):
    cells = [c for c in result["cells"]
             if "gflops" in c and c["seqlen_k"] == seqlen and c["threads"] == threads]
    bottom = TOP + ROW * len(cells)
    title = f"Attention over {seqlen} tokens on {threads} threads of an {result['cpu']}, as fractions of the peak"
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 130} {bottom + 30}" role="img" '
           f'aria-label="{escape(title)}"',
           """     font-family="system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif" font-size="13">""",
           f"  <style>{STYLE}\n  </style>",
           f'<text class="ink" x="14" y="24" font-weight="600">{escape(title)}</text>']
    for x, css, name in ((LEFT, "fma", "float32 multiply-adds"), (LEFT + 190, "bf16_pairs", "products of bfloat16 pairs")):
        out.append(f'<rect class="{css}" x="{x}" y="36" width="12" height="12"/>')
        out.append(f'<text class="soft" x="{x + 18}" y="47">{name}</text>')
    for tenth in range(0, 11, 2):
        x = LEFT + WIDTH * tenth / 10
        out.append(f'<line class="grid" x1="{x:.0f}" y1="{TOP}" x2="{x:.0f}" y2="{bottom}"/>')
        out.append(f'<text class="soft" x="{x:.0f}" y="{bottom + 18}" text-anchor="middle">{tenth / 10:.1f}</text>')
    for row, c in enumerate(cells):
        y, width = TOP + ROW * row, WIDTH * c["fraction"]
        name = f"{c['pass']} {c['dtype']}, d = {c['head_dim']}{', causal' if c['causal'] else ''}"
        out.append(f'<text class="ink" x="{LEFT - 10}" y="{y + 16}" text-anchor="end">{name}</text>')
        out.append(f'<rect class="{c["ceiling"]}" x="{LEFT}" y="{y + 4}" width="{width:.1f}" height="{ROW - 8}"/>')
        out.append(f'<text class="soft" x="{LEFT + width + 6:.0f}" y="{y + 16}">{c["fraction"]:.2f} · '
                   f'{c["gflops"]:.0f} GFLOP/s</text>')
    return "\n".join(out + ["</svg>\n"])


def main():
    source = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "bench/results/cpu_attention.json")
    target = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else ROOT / "docs/img/cpu_attention.svg")
    seqlen, threads = (int(sys.argv[n]) if len(sys.argv) > n else default for n, default in ((3, 2048), (4, 2)))
    target.write_text(svg(json.loads(source.read_text()), seqlen, threads))


if __name__ == "__main__":
    main()
