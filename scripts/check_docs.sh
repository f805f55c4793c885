#!/usr/bin/env bash
# check_docs.sh BUILD_DIR: what the documents show works. Every fenced block marked cpp or c is a program:
# it is compiled against the built library and run. Every block marked "sh tested" is run from the
# repository's root, with the built command line in PATH. Blocks marked "cpp fragment" are only shown. A
# block behind the line <!-- file: PATH --> must have the contents of that file. Links to files of the
# repository must lead somewhere.
set -euo pipefail
cd "$(dirname "$0")/.."
build_dir=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PATH=$build_dir/tools/headrace:$PATH LD_LIBRARY_PATH=$build_dir${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

# shellcheck disable=SC2016 # awk's $
git ls-files -z '*.md' | xargs -0 awk -v work="$work" '
  /^```/ {
    if (file) { close(file); file = ""; next }
    if (!inside && (kind = $0 == "```cpp" ? "cpp" : $0 == "```c" ? "c" : $0 == "```sh tested" ? "sh" : "")) {
      file = sprintf("%s/%03d.%s", work, ++count, kind)
      printf "%s:%d\n", FILENAME, FNR > (file ".where")
      close(file ".where")
      if (same) { print same > (file ".same"); close(file ".same") }
      same = ""
      next
    }
    inside = !inside
    next
  }
  file { print > file; next }
  match($0, /^<!-- file: .* -->$/) { same = substr($0, 12, length($0) - 15); next }
  !inside {
    for (rest = $0; match(rest, /\]\([^)]+\)/); rest = substr(rest, RSTART + RLENGTH))
      printf "%s:%s\n", FILENAME, substr(rest, RSTART + 2, RLENGTH - 3) > (work "/links")
  }
'

failed=0 count=0
warnings=(-Wall -Wextra -Wpedantic -Werror)
for block in "$work"/*.cpp "$work"/*.c "$work"/*.sh; do
  [[ -e $block ]] || continue
  count=$((count + 1))
  echo "== $(cat "$block.where")"
  program=$work/program
  if [[ -e $block.same ]] && ! diff "$block" "$(cat "$block.same")"; then
    echo "FAILED: $(cat "$block.where") (<) is not $(cat "$block.same") (>)" >&2 && failed=1
  fi
  case $block in
    *.cpp) "${CXX:-g++}" -std=c++20 "${warnings[@]}" -Iinclude "$block" -o "$program" -L"$build_dir" -lheadrace && "$program" ;;
    *.c) "${CC:-gcc}" -std=c11 "${warnings[@]}" -Iinclude "$block" -o "$program" -L"$build_dir" -lheadrace -lm && "$program" ;;
    *.sh) bash -euo pipefail "$block" </dev/null ;;
  esac || { echo "FAILED: $(cat "$block.where")" >&2 && failed=1; }
done

links=0
while IFS=: read -r document link; do
  target=${link%%#*}
  [[ $target && $target != *://* ]] || continue
  links=$((links + 1))
  git ls-files --error-unmatch "$(realpath -m --relative-to=. "$(dirname "$document")/$target")" >/dev/null 2>&1 ||
    { echo "FAILED: $document links to $target, which is not there" >&2 && failed=1; }
done < <(cat "$work/links" 2>/dev/null)
echo "$count blocks, $links links"
exit $failed
