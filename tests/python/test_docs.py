"""Every Python program that the documents show runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = [
    (document.relative_to(ROOT), program)
    for document in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    for program in re.findall(r"^```python\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)
]


@pytest.mark.parametrize("document, program", PROGRAMS, ids=lambda x: str(x) if isinstance(x, Path) else "")
def test_program(document, program):
    exec(compile(program, str(document), "exec"), {"__name__": "__main__"})


def test_there_are_programs():
    assert len(PROGRAMS) >= 4
