#!/usr/bin/env bash
# lint.sh [CHECK...]: format, headers, generated, paths, shell and tidy; without arguments all of them. tidy needs a
# configured build tree, BUILD_DIR (build/release).
set -euo pipefail
cd "$(dirname "$0")/.."
build_dir=${BUILD_DIR:-build/release}

check_format() {
  git ls-files -z '*.c' '*.cpp' '*.h' '*.hpp' '*.cuh' | xargs -0 clang-format-14 --dry-run --Werror
}

# Every header compiles alone, and twice; not so -inl.h, which are made to be included once a SIMD target.
check_headers() {
  local header failed=0
  while read -r header; do
    printf '#include "%s"\n#include "%s"\n' "$header" "$header" |
      "${CXX:-g++}" -std=c++20 -fsyntax-only -Wall -Wextra -Wpedantic -Werror -fopenmp -Iinclude -Isrc -I. -x c++ - ||
      { echo "$header does not compile alone" >&2 && failed=1; }
  done < <(git ls-files 'include/*.h' 'include/*.hpp' 'src/*.hpp')
  printf '#include "headrace/headrace.h"\n' |
    "${CC:-gcc}" -std=c11 -fsyntax-only -Wall -Wextra -Wpedantic -Werror -Iinclude -x c - ||
    { echo "headrace.h is not C11" >&2 && failed=1; }
  return $failed
}

# Generated files are what their generators write.
check_generated() {
  scripts/generate_wgmma.py
  git diff --exit-code --stat -- src/cuda/kernels/ptx/wgmma_shapes.cuh
}

# Nothing may depend on, or tell, the machine it was written on.
check_paths() {
  ! git grep -nIE '/(home|Users|root|work|mnt)/[a-z]' -- . ':!scripts/lint.sh' >&2 &&
    ! git grep -nIF -e "$PWD/" -- . >&2
}

check_shell() {
  git ls-files -z '*.sh' .ci/run | xargs -0 shellcheck
}

check_tidy() {
  # compile_commands.json lists each source once for every target that it belongs to.
  git ls-files 'src/*.cpp' 'tools/*.cpp' | sed "s|^|$PWD/|" |
    xargs run-clang-tidy-14 -quiet -j "$(nproc)" -p "$build_dir"
}

(($#)) || set -- format headers generated paths shell tidy
for check in "$@"; do
  echo "== $check"
  "check_$check"
done
