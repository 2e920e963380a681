"""What looks back on bfcd's work: the command bfcd-tools, which `bfcctl history` and `bfcctl tensorboard` run.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from ._bfcctl import Bfcctl, Failure, WrongUse

#: Each is a module with add_arguments(parser) and run(options, bfcctl).
COMMANDS = ("history", "tensorboard")


def main(words: list[str] | None = None) -> int:
    """The exit status: 0, 1 (it failed) or 2 (wrong use)."""
    parser = argparse.ArgumentParser(prog="bfcd-tools", description="The commands of bfcctl that look back.")
    parser.add_argument("--bfcctl", default="bfcctl", help="the program that asks the daemon")
    parser.add_argument("--socket", help="the socket that bfcctl opens")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--wide", action="store_true", help="print all columns")
    commands = parser.add_subparsers(dest="command", required=True)
    modules = {}
    for name in COMMANDS:
        modules[name] = importlib.import_module(f".{name}", __name__)
        modules[name].add_arguments(commands.add_parser(name, description=modules[name].__doc__))
    options = parser.parse_args(words)
    try:
        modules[options.command].run(options, Bfcctl(options.bfcctl, options.socket))
        sys.stdout.flush()
    except Failure as failure:
        print(f"bfcctl: {failure}", file=sys.stderr)
        return 2 if isinstance(failure, WrongUse) else 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # which Python flushes again at its end
        return 1
    except OSError as error:
        print(f"bfcctl: Standard output cannot be written: {error.strerror}.", file=sys.stderr)
        return 1
    return 0
