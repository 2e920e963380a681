# What a wheel carries, and which library is loaded.
#
# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from bfcd import _native

PACKAGE = pathlib.Path(_native.__file__).parent
LOADED = 'print(*sorted({line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if "libbfcclient" in line}))'


@pytest.fixture
def wheel(tmp_path):
    """A folder with the package as a wheel has it."""
    package = tmp_path / "bfcd"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "native"))
    (package / "native/bin").mkdir(parents=True)
    (package / "native/lib").mkdir()
    shutil.copy(os.environ["BFC_LIBRARY"], package / "native/lib/libbfcclient.so.0")
    return tmp_path


def run(wheel, program, **environment):
    """What a program prints that has the package of the wheel."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BFC_")}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=clean | {"PYTHONPATH": str(wheel)} | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.strip()


def test_program(wheel, tmp_path):
    program = wheel / "bfcd/native/bin/bfcctl"
    program.write_text("#!/bin/sh\necho wheel\n")
    program.chmod(0o755)
    (tmp_path / "bin").mkdir()
    other = tmp_path / "bin/bfc-other"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    find = 'import bfcd._native as n; print(n.program("bfcctl"), n.program("bfc-other"), n.program("bfc-none"))'
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    assert run(wheel, find, PATH=path) == f"{program} {other} None"
    assert run(wheel, "import bfcd._native as n; n.bfcctl()") == "wheel"


def test_library(wheel):
    own = str(wheel / "bfcd/native/lib/libbfcclient.so.0")
    given = str(pathlib.Path(os.environ["BFC_LIBRARY"]).resolve())
    first = f"import ctypes; ctypes.CDLL({given!r}); "
    assert run(wheel, "import bfcd; bfcd.connect; " + LOADED) == own
    assert run(wheel, "import bfcd; bfcd.connect; " + LOADED, BFC_LIBRARY=given) == given
    assert run(wheel, first + "import bfcd; bfcd.connect; " + LOADED) == given
