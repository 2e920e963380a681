# RMM's cuda_async_memory_resource, of the last version that is in headers (its library links NVIDIA's runtime statically),
# above the fake runtime: a pool of its own memory, and one whose memory can be shared. scripts/test-frameworks --engines
# runs it.
#
# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import subprocess

import pytest
from test_engines import LEASE_MIB, LIMIT_S, device_mib, environment, machine, mib_after, peak_mib

SOURCE = r"""
#include <cstdio>
#include <cstring>
#include <vector>

#include <rmm/mr/device/cuda_async_memory_resource.hpp>

/* Allocates until it is refused, frees three, and again. */
int main(int, char **argv)
{
        using resource = rmm::mr::cuda_async_memory_resource;
        using type = resource::allocation_handle_type;
        constexpr std::size_t mib = 1 << 20, n_each = 21 * mib;
        resource r{64 * mib, {}, std::strcmp(argv[1], "shared") ? type::none : type::posix_file_descriptor};
        std::vector<void *> kept;

        for (int i = 0; i < 2; i++) {
                try {
                        while (kept.size() < 1000)
                                kept.push_back(r.allocate(n_each));
                } catch (rmm::out_of_memory const &) {
                        std::printf("%zu\n", kept.size() * 21);
                }
                for (int n = i == 0 ? 3 : 1000; n > 0 && !kept.empty(); n--) {
                        r.deallocate(kept.back(), n_each);
                        kept.pop_back();
                }
        }
}
"""


@pytest.fixture
def daemon(monkeypatch):
    # The GPU has pools, which give fds.
    yield from machine(monkeypatch, FAKE_CUDA_PEAK="1", FAKE_CUDA_ATTRIBUTES="115=1,119=1")


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rmm")
    (folder / "rmm.cpp").write_text(SOURCE)
    cuda = pathlib.Path(os.environ["BFC_CUDA_INCLUDE"])
    rmm = cuda.parent.parent.parent / "librmm" / "include"
    includes = [rmm / "rapids", rmm / "rapids/libcudacxx", rmm, cuda]
    driver = os.environ["LD_LIBRARY_PATH"].split(":")[0]
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-w", "-DLIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE"]
        + [f"-isystem{i}" for i in includes]
        + [str(folder / "rmm.cpp"), "-o", str(folder / "rmm"), os.environ["BFC_FAKE_RUNTIME"].split(":")[0]]
        + [f"{driver}/libcuda.so.1"],
        check=True,
        timeout=LIMIT_S,
    )
    return folder / "rmm"


@pytest.mark.parametrize("is_strict", [False, True], ids=["normal", "strict"])
@pytest.mark.parametrize("kind", ["own", "shared"])
def test_pool_of_rmm(daemon, program, kind, is_strict):
    command = [os.environ["BFCCTL"], "--socket", str(daemon.folder / "admin.sock"), "run", "--tenant", "me"]
    command += ["--partition", "train", "--limit", f"{LEASE_MIB}MiB", *(["--strict"] if is_strict else []), "--"]
    runtime = os.environ["BFC_FAKE_RUNTIME"].split(":")[0]
    r = subprocess.run(
        command + ["env", f"LD_PRELOAD={runtime}", str(program), kind],
        env=environment(daemon),
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    figures = f"{r.stdout.split()} MiB in a lease of {LEASE_MIB} MiB, at most {peak_mib(daemon):.0f} at the device"
    print(f"{figures}; {r.stderr.splitlines()[-1]}")
    assert r.returncode == 0 and "outside of bfcd" not in r.stderr, r.stderr
    got = [int(n) for n in r.stdout.split()]
    # A pool that can be shared is the driver's own, and grows by 32 MiB for each of these.
    assert len(got) == 2 and got[0] == got[1] and LEASE_MIB * (1 if kind == "own" else 21 / 32) - 96 <= got[0], figures
    assert LEASE_MIB - 96 <= peak_mib(daemon) <= min(LEASE_MIB, mib_after("peak", r.stderr)), figures
    assert device_mib(daemon.state) == 0
