"""Text for a person: colors and widths on a terminal, plain lines elsewhere.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap

#: What to do about a program that _native.program() does not find.
HOW_TO_GET = "install bfcd's packages or a wheel that carries its programs, or add their folder to PATH"

BOLD, DIM, GREEN, YELLOW, RED = "1", "2", "32", "33", "1;31"


def is_terminal() -> bool:
    return sys.stdout.isatty()


def paint(text: str, color: str) -> str:
    return f"\033[{color}m{text}\033[0m" if is_terminal() and not os.environ.get("NO_COLOR") else text


def escape(text: str) -> str:
    """With escapes of what acts on a terminal instead of being seen, and of what is no UTF-8."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def fill(text: str, indent: int) -> str:
    """Wrapped to the terminal's width, with all lines but the first indented. Elsewhere it stays one line."""
    if not is_terminal():
        return text
    width = max(shutil.get_terminal_size().columns - 1, indent + 40)
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)
