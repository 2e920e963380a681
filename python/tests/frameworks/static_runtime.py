# The fake CUDA runtime in place of one that is linked statically into an extension module, as CuPy's is. NVIDIA's
# runtime needs tables of the driver that are not documented, so it does not start on the fake driver. LD_PRELOAD does
# not reach it. The module itself is not changed: when it is loaded, each function of its runtime that the fake one has
# becomes a jump to that one, in this process.
#
# SPDX-License-Identifier: Apache-2.0
import ctypes
import importlib.util
import mmap
import subprocess

PAGE = mmap.PAGESIZE
PROT_ALL = 7


def functions_of(path):
    """The local functions of a library by name, with their offsets from its base."""
    lines = subprocess.run(["nm", path], check=True, capture_output=True, text=True).stdout.splitlines()
    symbols = (line.split() for line in lines)
    return {s[2]: int(s[0], 16) for s in symbols if len(s) == 3 and s[1] in "tT" and s[2].startswith("cuda")}


def base_of(path):
    with open("/proc/self/maps") as maps:
        return next(int(line.split("-")[0], 16) for line in maps if line.rstrip().endswith(path))


def redirect(module, runtime):
    """module: the extension's name, not imported yet. runtime: the path of the fake runtime. Returns the names."""
    path = importlib.util.find_spec(module).origin
    ctypes.CDLL(path)
    base, fake = base_of(path), ctypes.CDLL(runtime)
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    names = []
    for name, offset in functions_of(path).items():
        if not hasattr(fake, name):
            continue
        target = ctypes.cast(getattr(fake, name), ctypes.c_void_p).value
        jump = b"\xff\x25\x00\x00\x00\x00" + target.to_bytes(8, "little")  # jmp *0(%rip)
        at = base + offset
        begin = at & -PAGE
        assert mprotect(begin, (at + len(jump) - begin + PAGE - 1) & -PAGE, PROT_ALL) == 0
        ctypes.memmove(at, jump, len(jump))
        names.append(name)
    return names
