"""The example programs run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples/python"


def test_plot_attention(tmp_path):
    pytest.importorskip("matplotlib")
    command = [sys.executable, EXAMPLES / "plot_attention.py", "figure.svg", "--lengths", "16", "--json", "numbers.json"]
    subprocess.run(command, check=True, cwd=tmp_path)
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert all(x > 0 for row in numbers["seconds"] for x in row.values())
    assert "<svg" in (tmp_path / "figure.svg").read_text()
