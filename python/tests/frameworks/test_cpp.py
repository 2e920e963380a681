# bfcclient.hpp on GPUs: programs with the real headers of CCCL and RMM, compiled with sanitizers, on the fake driver and
# runtime. BFC_CPP names the folder of the headers, BFC_FAKE_RUNTIME the runtime: scripts/test-frameworks --smoke. The part
# for host memory is in tests/integration/test_examples.c.
#
# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import shutil
import subprocess

import pytest
from conftest import about_gpus

COMPILE_LIMIT_S = 1200  # for what takes 4 s on an idle machine
ROOT = pathlib.Path(__file__).resolve().parents[3]
PROGRAMS = ROOT / "python/tests/frameworks/cpp"
HEADERS = pathlib.Path(os.environ.get("BFC_CPP", "/nonexistent"))
CUDA = HEADERS / "cpp/nvidia/cu13/include"
RMM, LOGGER, OLD_RMM = HEADERS / "cpp/librmm", HEADERS / "cpp/rapids_logger", HEADERS / "rmm-25/librmm"
CCCL = [CUDA / "cccl", CUDA]
# RMM has the CCCL that it was built with.
WITH_RMM = [RMM / "include/rapids", RMM / "include", LOGGER / "include", CUDA]
WITH_OLD_RMM = [OLD_RMM / "include" / i for i in ("rapids", "rapids/libcudacxx", ".")] + [CUDA]
RMM_LIBRARIES = [RMM / "lib64/librmm.so", LOGGER / "lib64/librapids_logger.so"]
# RMM's logger is not in headers.
OLD_RMM_OPTIONS = ["-DLIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE", "-DRMM_LOG_ACTIVE_LEVEL=RMM_LOG_LEVEL_OFF"]

pytestmark = [
    about_gpus,
    pytest.mark.skipif(not HEADERS.is_dir(), reason="BFC_CPP names no folder with the headers of CUDA, CCCL and RMM"),
]


def compile_program(out, compiler, standard, source, includes, *more):
    if not shutil.which(compiler):
        pytest.skip(f"there is no {compiler}")
    driver = os.environ["LD_LIBRARY_PATH"].split(":")[0]
    libraries = [os.environ["BFC_LIBRARY"], os.environ["BFC_FAKE_RUNTIME"], f"{driver}/libcuda.so.1"]
    libraries += RMM_LIBRARIES if includes is WITH_RMM else []
    subprocess.run(
        [compiler, f"-std={standard}", "-g", "-pthread", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"]
        + ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{ROOT}/include"]
        + [f"-isystem{i}" for i in includes]
        + [*more, str(source), "-o", str(out), *map(str, libraries)]
        + [f"-Wl,-rpath,{pathlib.Path(path).parent}" for path in libraries],
        check=True,
        timeout=COMPILE_LIMIT_S,
    )


def run(daemon, program):
    """Its standard output."""
    r = subprocess.run([program], env=daemon.environment(), text=True, capture_output=True, timeout=COMPILE_LIMIT_S)
    assert r.returncode == 0, r.stdout + r.stderr
    return r.stdout


@pytest.mark.parametrize("standard", ["c++17", "c++20"])
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_the_resource_has_the_concepts_of_cccl(daemon, tmp_path, compiler, standard):
    compile_program(tmp_path / "device", compiler, standard, PROGRAMS / "device.cpp", CCCL)
    assert run(daemon, tmp_path / "device") == "done\n"


def test_the_example_with_cccl(daemon, tmp_path):
    compile_program(tmp_path / "example", "g++", "c++17", ROOT / "examples/cuda_resource.cpp", CCCL)
    assert run(daemon, tmp_path / "example") == "copied 4000 bytes\n"


def test_the_pool_of_rmm(daemon, tmp_path):
    compile_program(tmp_path / "pool", "g++", "c++17", PROGRAMS / "rmm_pool.cpp", WITH_OLD_RMM, *OLD_RMM_OPTIONS)
    assert run(daemon, tmp_path / "pool") == "done\n"


def test_resources_of_the_current_rmm(daemon, tmp_path):
    compile_program(tmp_path / "adaptors", "g++", "c++20", PROGRAMS / "rmm_adaptors.cpp", WITH_RMM)
    assert run(daemon, tmp_path / "adaptors") == "done\n"


def test_the_example_with_rmm_compiles(tmp_path):
    """And links. Its pool is in RMM's library, with NVIDIA's runtime, which does not start on the fake driver."""
    compile_program(tmp_path / "example", "g++", "c++20", ROOT / "examples/rmm_pool.cpp", WITH_RMM)


@pytest.mark.parametrize("options", [["-DBFC_NO_CUDA", *OLD_RMM_OPTIONS], []], ids=["not wanted", "no experiment"])
def test_headers_of_cuda_that_are_not_used(tmp_path, options):
    (tmp_path / "program.cpp").write_text("#include <bfcclient.hpp>\n#ifdef BFC_HAS_CUDA\n#error\n#endif\nint main() {}\n")
    compile_program(tmp_path / "program", "g++", "c++17", tmp_path / "program.cpp", WITH_OLD_RMM, *options)
