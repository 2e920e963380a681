#!/usr/bin/env python3
# Stands in for the CUDA libraries that PyTorch links and the tests never call (cuBLAS, cuDNN, NCCL, ...: 2 GB of
# wheels), so that only PyTorch itself has to be installed.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: stubs.py FOLDER-OF-TORCH-LIBRARIES OUTPUT-FOLDER [FOLDER-OF-OTHER-LIBRARIES]...
#
# The output has an empty library for each soname, for LD_LIBRARY_PATH, and libstubs.so with all functions, for
# LD_PRELOAD: PyTorch asks for versions of the symbols, which the dynamic linker takes without a version from a library
# that has another name. A function that is called ends the process and says its name.
import pathlib
import re
import subprocess
import sys

SONAME = re.compile(r"lib(cublas|cudnn|cufft|cufile|cupti|curand|cusolver|cusparse|nccl|nvJitLink|nvrtc|nvToolsExt|nvshmem)")
FUNCTION = re.compile(r"(cuTensorMap|cublas|cudnn|cufft|cuFile|cupti|curand|cusolver|cusparse|p?nccl|nvJitLink|nvrtc|nvtx|nvshmem|nvshmemx|nvshmemid)[A-Z_]\w*$")


def output_of(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def compile_library(path, source):
    command = ["cc", "-shared", "-fPIC", "-O1", "-w", "-x", "c", "-", "-o", str(path), f"-Wl,-soname,{path.name}"]
    subprocess.run(command, input=source, check=True, text=True)


def main():
    libraries, out, *others = map(pathlib.Path, sys.argv[1:])
    sonames, wanted, defined = set(), set(), set()
    for path in [path for folder in (libraries, *others) for path in folder.glob("*.so*")]:
        sonames |= set(re.findall(r"\(NEEDED\).*\[(.*)\]", output_of("readelf", "-d", str(path))))
        for line in output_of("nm", "-D", str(path)).splitlines():
            *_, kind, name = line.split()
            (wanted if kind in "Uw" else defined).add(name.partition("@")[0])
    sonames = sorted(s for s in sonames if SONAME.match(s) and not (libraries / s).exists())
    functions = sorted(f for f in wanted - defined if FUNCTION.match(f))
    if not sonames or not functions:
        sys.exit(f"{libraries} has no libraries that need CUDA's")
    out.mkdir(parents=True, exist_ok=True)
    for soname in sonames:
        compile_library(out / soname, "")
    source = """
#include <stdio.h>
#include <stdlib.h>
static void stub_called(const char *name)
{
        fprintf(stderr, "a test called %s, which only a stub stands for\\n", name);
        abort();
}
"""
    source += "".join(f'void {f}(void) {{ stub_called("{f}"); }}\n' for f in functions)
    compile_library(out / "libstubs.so", source)
    print(f"{len(functions)} functions of {', '.join(sonames)}")


main()
