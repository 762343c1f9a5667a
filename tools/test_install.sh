#!/usr/bin/env bash
# test_install.sh <cmake> <cc> <build folder> <version>: installs a build under a temporary prefix, then builds
# programs against it the two ways a user would: with pkg-config and with find_package. The command opaq runs too, if the
# build has it. Run by ctest.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cmake=$1 cc=$2 build=$3 version=$4
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$cmake" --install "$build" --prefix "$work/prefix" >/dev/null
libdir=$(dirname "$(find "$work/prefix" -name libopaq.a)")
export LD_LIBRARY_PATH=$libdir PKG_CONFIG_PATH=$libdir/pkgconfig

cat >"$work/version.c" <<'END'
#include <opaq/opaq.h>
#include <stdio.h>
int main(void) { return puts(opaq_version()) < 0; }
END

expect_version() { # <program>
    local actual
    actual=$("$1")
    if [ "$actual" != "$version" ]; then
        echo "$1 printed version '$actual', expected '$version'" >&2
        exit 1
    fi
}

if command -v pkg-config >/dev/null; then
    for source in "$work/version.c" "$root"/examples/*.c; do
        [ -f "$source" ] || continue
        # shellcheck disable=SC2046  # the flags are words
        "$cc" -std=c11 "$source" -o "$work/program" $(pkg-config --cflags --libs opaq) -lm
        "$work/program" >"$work/output" || { cat "$work/output"; exit 1; }
        echo "pkg-config: $(basename "$source") builds and runs"
    done
    # shellcheck disable=SC2046
    "$cc" -std=c11 "$work/version.c" -o "$work/static" $(pkg-config --cflags opaq) "$libdir/libopaq.a" -lm -pthread
    expect_version "$work/static"
    echo "pkg-config: the static library links and runs"
else
    echo "note: there is no pkg-config, so only find_package was tested."
fi

cat >"$work/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.20)
project(consumer C)
find_package(opaq REQUIRED)
add_executable(with_shared version.c)
target_link_libraries(with_shared PRIVATE opaq::shared)
add_executable(with_static version.c)
target_link_libraries(with_static PRIVATE opaq::static)
END
"$cmake" -S "$work" -B "$work/consumer" -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_C_COMPILER="$cc" >/dev/null
"$cmake" --build "$work/consumer" >/dev/null
expect_version "$work/consumer/with_shared"
expect_version "$work/consumer/with_static"
echo "find_package: opaq::shared and opaq::static link and run"

if [ -e "$build/opaq" ]; then
    command=$work/prefix/bin/opaq
    if [ "$("$command" version | head -n 1)" != "opaq $version" ]; then
        echo "the installed opaq printed '$("$command" version | head -n 1)', expected 'opaq $version'" >&2
        exit 1
    fi
    for file in share/man/man1/opaq.1 share/bash-completion/completions/opaq; do
        if [ -e "$build/opaq.1" ] && [ ! -s "$work/prefix/$file" ]; then
            echo "$file was not installed" >&2
            exit 1
        fi
    done
    echo "the command opaq runs"
fi
