"""CuPy arrays in bfcd's memory: allocation, and copies in all directions.

    python3 cupy_arrays.py              # needs a GPU partition and CuPy: pip install cupy-cuda12x

In a host partition the same program runs with NumPy, whose arrays have the same methods. Without the package it ends
with status 77.

SPDX-License-Identifier: Apache-2.0
"""

import sys

import bfcd

N = 1 << 20  # elements of 4 bytes


def array_module(client):
    """CuPy where the client's memory is on a GPU, NumPy where it is on the host."""
    on_gpu = client.malloc(1).device_ordinal is not None
    name = "cupy" if on_gpu else "numpy"
    try:
        module = __import__(name)
        if on_gpu:
            module.cuda.runtime.getDeviceCount()
    except Exception as e:  # CuPy raises errors of its own where it finds no CUDA
        print(f"this needs {name}, which does not work here: {e}", file=sys.stderr)
        sys.exit(77)
    return module


def main():
    client = bfcd.default()
    xp = array_module(client)
    import numpy  # CuPy depends on it

    # asarray() takes the memory of empty() without a copy: the array is in bfcd's memory and keeps it.
    x = xp.asarray(client.empty(N, "float32"))
    y = xp.asarray(client.empty(N, "float32"))
    print(f"two arrays of {x.nbytes} bytes with {xp.__name__}: {client.bytes_in_use()} bytes in use")
    assert client.bytes_in_use() == x.nbytes + y.nbytes

    on_host = numpy.arange(N, dtype="float32")
    if xp is numpy:
        x[:] = on_host
        y[:] = x
        back = y.copy()
    else:
        x.set(on_host)  # host to device
        xp.copyto(y, x)  # device to device
        back = y.get()  # device to host
    assert numpy.array_equal(on_host, back)
    print("copied from the host, on the device, and back: equal")

    # A view keeps the memory of the whole array.
    half = x[: N // 2]
    del x, y
    assert client.bytes_in_use() == N * 4
    del half
    assert client.bytes_in_use() == 0
    print(f"freed: {client.bytes_in_use()} bytes in use, {client.max_bytes_in_use()} at the peak")


if __name__ == "__main__":
    main()
