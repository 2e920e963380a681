"""A virtual device with 1 GiB whose memory grows on demand: what TensorFlow calls a logical device with a memory_limit,
and allow_growth.

In bfcd a virtual device is a partition. The operator writes it; bfcd.yaml beside this file has two of 1 GiB:

    devices:
      - id: host
        size: 2GiB
        partitions:
          - {name: virtual-0, limit: 1GiB, growth: on-demand}
          - {name: virtual-1, limit: 1GiB, growth: on-demand}

    python3 virtual_device.py

SPDX-License-Identifier: Apache-2.0
"""

import sys

import bfcd

MIB = 1 << 20
GIB = 1 << 30


def show(client, when):
    usage = client.tenant_stats("virtual-0")
    print(
        f"{when:<28} in use {usage['bytes_in_use'] // MIB:>4} MiB, taken from the device "
        f"{usage['bytes_reserved'] // MIB:>4} MiB, limit {usage['bytes_limit'] // MIB:>5} MiB"
    )
    return usage["bytes_reserved"]


def main():
    try:
        client = bfcd.connect(partition="virtual-0")
    except bfcd.NotFound as e:
        sys.exit(f"{e}\nStart bfcd with the configuration bfcd.yaml, which is beside this program.")
    assert client.bytes_limit() == GIB

    # allow_growth: a client that connects takes nothing from the device. Each allocation takes what it needs.
    at_first = show(client, "connected")
    small = client.malloc(10 * MIB)
    with_small = show(client, "after a block of 10 MiB")
    large = client.malloc(100 * MIB)
    with_large = show(client, "after a block of 100 MiB")
    assert at_first < with_small < with_large <= GIB

    # The limit of 1 GiB is real, although the physical device has more memory.
    try:
        client.malloc(GIB)
    except bfcd.QuotaExceeded as e:
        print(f"refused: {e}")
    else:
        sys.exit("the device gave more than 1 GiB")

    # The other virtual device of the same physical device has a limit and statistics of its own.
    other = client.malloc(20 * MIB, partition="virtual-1")
    for block in (large, other):
        info = block.info()
        print(f"{block.nbytes // MIB:>4} MiB on virtual device '{info['partition']}' of device '{info['device']}'")
    assert client.bytes_in_use("virtual-1") == 20 * MIB

    # empty_cache() returns freed memory to the device at once; otherwise that happens when another job needs it.
    del small, large
    client.empty_cache()
    assert show(client, "freed") < with_large


if __name__ == "__main__":
    main()
