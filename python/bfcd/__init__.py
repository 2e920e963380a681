"""Memory from bfcd, the device memory broker.

    import bfcd
    client = bfcd.default()
    x = client.empty((1000, 1000), "float32")

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._arrays import DeviceArray
    from ._client import Block, Client, connect, default, devices, on_pressure, pool, trace
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
    from ._idle import idle
    from ._pool import Pool
    from ._shared import SharedBlock
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
    "idle",
    "on_pressure",
    "pool",
    "trace",
    "weights",
]

#: Where each name is. They are imported at their first use: bfcd.tools needs no library, and some need modules that take
#: long to import.
_LAZY = {
    "DeviceArray": "_arrays",
    **dict.fromkeys(("Block", "Client", "connect", "default", "devices", "on_pressure", "pool", "trace"), "_client"),
    **dict.fromkeys(("Devices", "LogicalDevice", "PhysicalDevice"), "_devices"),
    **dict.fromkeys(
        ("Busy", "DeviceLost", "Disconnected", "Error", "Exists", "Forked", "InvalidValue", "NotFound", "NotPermitted"),
        "_errors",
    ),
    **dict.fromkeys(("OutOfMemory", "Parked", "QuotaExceeded", "Timeout"), "_errors"),
    "Pool": "_pool",
    "SharedBlock": "_shared",
    "idle": "_idle",
    "weights": "_weights",
}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module 'bfcd' has no attribute '{name}'")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(f"bfcd.{_LAZY[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
