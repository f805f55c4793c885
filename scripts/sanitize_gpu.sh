#!/usr/bin/env bash
# compute-sanitizer over a reduced set of the GPU tests: out-of-bounds and misaligned accesses (memcheck), races on
# shared memory (racecheck). Needs a GPU and compute-sanitizer; a few minutes.
#
# No racecheck of the backward pass: its threads read what others wrote or copied to shared memory, and then one lane
# arrives on the mbarrier for its warp, behind __syncwarp() or a named barrier. Racecheck (of CUDA 13.0) does not follow
# that order and reports every such read, also in a program of twenty lines, of which it reports nothing where every lane
# arrives for itself.
#
# Usage: scripts/sanitize_gpu.sh TESTS_FOLDER LOG_FOLDER      (TESTS_FOLDER: build/release/tests/cuda)
set -uo pipefail
tests=$1 logs=$2
mkdir -p "$logs"

# sanitize TOOL TEST SCALE FILTER: one run in the background, of SCALE times the random problems. Most of the time goes
# into instrumenting kernels on one core of the host, so that all runs share the GPU.
declare -A runs
sanitize() {
  local name=$1_$2
  HEADRACE_TEST_SCALE=$3 timeout 280 compute-sanitizer --tool "$1" --error-exitcode 99 --print-limit 20 \
    "$tests/cuda_$2_test" --gtest_filter="$4" --gtest_brief=1 >"$logs/$name.log" 2>&1 &
  runs[$name]=$!
}

sanitize memcheck forward 0.02 "*Random.*:*Cases.*"
sanitize memcheck backward 0.02 "*Random.*:*Cases.*"
sanitize racecheck forward 0.004 "*Random.*:*Cases.EveryHeadDim*:*Cases.HeadsThatShareKeys"
sanitize memcheck wgmma 1 '*'

failed=0
for name in "${!runs[@]}"; do
  wait "${runs[$name]}"
  code=$?
  ((code == 0)) || failed=1
  printf '%-20s exit %d: %s\n' "$name" "$code" "$(tail -n 1 "$logs/$name.log")"
done
exit $failed
