#!/usr/bin/env bash
# check_elf.sh <folder>: checks every program and shared library in a build, an installation or an unpacked wheel: full
# RELRO, no executable stack, no empty entry in RUNPATH (which would search the current folder); libopaq.so must use the
# stack protector and _FORTIFY_SOURCE. For an optimized build it also checks the compile commands: all files in src/ except
# the kernels must have the hardening flags (the same file name patterns as in CMakeLists.txt); and if it is a Release build with gcc for x86-64,
# libopaq.so must not exceed 2,500,000 bytes after strip, and none of its functions 65,536 bytes. Run by ctest.
set -euo pipefail
folder=$1

if ! command -v readelf >/dev/null; then
    echo "note: there is no readelf, so ELF files were not checked."
    exit 0
fi
type=$(sed -n 's/^CMAKE_BUILD_TYPE:[A-Z]*=//p' "$folder/CMakeCache.txt" 2>/dev/null || true)
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
    if [[ $file == */libopaq.so* && $type != Debug ]]; then
        symbols=$(readelf --dyn-syms -W "$file" 2>/dev/null)
        grep -q __stack_chk_fail <<<"$symbols" || wrong="$wrong, no stack protector"
        grep -Eq '__[a-z]+_chk' <<<"$symbols" || wrong="$wrong, no _FORTIFY_SOURCE"
    fi
    if [ -n "$wrong" ]; then
        echo "$file: ${wrong#, }" >&2
        failed=1
    fi
    count=$((count + 1))
done < <(find "$folder" -type f \( -perm -u+x -o -name '*.so*' \) ! -path '*/CMakeFiles/*' -print0)
[ "$count" != 0 ] || { echo "$folder holds no program and no shared library" >&2; exit 1; }

if [ -f "$folder/compile_commands.json" ] && [ "$type" != Debug ]; then
    unhardened=$(grep '"command":' "$folder/compile_commands.json" | grep -E ' -c [^ ]*/src/[^ ]*\.c[^u]' |
        grep -v -e ' -D_FORTIFY_SOURCE=3 .*-fstack-protector-strong ' -e ' -fstack-protector-strong .*-D_FORTIFY_SOURCE=3 ' |
        sed 's/.* -c [^ ]*\(\/src\/[^ "]*\).*/\1/' |
        grep -Ev '_(ref|avx2|avx512|neon|dotprod)\.c$|/gemm_(decode|run)\.c$' || true)
    if [ -n "$unhardened" ]; then
        printf 'compiled without hardening: %s\n' $unhardened >&2
        failed=1
    fi
fi

# The limits are for the code of gcc: the size of vector kernels depends on the compiler's unrolling.
library=$folder/libopaq.so
if [ "$type" = Release ] && [ -f "$library" ] && readelf -hW "$library" | grep -q 'X86-64' &&
    readelf -p .comment "$library" | grep -q 'GCC:' && ! readelf -p .comment "$library" | grep -q clang; then
    stripped=$(mktemp)
    trap 'rm -f "$stripped"' EXIT
    strip -o "$stripped" "$library"
    bytes=$(wc -c <"$stripped")
    if [ "$bytes" -gt 2500000 ]; then
        echo "$library has $bytes bytes after strip, at most 2500000 are allowed (tools/measure_build.sh shows more)" >&2
        failed=1
    fi
    long=$(nm -S --radix=d "$library" | awk '$3 ~ /^[tT]$/ && $2 + 0 > 65536 { printf " %s (%d)", $4, $2 }')
    if [ -n "$long" ]; then
        echo "$library has functions of more than 65536 bytes:$long" >&2
        failed=1
    fi
    echo "libopaq.so has $bytes bytes after strip"
fi
echo "$count ELF files checked"
exit "$failed"
