"""Text for people: sizes, times and tables as bfcctl prints them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pwd
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

#: What acts on the terminal or on its neighbours instead of being seen.
_ACTS = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u061c\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff\\ufffe\\uffff\\\\\\ud800-\\udfff]")
_SHORT = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\"}
_WIDTH = 80  # of tables on a terminal
_LEAST = 6  # characters that stay of a text that is cut


def escape(text: str) -> str:
    def one(match: re.Match[str]) -> str:
        c = match[0]
        return _SHORT.get(c) or (f"\\x{ord(c):02x}" if ord(c) < 0x80 else f"\\u{ord(c):04x}")

    return _ACTS.sub(one, text)


def xml(text: str) -> str:
    return re.sub('[&<>"]', lambda match: f"&#{ord(match[0])};", text)


def size(n_bytes: int) -> str:
    if n_bytes < 1024:
        return f"{n_bytes} B"
    value, units = n_bytes / 1024, ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while value >= 1023.95 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.1f} {units[0]}"


def duration(ms: int) -> str:
    s = ms // 1000
    if s < 60:
        return f"{s}.{ms % 1000 // 100} s"
    if s < 3600:
        return f"{s // 60}m {s % 60:02}s"
    if s < 86400:
        return f"{s // 3600}h {s // 60 % 60:02}m"
    return f"{s // 86400}d {s // 3600 % 24:02}h"


def moment(us: int) -> str:
    """In local time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(us // 1_000_000)) if us > 0 else "-"
    except (OverflowError, OSError):
        return "-"


def user(uid: int | None) -> str | None:
    if uid is None:
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


@dataclass
class Column:
    """`key`: of the row, which is a dictionary."""

    title: str
    key: str
    text: Callable[[Any], str] = lambda value: "" if value is None else str(value)
    least: int = 0  # its width
    is_right: bool = False
    is_wide: bool = False  # only in wide tables
    is_cut: bool = False  # where the terminal is too narrow


def number(title: str, key: str, **more: Any) -> Column:
    return Column(title, key, str, is_right=True, **more)


def bytes_of(title: str, key: str, **more: Any) -> Column:
    return Column(title, key, size, least=10, is_right=True, **more)


def time_of(title: str, key: str, **more: Any) -> Column:
    return Column(title, key, duration, least=8 if title == "DURATION" else 0, is_right=True, **more)


def print_table(columns: list[Column], rows: Iterable[dict[str, Any]], is_wide: bool) -> None:
    shown = [c for c in columns if is_wide or not c.is_wide]
    cells = [[escape(c.text(row[c.key])) or "-" for c in shown] for row in rows]
    widths = [max(len(c.title), c.least, *(len(line[i]) for line in cells)) for i, c in enumerate(shown)]
    excess = sum(widths) + 2 * (len(shown) - 1) - _WIDTH
    for i, c in enumerate(shown):
        if c.is_cut and excess > 0 and not is_wide and sys.stdout.isatty():
            widths[i] = max(widths[i] - excess, _LEAST, len(c.title))
    for line in [[c.title for c in shown], *cells]:
        padded = [
            text.rjust(w) if c.is_right else text[:w].ljust(w) for c, w, text in zip(shown, widths, line)
        ]
        print("  ".join(padded).rstrip())
