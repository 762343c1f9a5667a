#!/usr/bin/env bash
# test_install.sh <cmake> <cc> <build folder> <version>: installs a build under a temporary prefix, then builds programs
# against it outside of the tree: with pkg-config and with find_package, shared and static. Then the same once more with the
# installation moved to another folder. The command opaq runs too, if the build has it. Run by ctest.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cmake=$1 cc=$2 build=$3 version=$4
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset LD_LIBRARY_PATH

mkdir "$work/source"
cp "$root"/examples/*.c "$work/source"
cat >"$work/source/version.c" <<'END'
#include <opaq/opaq.h>
#include <stdio.h>
int main(void) { return puts(opaq_version()) < 0; }
END
cat >"$work/source/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.20)
project(consumer C)
set(CMAKE_C_STANDARD 11)
find_package(opaq @VERSION@ REQUIRED)
foreach(kind opaq shared static)
    add_executable(version_${kind} version.c)
    add_executable(quantize_${kind} c_quantize.c)
    target_link_libraries(version_${kind} PRIVATE opaq::${kind})
    target_link_libraries(quantize_${kind} PRIVATE opaq::${kind})
endforeach()
END
sed -i "s/@VERSION@/${version%.*}/" "$work/source/CMakeLists.txt"

fail() {
    echo "$*" >&2
    exit 1
}

runs() { # <program> [<text that it prints>]
    local actual
    actual=$("$1") || fail "$1 failed: $actual"
    if [ $# = 2 ] && [ "$actual" != "$2" ]; then
        fail "$1 printed '$actual', expected '$2'"
    fi
}

expect_shared() { # <yes or no> <program>: whether it is linked with libopaq.so
    local actual=no
    if command -v readelf >/dev/null; then
        ! readelf -d "$2" | grep -q 'NEEDED.*\[libopaq' || actual=yes
        [ "$actual" = "$1" ] || fail "$2 needs libopaq.so: $actual, expected $1"
    fi
}

test_pkg_config() { # <title> <libdir>
    local libdir source program=$work/program
    export PKG_CONFIG_PATH=$2/pkgconfig
    libdir=$(pkg-config --variable=libdir opaq)
    for source in "$work"/source/*.c; do
        # shellcheck disable=SC2046  # the flags are words
        "$cc" -std=c11 "$source" -o "$program" $(pkg-config --cflags --libs opaq) -Wl,-rpath,"$libdir"
        runs "$program"
    done
    runs "$program" "$version" # the last one is version.c
    # Fully static; the linker warns of dlopen(), which such a program uses only where there is a GPU.
    # shellcheck disable=SC2046
    "$cc" -std=c11 -static "$work/source/c_quantize.c" -o "$program" $(pkg-config --static --cflags --libs opaq) \
        2>"$work/warnings" || fail "static: $(cat "$work/warnings")"
    runs "$program"
    # shellcheck disable=SC2046
    "$cc" -std=c11 "$work/source/c_quantize.c" -o "$program" $(pkg-config --cflags opaq) "$libdir/libopaq.a" \
        $(pkg-config --static --libs opaq | sed 's/-lopaq//')
    runs "$program"
    expect_shared no "$program"
    echo "$1, pkg-config: the examples build and run, shared and static"
}

test_find_package() { # <title> <prefix> [<cmake option>]
    local kind folder=$work/consumer
    rm -rf "$folder"
    "$cmake" -S "$work/source" -B "$folder" -DCMAKE_PREFIX_PATH="$2" -DCMAKE_C_COMPILER="$cc" ${3:+"$3"} >/dev/null
    "$cmake" --build "$folder" >/dev/null
    for kind in opaq shared static; do
        runs "$folder/version_$kind" "$version"
        runs "$folder/quantize_$kind"
    done
    expect_shared no "$folder/version_static"
    expect_shared yes "$folder/version_shared"
    expect_shared "$([ $# = 3 ] && echo no || echo yes)" "$folder/version_opaq"
    echo "$1, find_package: opaq::opaq, opaq::shared and opaq::static link and run${3:+ ($3)}"
}

test_command() { # <prefix>
    local command=$1/bin/opaq file
    [ "$("$command" --version)" = "opaq $version" ] ||
        fail "the installed opaq printed '$("$command" --version)', expected 'opaq $version'"
    if [ -d "$build/share" ]; then
        for file in man/man1/opaq.1 bash-completion/completions/opaq zsh/site-functions/_opaq \
            fish/vendor_completions.d/opaq.fish; do
            [ -s "$1/share/$file" ] || fail "share/$file was not installed"
        done
    fi
    echo "the command opaq runs"
}

"$cmake" --install "$build" --prefix "$work/installed" >/dev/null
for title in installed moved; do
    prefix=$work/$title
    [ -d "$prefix" ] || mv "$work/installed" "$prefix"
    libdir=$(dirname "$(find "$prefix" -name libopaq.a)")
    if command -v pkg-config >/dev/null; then
        test_pkg_config "$title" "$libdir"
    else
        echo "note: there is no pkg-config, so only find_package was tested."
    fi
    test_find_package "$title" "$prefix"
done
test_find_package "moved" "$prefix" -Dopaq_USE_STATIC_LIBS=ON
if [ -e "$build/opaq" ]; then
    test_command "$prefix"
fi
