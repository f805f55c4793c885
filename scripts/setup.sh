#!/usr/bin/env bash
# setup.sh GROUP...: installs what is missing of the groups build, test, ci and wheel of packages.txt. It needs
# root only if a Debian package is missing, and asks no question. Python packages (NVIDIA's compiler for GPU
# kernels, and its disassembler) go to build/tools and nowhere else; without them everything builds, but
# kernels are compiled at run time.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
(($#)) || set -- build

wanted=() wheels=()
for group in "$@"; do
  mapfile -t members < <(sed -n "s/^$group //p" "$here/packages.txt")
  if ((${#members[@]} == 0)); then
    echo "setup.sh: unknown group '$group'; packages.txt has: $(sed -n 's/^\([a-z]*\) .*/\1/p' "$here/packages.txt" |
      sort -u | tr '\n' ' ')" >&2
    exit 2
  fi
  for member in "${members[@]}"; do
    if [[ $member == pip:* ]]; then wheels+=("${member#pip:}"); else wanted+=("$member"); fi
  done
done

# Each package in a folder of its own: pip would replace the folder nvidia that all of them share.
install_wheel() { # NAME==VERSION
  local name=${1%%==*} version=${1##*==}
  local folder=$here/../build/tools/$name
  [[ ! -e $folder/${name//-/_}-$version.dist-info ]] || return 0
  echo "installing: $1 (build/tools)"
  rm -rf "$folder" "$folder.unfinished"
  python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps --no-compile \
    --target "$folder.unfinished" "$1" </dev/null && mv "$folder.unfinished" "$folder"
}

install_wheels() {
  local wheel
  for wheel in "${wheels[@]}"; do
    install_wheel "$wheel" || echo "warning: $wheel was not installed; GPU kernels are not compiled or checked here" >&2
  done
}

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
  if [[ ${HEADRACE_SKIP_SETUP:-} ]]; then exit 0; fi
  cat >&2 <<EOF
This is not Debian or Ubuntu, so nothing was installed. Needed are a C++20 compiler with OpenMP (GCC 12 or
newer), CMake 3.25, Ninja, and the headers of Google Highway 1.0.3, {fmt} 9, CLI11 and nlohmann-json;
GoogleTest and pkg-config for the tests. Debian calls these packages
  ${wanted[*]}
Once they are there, set HEADRACE_SKIP_SETUP=1 to go on without this check.
EOF
  exit 1
fi

missing=()
for package in "${wanted[@]}"; do
  if [[ $(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null) != installed ]]; then
    missing+=("$package")
  fi
done
if ((${#missing[@]} == 0)); then
  install_wheels
  exit 0
fi

if (($(id -u) != 0)); then
  echo "These packages are missing and installing them needs root:" >&2
  echo "  sudo apt-get install -y --no-install-recommends ${missing[*]}" >&2
  exit 1
fi

echo "installing: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
install() { apt-get install -y -q --no-install-recommends "${missing[@]}" </dev/null; }
# The package lists may be absent or too old to name files that still exist.
install || { apt-get update -q && install; }
install_wheels
