"""Memory from bfcd, the device memory broker.

    import bfcd
    client = bfcd.default()
    x = client.empty((1000, 1000), "float32")

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from ._arrays import DeviceArray
from ._client import Block, Client, SharedBlock, connect, default, devices, on_pressure, pool, trace
from ._devices import Devices, LogicalDevice, PhysicalDevice
from ._errors import (
    Busy,
    DeviceLost,
    Disconnected,
    Error,
    Exists,
    Forked,
    InvalidValue,
    NotFound,
    NotPermitted,
    OutOfMemory,
    Parked,
    QuotaExceeded,
    Timeout,
)
from ._pool import Pool
from ._weights import weights

__version__ = "0.1.0"

__all__ = [
    "Block",
    "Busy",
    "Client",
    "DeviceArray",
    "DeviceLost",
    "Devices",
    "Disconnected",
    "Error",
    "Exists",
    "Forked",
    "InvalidValue",
    "LogicalDevice",
    "NotFound",
    "NotPermitted",
    "OutOfMemory",
    "Parked",
    "PhysicalDevice",
    "Pool",
    "QuotaExceeded",
    "SharedBlock",
    "Timeout",
    "connect",
    "default",
    "devices",
    "on_pressure",
    "pool",
    "trace",
    "weights",
]
