#!/usr/bin/env python3
# What is loaded into programs of other distributions needs no later C library than theirs: that of UBI 8 and Debian 10.
# Prints TAP.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: check-glibc.py LIBRARY...
import re
import subprocess
import sys

LATEST = (2, 28)
# Where the old C library has functions that are in libc.so.6 today.
PARTS = {"libpthread.so.0", "libdl.so.2"}


def later(library):
    """The symbols of a later C library, with their versions."""
    out = subprocess.run(["objdump", "-T", library], check=True, stdout=subprocess.PIPE, text=True).stdout
    for line in out.splitlines():
        match = re.search(r"\*UND\*.*\(?GLIBC_([0-9.]+)\)? +(\S+)$", line)
        if match and tuple(map(int, match[1].split("."))) > LATEST:
            yield f"{match[2]}@GLIBC_{match[1]}"


def lacks(library):
    out = subprocess.run(["objdump", "-p", library], check=True, stdout=subprocess.PIPE, text=True).stdout
    return PARTS - set(re.findall(r"NEEDED +(\S+)", out))


def main():
    failed = False
    print(f"1..{len(sys.argv) - 1}")
    for number, library in enumerate(sys.argv[1:], 1):
        wrong = sorted(later(library)) + [f"it does not need {part}" for part in sorted(lacks(library))]
        failed |= bool(wrong)
        print(f"{'not ' if wrong else ''}ok {number} - {library.rpartition('/')[2]} runs with glibc {LATEST[0]}.{LATEST[1]}")
        for line in wrong:
            print(f"# {line}")
    sys.exit(failed)


main()
