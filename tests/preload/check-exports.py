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
OWN = {"cuda": {"bfc_preload_charge_context", "bfc_preload_driver", "bfc_preload_mem_info", "bfc_preload_version", "bfc_idle_begin", "bfc_idle_end"}, "nvml": {"bfc_preload_nvml"}}
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


def listed(name, pattern):
    with open(os.path.join(os.path.dirname(__file__), "../../integrations/preload", name), encoding="utf-8") as f:
        return re.findall(pattern, f.read())


# The function that a name without its variant stands for, and the variant's number.
def variant(symbol):
    match = re.fullmatch(r"(\w+?)(?:_v(\d+))?(?:_ptds|_ptsz)?", symbol)
    return match[1], int(match[2] or 1)


# The proxy answers cuGetProcAddress() with the newest variant that own.h has. So of a function in own.h, only variants
# before the first one there may be in names.h: those of CUDA before 3.2.
def missing_variants():
    first = {}
    for symbol in listed("own.h", r"OWN\((cu\w+),"):
        base, number = variant(symbol)
        first[base] = min(number, first.get(base, number))
    forwarded = listed("names.h", r"FORWARD\((cu\w+)\)")
    return [name for name in forwarded if variant(name)[1] >= first.get(variant(name)[0], sys.maxsize)]


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
    checks = [(f"{len(names)} names of {source}", names - own) for source, names in sources.items()]
    foreign = {n for n in own if not n.startswith(PREFIXES[kind]) and n not in OWN[kind]}
    checks.append(("no other names", foreign))
    if kind == "cuda":
        checks.append(("all variants of the proxy's functions", missing_variants()))
    print(f"1..{len(checks)}")
    for number, (what, wrong) in enumerate(checks, 1):
        print(f"{'not ok' if wrong else 'ok'} {number} - {what}")
        for name in sorted(wrong):
            print(f"# {name}")
    sys.exit(any(wrong for what, wrong in checks))


main()
