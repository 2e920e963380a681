# Small programs of the driver API and of the runtime, of HAMi-core (github.com/Project-HAMi/HAMi-core, folder test): alone
# on the fake driver, under `bfcctl run` and with --strict. BFC_HAMI names the folder with their sources; nothing of them is
# here. Prints what each takes of the device at most, and what of it bfcd counts. scripts/test-frameworks --engines runs it.
#
# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import subprocess

import pytest
from conftest import MIB
from test_engines import LIMIT_S, environment, machine, mib_after, peak_mib

LEASE_MIB = 3072
CONTEXT_MIB = 96
PROGRAMS = [
    "test_alloc",
    "test_alloc_host",
    "test_alloc_managed",
    "test_alloc_pitch",
    "test_create_3d_array",
    "test_create_array",
    "test_host_alloc",
    "test_host_register",
    "test_mem_create",
    "test_runtime_alloc",
    "test_runtime_alloc_host",
    "test_runtime_alloc_managed",
    "test_runtime_host_alloc",
    "test_runtime_host_register",
]

# What they use of NVML's header.
NVML_H = """
#include <stdint.h>
#include <stdlib.h>
typedef int nvmlReturn_t;
typedef void *nvmlDevice_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
#define NVML_SUCCESS 0
#define nvmlInit nvmlInit_v2
#define nvmlDeviceGetHandleByIndex nvmlDeviceGetHandleByIndex_v2
nvmlReturn_t nvmlInit(void), nvmlShutdown(void);
nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device);
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory);
"""


@pytest.fixture
def daemon(monkeypatch):
    # A GPU's contexts take memory, the keeper's too, and NVML tells how much.
    settings = {"FAKE_CUDA_CONTEXT_BYTES": f"{CONTEXT_MIB}MiB", "FAKE_CUDA_PEAK": "1", "FAKE_NVML": "driver"}
    yield from machine(monkeypatch, quota=f"{LEASE_MIB}MiB", **settings)


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    if not os.environ.get("BFC_HAMI"):
        pytest.skip("BFC_HAMI names no folder with HAMi-core's test programs")
    source, folder = pathlib.Path(os.environ["BFC_HAMI"]), tmp_path_factory.mktemp("programs")
    (folder / "include").mkdir()
    (folder / "include/nvml_prefix.h").write_text("")
    (folder / "nvml.h").write_text(NVML_H)
    driver, stubs, nvml = os.environ["LD_LIBRARY_PATH"].split(":")
    libraries = [os.environ["BFC_FAKE_RUNTIME"].split(":")[0], f"{driver}/libcuda.so.1", f"{nvml}/libnvidia-ml.so.1"]
    for name in PROGRAMS:
        includes = [f"-I{folder}", f"-I{source}", "-isystem", os.environ["BFC_CUDA_INCLUDE"]]
        command = ["cc", "-w", "-O1", *includes, str(source / f"{name}.c"), "-o", str(folder / name), *libraries]
        subprocess.run(command + ["-lpthread"], check=True, timeout=LIMIT_S)
    return folder


def run(daemon, program, mode):
    command = [os.environ["BFCCTL"], "--socket", str(daemon.folder / "admin.sock"), "run", "--tenant", "me"]
    command += ["--partition", "train", "--limit", f"{LEASE_MIB}MiB", *(["--strict"] if mode == "strict" else []), "--"]
    runtime = os.environ["BFC_FAKE_RUNTIME"].split(":")[0]
    return subprocess.run(
        (command if mode != "alone" else []) + ["env", f"LD_PRELOAD={runtime}", str(program)],
        env=environment(daemon),
        text=True,
        capture_output=True,
        errors="replace",
        timeout=LIMIT_S,
    )


@pytest.mark.parametrize("mode", ["alone", "normal", "strict"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(daemon, programs, name, mode):
    (daemon.state / "peak-0").write_text("")
    before = sum(int(p.name.split("-")[3]) for p in daemon.state.glob("mem-*")) / MIB
    r = run(daemon, programs / name, mode)
    used = peak_mib(daemon) - before
    counted, outside = mib_after("peak", r.stderr), mib_after("had up to", r.stderr)
    figures = f"{name}, {mode}: {used:.0f} MiB at the device"
    if mode != "alone":
        figures += f", {counted:.0f} charged at most and {outside:.0f} outside of bfcd"
    print(f"{figures}; status {r.returncode}")
    assert r.returncode == 0, r.stdout[-2000:] + r.stderr[-2000:]
    if mode != "alone":
        assert used <= counted + outside, figures
        assert (outside == 0) == (mode == "strict" or "managed" not in name), figures
