# Logical and physical devices.
#
# SPDX-License-Identifier: Apache-2.0
import bfcd
from conftest import DEVICE, MIB, gpu_only, on_gpus_too


def test_partitions_are_logical_devices(client):
    block = client.malloc(3 * MIB)
    devices = client.devices()
    train, infer, *parking = devices.logical
    assert (train.name, infer.name) == ("train", "infer")
    assert train.bytes_limit == client.bytes_limit() == 64 * MIB
    assert infer.bytes_limit == 128 * MIB
    assert train.bytes_in_use == client.tenant_stats()["bytes_in_use"] >= 3 * MIB
    assert train.bytes_reserved >= train.bytes_in_use and infer.bytes_in_use == 0
    assert train.physical == infer.physical
    assert devices.physical == [train.physical, *(d.physical for d in parking)]
    assert train.physical.uuid == block.info()["device_uuid"]


@on_gpus_too
def test_a_device_has_a_kind(client):
    device = client.devices().physical[0]
    if DEVICE == "host":
        assert device == bfcd.PhysicalDevice("host", "host", "host", None)
    else:
        assert device.kind == "cuda" and device.name == "cuda:0" and device.ordinal == 0
        assert device.uuid.startswith("GPU-")


@gpu_only
def test_a_gpu_that_is_not_visible_has_no_number(daemon):
    r = daemon.run("import bfcd\nprint(bfcd.devices().physical)", CUDA_VISIBLE_DEVICES="")
    assert r.returncode == 0, r.stderr
    assert "ordinal=None" in r.stdout and "GPU-" in r.stdout
