# JAX takes arrays of bfcd by DLPack, without a copy.
#
# SPDX-License-Identifier: Apache-2.0
import pytest
from conftest import host_only

pytest.importorskip("jax")


@host_only
def test_jax_imports_a_host_array_without_a_copy(daemon):
    r = daemon.run(
        """
import gc, bfcd, jax
client = bfcd.default()
x = client.empty((100, 200), "float32")
x[:] = 3
y = jax.dlpack.from_dlpack(x)
assert y.unsafe_buffer_pointer() == x.ctypes.data
del x
gc.collect()
assert client.bytes_in_use() == 80128
assert float(y.sum()) == 60000
del y
gc.collect()
assert client.bytes_in_use() == 0
""",
        JAX_PLATFORMS="cpu",
    )
    assert r.returncode == 0, r.stdout + r.stderr
