"""The library and the programs that a wheel carries in the folder native/, see scripts/wheel.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import shutil
from pathlib import Path


def folder() -> Path | None:
    """The wheel's folder of native files, or None where the package carries none."""
    native = Path(__file__).parent / "native"
    return native if native.is_dir() else None


def program(name: str) -> str | None:
    """The path of bfcctl, bfcd or another program: the wheel's, or else the one on PATH."""
    native = folder()
    if native is not None:
        for bin_folder in ("bin", "sbin"):
            path = native / bin_folder / name
            if path.is_file():
                return str(path)
    return shutil.which(name)
