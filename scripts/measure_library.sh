#!/usr/bin/env bash
# measure_library.sh WORK_DIR: builds the library alone, from nothing, without a compiler cache, static,
# as part of another project (add_subdirectory), but for the GPU kernels that can be compiled ahead; holds time
# and memory against their bounds; then installs that build and uses it like a stranger.
set -euo pipefail
work=$(realpath -m "$1")
source=$(cd "$(dirname "$0")/.." && pwd)
max_seconds=180 max_kib=$((1536 * 1024))

rm -rf "$work"
mkdir -p "$work"
# The compiler's peak memory is that of its largest process.
cat >"$work/launcher" <<EOF
#!/bin/sh
exec /usr/bin/time -a -o '$work/usage' -f '%M %e' "\$@"
EOF
chmod +x "$work/launcher"

cmake -G Ninja -S "$source/tests/package/consumer_cpp" -B "$work/build" -DHEADRACE_SOURCE="$source" \
  -DBUILD_SHARED_LIBS=OFF -DHEADRACE_PRECOMPILE=OFF -DHEADRACE_INSTALL=ON -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_C_COMPILER_LAUNCHER="$work/launcher" -DCMAKE_CXX_COMPILER_LAUNCHER="$work/launcher" >/dev/null
start=$SECONDS
cmake --build "$work/build" --target headrace
seconds=$((SECONDS - start))
read -r kib _ < <(sort -n "$work/usage" | tail -n 1)
echo "library alone: $seconds s (at most $max_seconds), largest compile unit $((kib / 1024)) MiB (at most $((max_kib / 1024)))"
((seconds <= max_seconds && kib <= max_kib))

cmake --build "$work/build"
"$work/build/consumer_cpp"
CC=gcc CXX=g++ "$source/tests/package/check_install.sh" "$work/build/headrace" "$work/package"
