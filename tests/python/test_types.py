"""The types that the package promises (py.typed) hold."""

import subprocess
import sys

import pytest

pytest.importorskip("mypy")


def test_mypy_finds_nothing(tmp_path):
    # As a package that is installed, so from another folder.
    command = [sys.executable, "-m", "mypy", "-p", "headrace", "--ignore-missing-imports", "--cache-dir", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
