#!/usr/bin/env bash
# Checks that every public header compiles alone: as strict C11, and as C++11 if there is a C++ compiler.
set -euo pipefail
. "$(dirname "$0")/common.sh"
cc=${CC:-cc}
languages=("c -std=c11")
if echo 'int main() { return 0; }' | "$cc" -x c++ -fsyntax-only - 2>/dev/null; then
    languages+=("c++ -std=c++11")
else
    say "note: $cc cannot compile C++, so the headers were compiled as C only."
fi
for header in include/opaq/*.h; do
    for language in "${languages[@]}"; do
        # shellcheck disable=SC2086  # two words on purpose
        echo "#include \"${header#include/}\"" |
            "$cc" -x $language -Iinclude -Wall -Wextra -Werror -pedantic-errors -fsyntax-only -
    done
done
say "public headers compile alone as: ${languages[*]}"
