#!/usr/bin/env bash
# check_exports.sh NM LIBRARY HEADER: the shared library exports the functions of the C interface, each
# of them, and nothing else.
set -euo pipefail
nm=$1 library=$2 header=$3

exported=$("$nm" --dynamic --defined-only --format=posix "$library" | cut -d' ' -f1 | sort)
declared=$(sed -n 's/^HR_API.*[ *]\(hr_[a-z_]*\)(.*/\1/p' "$header" | sort)
if [[ -z $declared ]]; then
  echo "no HR_API declaration found in $header" >&2
  exit 1
fi
if ! diff <(echo "$declared") <(echo "$exported"); then
  echo "$library: exports (>) differ from the declarations (<) of $header" >&2
  exit 1
fi
