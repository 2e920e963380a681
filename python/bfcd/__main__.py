"""python -m bfcd: runs a job under a limit, says what works here, and shows a tour.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import os
import sys

from . import _native, _terminal

_USAGE = """\
usage: python -m bfcd run --limit SIZE [OPTION...] [--] COMMAND [ARGUMENT...]
       python -m bfcd doctor [--json]
       python -m bfcd demo [--fast]

run     a program and its children under a limit of their own, as `bfcctl run` does
doctor  what works here, what does not, and what to do
demo    a tour of two minutes: a daemon of its own, jobs, a refusal, a shared model, parking, and the page
"""
_RUN_FAILED = 125  # of bfcctl run: the program was not started


def run(words: list[str]) -> int:
    """This process becomes bfcctl run."""
    bfcctl = _native.program("bfcctl")
    if bfcctl is None:
        print(f"bfcd: bfcctl was not found: {_terminal.HOW_TO_GET}", file=sys.stderr)
        return _RUN_FAILED
    sys.stdout.flush()
    os.execv(bfcctl, ["bfcctl", "run", *words])


def doctor(words: list[str]) -> int:
    from . import _doctor

    parser = argparse.ArgumentParser(prog="python -m bfcd doctor", description="Says what works here.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return _doctor.main(parser.parse_args(words).json)


def demo(words: list[str]) -> int:
    from . import _demo

    parser = argparse.ArgumentParser(prog="python -m bfcd demo", description="A tour of bfcd.")
    parser.add_argument("--fast", action="store_true", help="without pauses, and without waiting for you at the end")
    return _demo.main(parser.parse_args(words).fast)


_COMMANDS = {"run": run, "doctor": doctor, "demo": demo}


def main(words: list[str]) -> int:
    if words and words[0] in _COMMANDS:
        return _COMMANDS[words[0]](words[1:])
    if words in (["-h"], ["--help"]):
        print(_USAGE, end="")
        return 0
    print(_USAGE, end="", file=sys.stderr)
    return 2


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
