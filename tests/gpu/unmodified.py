#!/usr/bin/env python3
# What PyTorch, CuPy, JAX and TensorFlow see of the limit of `bfcctl run`, though they know nothing of bfcd.
# scripts/gpu-frameworks runs each in a process of its own.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: unmodified.py FRAMEWORK LIMIT     LIMIT: of bfcctl run, in bytes
#
# Prints one line, or why it is not as expected. Exit status: 77 where the framework is missing. With FAKE_RUNTIME, a
# fake CUDA runtime, kernels do nothing, and none is run.
import importlib.util
import os
import sys

MIB = 1 << 20
FAKE_RUNTIME = os.environ.get("FAKE_RUNTIME")


class Unexpected(Exception):
    pass


def check(condition, sentence):
    if not condition:
        raise Unexpected(sentence)


def mib(n):
    return f"{n / MIB:.0f} MiB"


def report(version, limit, allocated, refused):
    print(f"{version}: limit {mib(limit)}, allocated {mib(allocated)}, out of memory at {mib(refused)} more, "
          "and it goes on", flush=True)


def run_torch(limit):
    import torch

    def tensor(n_bytes):
        return torch.empty(n_bytes, dtype=torch.uint8, device="cuda")

    def free():
        return torch.cuda.mem_get_info()[0]

    total = torch.cuda.get_device_properties(0).total_memory
    check(total == limit and torch.cuda.mem_get_info()[1] == limit, f"it sees {mib(total)} and not {mib(limit)}")
    x, before = tensor(limit // 4), free()
    check(torch.cuda.memory_allocated() == limit // 4, f"{torch.cuda.memory_allocated()} bytes are allocated")
    check(before <= limit - limit // 4, f"{mib(before)} are free beside {mib(limit // 4)}")
    if not FAKE_RUNTIME:
        check(bool((x.fill_(3) == 3).all()), "the bytes are wrong")
    try:
        tensor(limit)
    except torch.OutOfMemoryError as e:
        check("total capacity" in str(e), str(e))
    else:
        raise Unexpected("more than the limit was granted")
    del x
    torch.cuda.empty_cache()
    check(free() > before, f"{mib(free())} are free after empty_cache(), and {mib(before)} were")
    tensor(limit // 2)
    report(f"torch {torch.__version__}", total, limit // 4, limit)


def run_cupy(limit):
    if FAKE_RUNTIME:
        import static_runtime

        static_runtime.redirect("cupy_backends.cuda.api.runtime", FAKE_RUNTIME)
    import cupy

    def array(n_bytes):
        return cupy.empty(n_bytes, dtype=cupy.uint8)

    def free():
        return cupy.cuda.runtime.memGetInfo()[0]

    pool = cupy.get_default_memory_pool()
    total = cupy.cuda.runtime.memGetInfo()[1]
    check(total == limit, f"it sees {mib(total)} and not {mib(limit)}")
    x, before = array(limit // 4), free()
    check(pool.used_bytes() == limit // 4, f"{pool.used_bytes()} bytes are used")
    check(before <= limit - limit // 4, f"{mib(before)} are free beside {mib(limit // 4)}")
    if not FAKE_RUNTIME:
        x.fill(3)
        check(bool((x == 3).all()), "the bytes are wrong")
    try:
        array(limit)
    except cupy.cuda.memory.OutOfMemoryError:
        pass
    else:
        raise Unexpected("more than the limit was granted")
    del x
    pool.free_all_blocks()
    check(free() > before, f"{mib(free())} are free after free_all_blocks(), and {mib(before)} were")
    array(limit // 2)
    report(f"cupy {cupy.__version__}", total, limit // 4, limit)


def run_jax(limit):
    if FAKE_RUNTIME:
        from jax._src import hardware_utils

        hardware_utils.has_visible_nvidia_gpu = lambda: True  # which looks for a device file
    os.environ.setdefault("JAX_PLATFORMS", "cuda")
    import jax
    import numpy

    def array(n_bytes):
        return jax.device_put(numpy.full(n_bytes, 3, numpy.uint8), gpu)

    gpu = jax.devices()[0]
    total = gpu.memory_stats()["bytes_limit"]
    check(limit // 2 < total <= limit, f"it takes {mib(total)} of {mib(limit)}")
    x = array(limit // 4)
    used = gpu.memory_stats()["bytes_in_use"]
    check(used >= limit // 4, f"{used} bytes are in use")
    check(numpy.asarray(x)[-1] == 3, "the copy is wrong")
    if not FAKE_RUNTIME:
        check(bool((x[:MIB] == 3).all()) and bool((x[-MIB:] == 3).all()), "the bytes are wrong")
    try:
        array(limit).block_until_ready()
    except Exception as e:
        check("RESOURCE_EXHAUSTED" in str(e), str(e))
    else:
        raise Unexpected("more than the limit was granted")
    del x
    array(limit // 4).block_until_ready()
    report(f"jax {jax.__version__}", total, limit // 4, limit)


def run_tensorflow(limit):
    import numpy
    import tensorflow

    def tensor(n_bytes):
        return tensorflow.constant(numpy.full(n_bytes // 4, 3, numpy.float32))

    def used():
        return tensorflow.config.experimental.get_memory_info("GPU:0")["current"]

    check(tensorflow.config.list_physical_devices("GPU"), "it finds no GPU")
    with tensorflow.device("/GPU:0"):
        x = tensor(limit // 4)
        check(used() >= limit // 4, f"{used()} bytes are used")
        check("GPU:0" in x.device and x.numpy()[-1] == 3, "the copy is wrong")
        if not FAKE_RUNTIME:
            check(float(tensorflow.reduce_max(x)) == 3, "the maximum is wrong")
        try:
            tensor(limit)
        except Exception as e:
            check("Dst tensor is not initialized" in str(e) or "OOM" in str(e), str(e))
        else:
            raise Unexpected("more than the limit was granted")
        del x
        tensor(limit // 4)
    report(f"tensorflow {tensorflow.__version__}", limit, limit // 4, limit)


def main():
    framework, limit = sys.argv[1], int(sys.argv[2])
    if not importlib.util.find_spec(framework):
        print(f"{framework} is not installed for {sys.executable}")
        sys.exit(77)
    if framework == "jax" and not importlib.util.find_spec("jax_plugins"):
        print(f"jax is installed for {sys.executable} without its part for GPUs, such as jax-cuda12-plugin")
        sys.exit(77)
    try:
        globals()["run_" + framework](limit)
    except Unexpected as e:
        print(e)
        sys.exit(1)


main()
