#!/usr/bin/env bash
# check_install.sh BUILD_DIR WORK_DIR: installs a built tree, moves it, and builds and runs a C++ and a C
# project against it, through find_package and through pkg-config. CC, CXX, CFLAGS, CXXFLAGS,
# CMAKE_TOOLCHAIN_FILE and EMULATOR come from the environment.
set -euo pipefail
build_dir=$1 work=$2
here=$(cd "$(dirname "$0")" && pwd)
cmake=${CMAKE_COMMAND:-cmake}
read -ra emulator <<<"${EMULATOR:-}"

rm -rf "$work"
mkdir -p "$work"
"$cmake" --install "$build_dir" --prefix "$work/first place" >/dev/null
prefix="$work/installed"
mv "$work/first place" "$prefix" # an installed tree may be moved
libdir=$(dirname "$(find "$prefix" -name 'libheadrace.*' | head -n 1)")

if [[ -e $prefix/bin/headrace ]]; then # the command finds the library by itself
  "${emulator[@]}" "$prefix/bin/headrace" --version
fi
export LD_LIBRARY_PATH=$libdir${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

if ! diff <(cd "$here/../../include" && find . -type f | sort) <(cd "$prefix/include" && find . -type f | sort); then
  echo "the installed headers (>) are not the public headers (<)" >&2
  exit 1
fi

for language in cpp c; do
  echo "== find_package, $language"
  "$cmake" -S "$here/consumer_$language" -B "$work/$language" -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
  "$cmake" --build "$work/$language"
  "${emulator[@]}" "$work/$language/consumer_$language"
done

export PKG_CONFIG_PATH="$libdir/pkgconfig"
read -ra package < <(pkg-config --cflags --libs headrace)
read -ra cflags <<<"${CFLAGS:-}"
read -ra cxxflags <<<"${CXXFLAGS:-}"
echo "== pkg-config, cpp: ${package[*]}"
"$CXX" -std=c++20 "${cxxflags[@]}" "$here/consumer_cpp/main.cpp" -o "$work/from_pkg_config_cpp" "${package[@]}"
"${emulator[@]}" "$work/from_pkg_config_cpp"
echo "== pkg-config, c"
"$CC" -std=c11 "${cflags[@]}" "$here/consumer_c/main.c" -o "$work/from_pkg_config_c" "${package[@]}"
"${emulator[@]}" "$work/from_pkg_config_c"
