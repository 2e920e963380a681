"""The library and the programs that a wheel carries in the folder native/, see scripts/wheel.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def folder() -> Path | None:
    """The wheel's folder of native files, or None where the package carries none."""
    native = Path(__file__).parent / "native"
    return native if native.is_dir() else None


def program(name: str) -> str | None:
    """The path of bfcctl, bfcd or another program: the wheel's, or else the one on PATH."""
    native = folder()
    if native is not None:
        path = native / "bin" / name
        if path.is_file():
            return str(path)
    return shutil.which(name)


def bfcctl() -> None:
    """The command bfcctl of a wheel: this process becomes it."""
    path = program("bfcctl")
    assert path is not None
    os.execv(path, [path, *sys.argv[1:]])
