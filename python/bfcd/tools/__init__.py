"""What looks back on bfcd's work: the command bfcd-tools, which bfcctl and bfc-replay run.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from ._bfcctl import Bfcctl, Failure, WrongUse

#: Each is a module with add_arguments(parser), run(options, bfcctl) and PROGRAM, whose user sees the errors (bfcctl).
COMMANDS = ("generate", "history", "plan", "snapshot", "tensorboard", "torch_trace", "trace")


def main(words: list[str] | None = None) -> int:
    """The exit status: 0, 1 (it failed) or 2 (wrong use)."""
    parser = argparse.ArgumentParser(prog="bfcd-tools", description="The commands of bfcctl that look back.")
    parser.add_argument("--bfcctl", default="bfcctl", help="the program that asks the daemon")
    parser.add_argument("--socket", help="the socket that bfcctl opens")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--wide", action="store_true", help="print all columns")
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    module = importlib.import_module(f".{options.command}", __name__)
    own = argparse.ArgumentParser(prog=f"bfcd-tools {options.command}", description=module.__doc__)
    module.add_arguments(own)
    own.parse_args(options.words, options)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    program = getattr(module, "PROGRAM", "bfcctl")
    try:
        module.run(options, Bfcctl(options.bfcctl, options.socket))
        sys.stdout.flush()
    except Failure as failure:
        print(f"{program}: {failure}", file=sys.stderr)
        return 2 if isinstance(failure, WrongUse) else 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # which Python flushes again at its end
        return 1
    except OSError as error:
        print(f"{program}: Standard output cannot be written: {error.strerror}.", file=sys.stderr)
        return 1
    return 0
