"""Fresh seeds: each test draws from a generator of its own, and a failure prints what repeats it."""

import os
import random
import sys

import numpy as np
import pytest

SEED = int(os.environ.get("HEADRACE_TEST_SEED", random.SystemRandom().getrandbits(32)))
SCALE = float(os.environ.get("HEADRACE_TEST_SCALE", 1))


def pytest_report_header():
    return f"HEADRACE_TEST_SEED={SEED}"


def pytest_terminal_summary(terminalreporter):
    problems = sys.modules.get("problems")
    if problems is not None:
        terminalreporter.write_line(f"{problems.Problem.answered} random calls were compared with float64 autograd")


@pytest.fixture
def rng(request):
    name = f"{request.module.__name__}.{request.node.name}"  # not the path, which depends on the current folder
    return np.random.default_rng([SEED, *name.encode()])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        report.sections.append(("seed", f"HEADRACE_TEST_SEED={SEED}"))
    return report
