"""Snapshots of memory for PyTorch's memory viewer (pytorch.org/memory_viz, torch/cuda/_memory_viz.py): pickles of plain data,
as torch.cuda.memory._dump_snapshot() writes them. The blocks of a segment tile it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pickle
from typing import Any

BASE_ADDRESS = 1 << 44
MAX_ADDRESS = 1 << 53  # the viewer reads numbers as doubles
UNIT = 2 << 20  # of segments


def frames(name: str, file: str = "") -> list[dict[str, Any]]:
    """What the viewer shows as the place in the program that allocated."""
    return [{"filename": file, "line": 0, "name": name}] if name or file else []


def block(address: int, n_bytes: int, requested: int, is_active: bool, where: list[dict[str, Any]]) -> dict[str, Any]:
    state = "active_allocated" if is_active else "inactive"
    return {"size": n_bytes, "requested_size": requested, "address": address, "state": state, "frames": where}


def event(action: str, address: int, n_bytes: int, where: list[dict[str, Any]]) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": n_bytes, "stream": 0, "frames": where}


def segment(
    address: int, n_bytes: int, blocks: list[dict[str, Any]], device: int = 0, where: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """blocks: by address. Between them it is free."""
    tiles, at = [], address
    for b in blocks:
        if at < b["address"]:
            tiles.append(block(at, b["address"] - at, 0, False, []))
        tiles.append(b)
        at = b["address"] + b["size"]
    if at < address + n_bytes:
        tiles.append(block(at, address + n_bytes - at, 0, False, []))
    of = {"device": device, "address": address, "total_size": n_bytes, "stream": 0}
    return {**of, "frames": where or [], "blocks": tiles}


def dump(segments: list[dict[str, Any]], traces: list[list[dict[str, Any]]]) -> bytes:
    """traces: one for each device."""
    return pickle.dumps({"segments": segments, "device_traces": traces}, protocol=4)
