#!/usr/bin/env bash
# check_elf.sh <folder>: reads every program and shared library under a build or an installation: full RELRO, no
# executable stack, no empty entry in RUNPATH (which would search the current folder). Run by ctest.
set -euo pipefail
folder=$1

if ! command -v readelf >/dev/null; then
    echo "note: there is no readelf, so nothing was checked."
    exit 0
fi
count=0
failed=0
while IFS= read -r -d '' file; do
    if [ "$(head -c 4 "$file" | tr -d '\0')" != $'\x7fELF' ]; then
        continue
    fi
    segments=$(readelf -lW "$file" 2>/dev/null)
    dynamic=$(readelf -dW "$file" 2>/dev/null)
    path=$(sed -n 's/.*(RU\{0,1\}N\{0,1\}R\{0,1\}PATH).*\[\(.*\)\].*/:\1:/p' <<<"$dynamic")
    wrong=
    grep -q GNU_RELRO <<<"$segments" || wrong="$wrong, no RELRO"
    grep -Eq 'BIND_NOW|Flags:.* NOW' <<<"$dynamic" || wrong="$wrong, no BIND_NOW"
    grep -Eq 'GNU_STACK.* RWE' <<<"$segments" && wrong="$wrong, an executable stack"
    [[ $path != *::* ]] || wrong="$wrong, an empty RUNPATH entry in $path"
    if [ -n "$wrong" ]; then
        echo "$file: ${wrong#, }" >&2
        failed=1
    fi
    count=$((count + 1))
done < <(find "$folder" -type f \( -perm -u+x -o -name '*.so*' \) ! -path '*/CMakeFiles/*' -print0)
[ "$count" != 0 ] || { echo "$folder holds no program and no shared library" >&2; exit 1; }
echo "$count ELF files read"
exit "$failed"
