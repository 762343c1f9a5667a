#!/usr/bin/env bash
# measure_build.sh [cmake options]: builds what `make` builds into a temporary folder, file by file on one core and without
# ccache, and prints the CPU seconds of each product, the slowest C files, the size of libopaq.so after strip and its largest
# functions. OPAQ_CUDA=OFF leaves the CUDA back end out, as in `make`. CPU seconds (user and system) hardly depend on the
# machine's load.
set -euo pipefail
. "$(dirname "$0")/common.sh"

slowest=8
largest=5
unset CCACHE_DIR CMAKE_C_COMPILER_LAUNCHER
cmake=$(tools/find_cmake.sh)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# Called by CMake in front of every compiler command: writes its CPU seconds and its last argument, the source file.
cat >"$folder/timed" <<'SCRIPT'
#!/usr/bin/env bash
TIMEFORMAT='%U %S'
{ time "$@" 2>&3; } 3>&2 2>"$0.$$"
status=$?
awk -v file="${!#}" '{ print $1 + $2, file }' "$0.$$" >>"$0.log"
rm "$0.$$"
exit $status
SCRIPT
chmod +x "$folder/timed"

"$cmake" -S . -B "$folder/build" -DCMAKE_C_COMPILER_LAUNCHER="$folder/timed" -DOPAQ_TESTS=OFF \
    "-DOPAQ_CUDA=${OPAQ_CUDA:-AUTO}" "$@" >"$folder/configure.log" || { cat "$folder/configure.log" >&2; exit 1; }
has_cuda=$(sed -n 's/^OPAQ_CUDA_BUILT:INTERNAL=//p' "$folder/build/CMakeCache.txt")

build() { # <target> <title>: builds it, prints the CPU seconds, and adds them to the sum
    TIMEFORMAT='%U %S'
    { time "$cmake" --build "$folder/build" --parallel 1 --target "$1" >"$folder/build.log" 2>&1; } 2>"$folder/seconds" ||
        { cat "$folder/build.log" >&2; exit 1; }
    awk -v title="$2" '{ printf "%-22s %7.1f\n", title, $1 + $2 }' "$folder/seconds" | tee -a "$folder/sums"
}
title "CPU seconds"
build opaq_shared libopaq.so
build opaq "the command"
build opaq_torch libopaq_torch.so
if [ "${has_cuda:-OFF}" != OFF ]; then
    build opaq_cuda libopaq_cuda.so
fi
build opaq_products "other products"
awk '{ sum += $NF } END { printf "%-22s %7.1f\n", "all products", sum }' "$folder/sums"

library=$folder/build/libopaq.so
strip -o "$folder/stripped.so" "$library"
title "libopaq.so"
printf 'stripped, MB           %7.2f\n' "$(awk -v n="$(stat -L -c %s "$folder/stripped.so")" 'BEGIN { print n / 1e6 }')"
title "largest functions"
nm -S --size-sort -r "$library" | awk -v n="$largest" '$3 ~ /[tT]/ && NR <= n + 20 { print $2, $4 }' | head -n "$largest" |
    while read -r size name; do printf '%7.1f KB  %s\n' "$(awk -v n=$((16#$size)) 'BEGIN { print n / 1e3 }')" "$name"; done
title "slowest C files, CPU seconds"
sort -rn "$folder/timed.log" | head -n "$slowest" | sed "s| $PWD/| |" |
    while read -r seconds file; do printf '%7.1f  %s\n' "$seconds" "$file"; done
