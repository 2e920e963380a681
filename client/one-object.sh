#!/bin/sh
# Makes a static library of one object, whose only global symbols are those that the shared library
# exports. So the many short names of our modules do not clash with those of the program.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: one-object.sh OBJCOPY AR MAP ARCHIVE OUTPUT LINKER-COMMAND...
set -eu
objcopy=$1 ar=$2 map=$3 archive=$4 output=$5
shift 5
work=$(mktemp -d "$output.XXXXXX")
trap 'rm -rf "$work"' EXIT
sed -n 's/^[ \t]*\([a-z][a-z0-9_]*\);.*/\1/p' "$map" >"$work/names"
"$@" -r -nostdlib -o "$work/bfcclient.o" -Wl,--whole-archive "$archive" -Wl,--no-whole-archive
"$objcopy" --keep-global-symbols="$work/names" "$work/bfcclient.o"
rm -f "$output"
"$ar" rcs "$output" "$work/bfcclient.o"
