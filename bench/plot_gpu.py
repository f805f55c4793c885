#!/usr/bin/env python3
"""Draws the grid of a result of attention_gpu_peers.py as SVG: TFLOP/s over sequence lengths, one panel a head_dim.

Usage: bench/plot_gpu.py [RESULT.json PICTURE.svg]; without arguments those of bench/results that are there, the forward
and the backward pass, into docs/img.

Needs nothing but Python."""

import json
import math
import pathlib
import sys
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parent.parent
PANEL, GAP, LEFT, TOP, HEIGHT, BOTTOM = 270, 22, 52, 66, 260, 52
SERIES = (("headrace", "ours", "Headrace"), ("cudnn", "theirs", "cuDNN"))
STYLE = """
    .ink { fill: #1f2328 } .soft { fill: #59636e } .grid { stroke: #d1d9e0; stroke-width: 1 }
    .ours { stroke: #0969da; fill: #0969da } .theirs { stroke: #9a6700; fill: #9a6700 }
    polyline { fill: none !important; stroke-width: 2 } .causal { stroke-dasharray: 6 4 }
    @media (prefers-color-scheme: dark) {
      .ink { fill: #f0f6fc } .soft { fill: #9198a1 } .grid { stroke: #3d444d }
      .ours { stroke: #58a6ff; fill: #58a6ff } .theirs { stroke: #e3b341; fill: #e3b341 }
    }"""


def grid_cells(result):
    """The plain bfloat16 cells without grouped queries."""
    return [c for c in result["cells"] if "headrace" in c and c["dtype"] == "bfloat16" and c["heads"] == c["heads_kv"]]


class Panel:
    def __init__(self, left, lengths, top_value):
        self.left, self.lengths, self.top_value = left, lengths, top_value

    def x(self, seqlen):
        low, high = math.log2(self.lengths[0]), math.log2(self.lengths[-1])
        return self.left + 14 + (PANEL - 28) * (math.log2(seqlen) - low) / max(high - low, 1)

    def y(self, tflops):
        return TOP + HEIGHT * (1 - tflops / self.top_value)

    def draw(self, head_dim, cells, first):
        out = [f'<text class="ink" x="{self.left + PANEL / 2:.0f}" y="{TOP - 12}" text-anchor="middle" '
               f'font-weight="600">head_dim {head_dim}</text>']
        for value in range(0, self.top_value + 1, 200):
            y = self.y(value)
            out.append(f'<line class="grid" x1="{self.left}" y1="{y:.1f}" x2="{self.left + PANEL}" y2="{y:.1f}"/>')
            if first:
                out.append(f'<text class="soft" x="{self.left - 8}" y="{y + 4:.1f}" text-anchor="end">{value}</text>')
        for n in self.lengths:
            out.append(f'<text class="soft" x="{self.x(n):.1f}" y="{TOP + HEIGHT + 20}" text-anchor="middle">'
                       f'{n if n < 1024 else f"{n // 1024}k"}</text>')
        for key, css, name in SERIES:
            for causal in (False, True):
                points = sorted((c["seqlen"], c[key]["tflops"]) for c in cells if c["causal"] == causal and key in c)
                style = f'{css} causal' if causal else css
                out.append(f'<polyline class="{style}" points="' +
                           " ".join(f"{self.x(n):.1f},{self.y(t):.1f}" for n, t in points) + '"/>')
                for n, t in points:
                    tip = f"{name}, {'causal' if causal else 'full'}, {n} tokens: {t:.0f} TFLOP/s"
                    out.append(f'<circle class="{css}" cx="{self.x(n):.1f}" cy="{self.y(t):.1f}" r="3">'
                               f"<title>{escape(tip)}</title></circle>")
        return out


def legend(width):
    out, x = [], width - 640
    for _, css, name in SERIES:
        for causal in (False, True):
            style = f'{css} causal' if causal else css
            out.append(f'<polyline class="{style}" points="{x},22 {x + 30},22"/>')
            out.append(f'<text class="ink" x="{x + 36}" y="26">{name}, {"causal" if causal else "full"}</text>')
            x += 170 if name == "Headrace" else 150
    return out


def svg(result):
    cells = grid_cells(result)
    dims = sorted({c["head_dim"] for c in cells})
    lengths = sorted({c["seqlen"] for c in cells})
    best = max(c[key]["tflops"] for c in cells for key, _, _ in SERIES if key in c)
    top_value = 200 * math.ceil(best / 200)
    width = LEFT + len(dims) * (PANEL + GAP)
    height = TOP + HEIGHT + BOTTOM
    which = "Backward" if "backward" in result.get("tables", []) else "Forward"
    title = f"{which} attention in bfloat16 on an {result['gpu'].replace('NVIDIA ', '')}, TFLOP/s over tokens"
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}"',
           """     font-family="system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif" font-size="13">""",
           f"  <style>{STYLE}\n  </style>",
           '<text class="ink" x="14" y="26" font-weight="600">TFLOP/s</text>']
    out += legend(width)
    for index, dim in enumerate(dims):
        panel = Panel(LEFT + index * (PANEL + GAP), lengths, top_value)
        out += panel.draw(dim, [c for c in cells if c["head_dim"] == dim], index == 0)
    out.append(f'<text class="soft" x="{width / 2:.0f}" y="{height - 8}" text-anchor="middle">tokens of a sequence '
               "(batch x tokens = 16384)</text>")
    return "\n".join(out + ["</svg>\n"])


def main():
    if len(sys.argv) == 3:
        pairs = [(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))]
    elif len(sys.argv) == 1:
        pairs = [(ROOT / f"bench/results/{name}.json", ROOT / f"docs/img/{name}.svg")
                 for name in ("h200_forward", "h200_backward")]
        pairs = [pair for pair in pairs if pair[0].exists()]
    else:
        raise SystemExit(__doc__)
    for source, target in pairs:
        target.write_text(svg(json.loads(source.read_text())))


if __name__ == "__main__":
    main()
