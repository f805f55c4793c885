#!/usr/bin/env bash
# check_incremental.sh BUILD_DIR: a change of one source file recompiles that file alone and configures
# nothing anew. Asks Ninja what it would do; builds nothing, and leaves every time stamp as it was.
set -euo pipefail
build_dir=$1
cd "$(dirname "$0")/.."

plan() { ninja -C "$build_dir" -n; }
if ! plan | grep -q 'no work to do'; then
  echo "$build_dir is not up to date" >&2
  exit 1
fi

stamp=$(mktemp)
trap 'rm -f "$stamp"' EXIT
while read -r source; do
  touch -r "$source" "$stamp"
  touch "$source"
  steps=$(plan)
  touch -r "$stamp" "$source"
  if grep -q 'Re-running CMake' <<<"$steps" || (($(grep -c 'Building CXX object' <<<"$steps") != 1)); then
    printf 'changing %s would do more than compile it:\n%s\n' "$source" "$steps" >&2
    exit 1
  fi
done < <(git ls-files 'src/cpu/*.cpp' 'src/reference/*.cpp')
