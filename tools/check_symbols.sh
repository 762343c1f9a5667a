#!/usr/bin/env bash
# check_symbols.sh [--write]: compares the exports of libopaq.so with tools/exported_symbols.txt (--write updates that file),
# and checks that it depends on libc, libm and the thread library only.
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
    say "If this is intended, run tools/check_symbols.sh --write and mention it in the commit."
    exit 1
fi
declared=$(grep -hoE 'opaq_[a-z0-9_]+\(' include/opaq/*.h | tr -d '(' | sort -u)
undeclared=$(comm -13 <(printf '%s\n' "$declared") <(printf '%s\n' "$actual"))
if [ -n "$undeclared" ]; then
    say "exported but in no public header:" "$undeclared"
    exit 1
fi
needed=$(readelf -d build/libopaq.so | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
if unexpected=$(printf '%s\n' "$needed" | grep -vE '^(libc|libm|libpthread|ld-linux[-a-z0-9_]*)\.so'); then
    say "libopaq.so needs more than the C library:" "$unexpected"
    exit 1
fi
say "$(printf '%s\n' "$actual" | wc -l) symbols, needs only:" $needed

# The bridge exports only functions that the Python package calls, and depends on libc, libtorch_cpu and libopaq only.
if [ -f build/libopaq_torch.so ]; then
    exported=$(nm -D --defined-only build/libopaq_torch.so | awk '{ print $3 }')
    unexpected=$(readelf -d build/libopaq_torch.so | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
        grep -vE '^(libc|libtorch_cpu|libopaq|ld-linux[-a-z0-9_]*)\.so' || true)
    expected='opaq_torch_alias_define opaq_torch_alias_withdraw opaq_torch_has_snapshot opaq_torch_last_status opaq_torch_snapshot_begin opaq_torch_snapshot_end opaq_torch_status opaq_torch_watch_gradients'
    if [ "$(printf '%s\n' "$exported" | sort | tr '\n' ' ')" != "$expected " ] || [ -n "$unexpected" ]; then
        say "libopaq_torch.so exports: $exported; needs beyond PyTorch and opaq: $unexpected"
        exit 1
    fi
fi
