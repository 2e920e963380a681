"""Devices as TensorFlow names them: a physical device has the memory, and a logical device is a part of it with a limit
of its own, which bfcd calls a partition.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, NamedTuple

from . import _errors, _library
from ._library import lib

if TYPE_CHECKING:
    from ._client import Client


class PhysicalDevice(NamedTuple):
    """The host or a GPU."""

    name: str  #: as the daemon's configuration names it: "host", "cuda:0"
    kind: str  #: "host" or "cuda"
    uuid: str  #: "host", or "GPU-" and the UUID as nvidia-smi prints it
    ordinal: int | None  #: the GPU's number in this process; None: the host, or a GPU that it does not see


class LogicalDevice(NamedTuple):
    """A partition in which the tenant has a quota."""

    name: str
    physical: PhysicalDevice
    bytes_limit: int  #: the tenant's
    bytes_in_use: int  #: of the tenant's blocks, in all of its processes
    bytes_reserved: int  #: of the extents behind them, to which the limit applies


class Devices(NamedTuple):
    logical: list[LogicalDevice]
    physical: list[PhysicalDevice]


def devices(client: Client) -> Devices:
    logical: list[LogicalDevice] = []
    physical: dict[str, PhysicalDevice] = {}
    info = _library.PartitionInfo()
    while (result := lib.bfc_partition_info(client._handle, len(logical), info)) != -errno.ENOENT:
        _errors.check(result)
        uuid, name = info.device_uuid.decode(), info.partition.decode()
        device = PhysicalDevice(
            info.device.decode(),
            "host" if uuid == "host" else "cuda",
            uuid,
            None if info.device_ordinal < 0 else info.device_ordinal,
        )
        usage = client._usage(name)
        logical.append(
            LogicalDevice(
                name, physical.setdefault(uuid, device), usage.bytes_limit, usage.bytes_in_use, usage.bytes_reserved
            )
        )
    return Devices(logical, list(physical.values()))
