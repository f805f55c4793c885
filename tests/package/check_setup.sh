#!/usr/bin/env bash
# check_setup.sh: scripts/setup.sh on machines that lack packages, played by stand-ins for dpkg-query,
# apt-get, id and python3, in a tree that has nothing but the scripts.
set -euo pipefail
scripts=$(cd "$(dirname "$0")/../.." && pwd)/scripts
stubs=$(mktemp -d)
trap 'rm -rf "$stubs"' EXIT
mkdir "$stubs/tree"
cp -r "$scripts" "$stubs/tree/scripts"
setup=$stubs/tree/scripts/setup.sh tools=$stubs/tree/build/tools
stub() { printf '#!/bin/bash\n%s\n' "$2" >"$stubs/$1" && chmod +x "$stubs/$1"; }
fail() { echo "check_setup.sh: $1" >&2 && exit 1; }
run() { PATH=$stubs:$PATH "$setup" "$@" >"$stubs/output" 2>&1; }

stub dpkg-query '[[ $* == *libfmt-dev* ]] && exit 1; echo installed'
stub apt-get "echo \"\$*\" >>$stubs/apt"

# No Python package can be had, which is no error.
stub python3 "echo \"\$*\" >>$stubs/pip; exit 1"

stub id 'echo 1000'
if run build test; then fail 'missing packages without root must be an error'; fi
grep -q 'apt-get install .* libfmt-dev$' "$stubs/output" || fail 'must name exactly the missing packages'
[[ ! -e $stubs/apt ]] || fail 'must not try to install without root'

stub id 'echo 0'
run build test || fail 'root must install'
[[ $(cat "$stubs/apt") == 'install '*' libfmt-dev' ]] || fail 'must install what is missing, and only that'

# The lists of a fresh machine are empty: the first try fails, the next one follows an update.
stub apt-get "echo \"\$*\" >>$stubs/apt; [[ \$1 == update || -e $stubs/updated ]] || exit 100; touch $stubs/updated"
: >"$stubs/apt"
run build || fail 'must try again after apt-get update'
[[ $(cut -d' ' -f1 "$stubs/apt" | tr '\n' ' ') == 'install update install ' ]] || fail 'wrong order of apt-get calls'

stub dpkg-query 'echo installed'
stub id 'echo 1000'
rm "$stubs/apt"
run build test ci || fail 'nothing missing must pass without root'
[[ ! -e $stubs/apt ]] || fail 'nothing missing must not call apt-get'

grep -q 'warning: nvidia-cuda-nvrtc==.* was not installed' "$stubs/output" || fail 'must tell of a missing Python package'
[[ ! -e $tools ]] || fail 'must leave nothing of a Python package that it could not install'

# pip install ... --target FOLDER NAME==VERSION
# shellcheck disable=SC2016 # the stand-in's $
stub python3 "echo \"\$*\" >>$stubs/pip"'
folder=$(sed "s/.*--target \([^ ]*\) .*/\1/" <<<"$*") name=${!#}
mkdir -p "$folder/$(tr - _ <<<"${name%%==*}")-${name##*==}.dist-info"'
rm "$stubs/pip"
run build test || fail 'must install Python packages without root'
[[ $(grep -c . "$stubs/pip") == 2 && -e $tools/nvidia-cuda-nvrtc ]] || fail 'must install each Python package once'
rm "$stubs/pip"
run build test || fail 'nothing missing must pass'
[[ ! -e $stubs/pip ]] || fail 'must not install a Python package again'
sed -i 's/^\(build pip:nvidia-cuda-nvrtc==\).*/\1999.0/' "$stubs/tree/scripts/packages.txt"
run build test || fail 'must install another version'
[[ $(ls "$tools/nvidia-cuda-nvrtc") == nvidia_cuda_nvrtc-999.0.dist-info ]] || fail 'must replace the old version'

if run nonsense; then fail 'an unknown group must be an error'; fi
