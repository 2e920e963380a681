#!/usr/bin/env python3
# The proxies of libcuda.so.1 and libnvidia-ml.so.1 export each function of the libraries that there are: of the fake one,
# of the toolkit's stub and of the toolkit's headers. Prints TAP.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: check-exports.py cuda|nvml PROXY FAKE [FOLDER]     FOLDER: of a CUDA toolkit; it may be missing
import os
import re
import subprocess
import sys

HEADERS = {"cuda": ("cuda.h", "cudaEGL.h", "cudaGL.h", "cudaProfiler.h", "cudaVDPAU.h"), "nvml": ("nvml.h",)}
STUBS = {"cuda": "libcuda.so", "nvml": "libnvidia-ml.so"}
PREFIXES = {"cuda": "cu", "nvml": "nvml"}
OWN = {"cuda": {"bfc_preload_driver", "bfc_preload_mem_info"}, "nvml": {"bfc_preload_nvml"}}
NOT_ON_LINUX = {"cuWGLGetDevice"}
# Inline functions of the header, and names that only its text has.
INLINE = {"cuGetProcAddress_v2_ptsz"}


def exports(library):
    out = subprocess.run(["nm", "-D", "--defined-only", library], check=True, stdout=subprocess.PIPE, text=True).stdout
    return {line.split()[-1].split("@")[0] for line in out.splitlines()}


def declared(path):
    with open(path, encoding="utf-8") as f:
        text = f.read()
    names = set(re.findall(r"CUDAAPI\s+(cu[A-Z]\w+)\s*\(", text))
    names |= set(re.findall(r"#\s*define\s+cu[A-Z]\w+\s+(cu[A-Z]\w+_v\d)\b", text))
    for suffix in ("ptds", "ptsz"):
        names |= {f"{name}_{suffix}"
                  for name in re.findall(rf"__CUDA_API_{suffix.upper()}\(\s*(cu\w+)\s*\)", text)}
    names |= set(re.findall(r"DECLDIR\s+(?:char\s*\*\s*)?(nvml[A-Z]\w+)\s*\(", text))
    return names - NOT_ON_LINUX - INLINE


def main():
    kind, proxy, fake, *toolkit = sys.argv[1:]
    own = exports(proxy)
    sources = {"the fake library": {n for n in exports(fake) if n.startswith(PREFIXES[kind])}}
    if toolkit:
        stub = os.path.join(toolkit[0], "lib64/stubs", STUBS[kind])
        if os.path.exists(stub):
            sources["the toolkit's stub"] = exports(stub)
        names = set()
        for header in HEADERS[kind]:
            path = os.path.join(toolkit[0], "include", header)
            if os.path.exists(path):
                names |= declared(path)
        if names:
            sources["the toolkit's headers"] = names
    print(f"1..{len(sources) + 1}")
    failed = False
    for number, (source, names) in enumerate(sources.items(), 1):
        missing = sorted(names - own)
        failed |= bool(missing)
        print(f"{'not ok' if missing else 'ok'} {number} - {len(names)} names of {source}")
        for name in missing:
            print(f"# not exported: {name}")
    foreign = sorted(n for n in own if not n.startswith(PREFIXES[kind]) and n not in OWN[kind])
    failed |= bool(foreign)
    print(f"{'not ok' if foreign else 'ok'} {len(sources) + 1} - no other names {foreign or ''}")
    sys.exit(failed)


main()
