#!/usr/bin/env bash
# Compares what libopaq.so exports with tools/exported_symbols.txt (--write makes that file), and makes sure that
# it needs no library beyond libc, libm and the thread library.
set -euo pipefail
. "$(dirname "$0")/common.sh"

if ! output=$(tools/build.sh build 2>&1); then
    say "$output"
    exit 1
fi
export LC_ALL=C
list=tools/exported_symbols.txt
actual=$(nm -D --defined-only build/libopaq.so | awk '{ print $3 }' | sort)
if [ "${1:-}" = --write ]; then
    printf '%s\n' "$actual" >"$list"
fi
if ! difference=$(diff "$list" <(printf '%s\n' "$actual")); then
    printf '%s\n' "$difference" | sed -n 's/^</listed but not exported:/p; s/^>/exported but not listed:/p'
    say "If that is meant, run tools/check_symbols.sh --write and say so in the commit."
    exit 1
fi
declared=$(grep -hoE 'opaq_[a-z0-9_]+\(' include/opaq/*.h | tr -d '(' | sort -u)
undeclared=$(comm -13 <(printf '%s\n' "$declared") <(printf '%s\n' "$actual"))
if [ -n "$undeclared" ]; then
    say "exported but in no public header:" "$undeclared"
    exit 1
fi
needed=$(readelf -d build/libopaq.so | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
if strangers=$(printf '%s\n' "$needed" | grep -vE '^(libc|libm|libpthread|ld-linux[-a-z0-9_]*)\.so'); then
    say "libopaq.so needs more than the C library:" "$strangers"
    exit 1
fi
say "$(printf '%s\n' "$actual" | wc -l) symbols, needs only:" $needed

# The bridge exports what the Python package calls and nothing else, and needs PyTorch's and opaq's library besides libc.
if [ -f build/libopaq_torch.so ]; then
    exported=$(nm -D --defined-only build/libopaq_torch.so | awk '{ print $3 }')
    strangers=$(readelf -d build/libopaq_torch.so | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
        grep -vE '^(libc|libtorch_cpu|libopaq|ld-linux[-a-z0-9_]*)\.so' || true)
    expected='opaq_torch_alias_define opaq_torch_alias_withdraw opaq_torch_has_snapshot opaq_torch_last_status opaq_torch_snapshot_begin opaq_torch_snapshot_end opaq_torch_status opaq_torch_watch_gradients'
    if [ "$(printf '%s\n' "$exported" | sort | tr '\n' ' ')" != "$expected " ] || [ -n "$strangers" ]; then
        say "libopaq_torch.so exports: $exported; needs beyond PyTorch and opaq: $strangers"
        exit 1
    fi
fi
