"""Files that are written whole.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile

from ._bfcctl import Failure


def write(path: str, data: bytes) -> None:
    """To standard output if path is "-". A file of this user, or a new one, is replaced when it is complete; others are
    written to."""
    try:
        if path == "-":
            sys.stdout.flush()
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        elif os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            with open(path, "wb") as out:
                out.write(data)
        elif os.path.exists(path) and not _may_replace(path):
            with open(path, "wb") as out:
                out.write(data)
        else:
            _replace(path, data)
    except OSError as error:
        what = "Standard output" if path == "-" else path
        raise Failure(f"{what} cannot be written: {error.strerror}") from None


def _may_replace(path: str) -> bool:
    """Else the file would get another owner, or the folder may have no new file."""
    return os.stat(path).st_uid == os.geteuid() and os.access(os.path.dirname(path) or ".", os.W_OK)


def _replace(path: str, data: bytes) -> None:
    mask = os.umask(0)
    os.umask(mask)
    mode = 0o666 & ~mask
    if os.path.exists(path):
        mode = os.stat(path).st_mode & 0o777
        os.close(os.open(path, os.O_WRONLY))  # it must be allowed
    fd, temporary = tempfile.mkstemp(prefix=os.path.basename(path) + ".", dir=os.path.dirname(path) or ".")
    try:
        with open(fd, "wb") as out:
            os.fchmod(fd, mode)
            out.write(data)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
