"""The list of shared blocks.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _errors, _library
from ._library import lib

if TYPE_CHECKING:
    from ._client import Client


class SharedBlock(NamedTuple):
    """A row of Client.shared()."""

    name: str
    partition: str
    nbytes: int
    num_references: int  #: processes that have it
    keep: float  #: seconds, as published; 0 after forget()
    left: float  #: how many seconds it stays when no process has it
    n_metadata_bytes: int


def _seconds(ms: int) -> float:
    return math.inf if ms == _library.KEEP_FOREVER else ms / 1000


def shared(client: Client) -> list[SharedBlock]:
    rows: list[SharedBlock] = []

    @_library.SharedFn
    def add(_: Any, info: Any) -> int:
        i = info.contents
        rows.append(
            SharedBlock(
                i.name.decode(),
                i.partition.decode(),
                i.n_bytes,
                i.num_references,
                _seconds(i.keep_ms),
                _seconds(i.left_ms),
                i.n_metadata_bytes,
            )
        )
        return 0

    _errors.check(lib.bfc_list_shared(client._handle, add, None))
    return rows
