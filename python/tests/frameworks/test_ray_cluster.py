# Real Ray places actors on two nodes, each a raylet on this machine with a bfcd of its own. scripts/test-frameworks runs it.
# BFC_TEST_LONG: more kills.
#
# SPDX-License-Identifier: Apache-2.0
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest
from conftest import MIB, Daemon, host_only, wait_for

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402
from ray.util.placement_group import placement_group, remove_placement_group  # noqa: E402
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: E402

import bfcd  # noqa: E402
import bfcd.ray  # noqa: E402

pytestmark = host_only
NODE_MIB, ACTOR_MIB = 2048, 256
N_ROUNDS = 25 if os.environ.get("BFC_TEST_LONG") else 2  # of four kills, or of one raylet
CALL_S = 300  # of what takes a second on an idle machine


class Machine(Daemon):
    """The bfcd of a node."""

    devices = f"- {{id: host, size: {NODE_MIB + 256}MiB, partitions: [{{name: train, limit: {NODE_MIB}MiB}}, {{name: infer, limit: 256MiB}}]}}"
    quotas = "[{partition: train}, {partition: infer}]"

    def start(self):
        sockets = self.config.read_text().partition("devices:")[0]
        tenant = f"{{name: me, match: {{uid: [{os.getuid()}]}}, leases: self, quotas: {self.quotas}}}"
        self.config.write_text(f"{sockets}devices:\n  {self.devices}\ntenants:\n  - {tenant}\n")
        super().start()

    def bfcctl(self, *words):
        command = [os.environ["BFCCTL"], "--socket", self.folder / "admin.sock", "--json", *words]
        return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)

    def leases(self):
        return self.bfcctl("lease", "list")["leases"]

    def used(self):
        """What jobs have: leases, sessions but bfcctl's, and memory."""
        sessions = [s for s in self.bfcctl("sessions")["sessions"] if s["name"] != "bfcctl"]
        return self.leases(), sessions, sum(t["bytes_reserved"] for t in self.bfcctl("tenants")["tenants"])

    def wait_for_nothing(self):
        wait_for(lambda: self.used() == ([], [], 0), "end of all leases and memory")

    def variables(self):
        return {"BFC_SOCKET": str(self.socket)}

    def join(self, cluster, **options):
        """Starts its raylet as docs/ray.md says: with what is printed on the node."""
        command = [sys.executable, "-m", "bfcd.ray", "resources"]
        printed = subprocess.run(command, env=os.environ | self.variables(), check=True, capture_output=True).stdout
        return cluster.add_node(env_vars=self.variables(), resources=json.loads(printed), num_cpus=16, **options)


class GpuMachine(Machine):
    """A node with two GPUs, on the fake driver."""

    devices = """- {id: 'cuda:0', headroom: 0, partitions: [{name: first, limit: 256MiB}]}
  - {id: 'cuda:1', headroom: 0, partitions: [{name: second, limit: 256MiB}]}"""
    quotas = "[{partition: first}, {partition: second}]"

    def variables(self):
        return super().variables() | {name: os.environ[name] for name in ("FAKE_CUDA_STATE", "FAKE_CUDA_DEVICES")}


@pytest.fixture(scope="module")
def machines():
    """Two, which are nodes of a Ray cluster. The driver is on the first."""
    with pytest.MonkeyPatch.context() as patch:
        folders = [pathlib.Path(sys.executable).parent, pathlib.Path(os.environ["BFCCTL"]).parent]
        patch.setenv("PATH", os.pathsep.join([*map(str, folders), os.environ["PATH"]]))
        patch.setenv("PYTHONPATH", str(pathlib.Path(bfcd.__file__).parents[1]))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("LD_PRELOAD", raising=False)
        both = [Machine(), Machine()]
        patch.setenv("BFC_SOCKET", str(both[0].socket))
        cluster = Cluster()
        for machine in both:
            machine.node = machine.join(cluster, **({"include_dashboard": False} if machine is both[0] else {}))
        ray.init(address=cluster.address, log_to_driver=False)
        both[0].cluster = cluster
        yield both
        ray.shutdown()
        cluster.shutdown()
        for machine in both:
            machine.stop()


@pytest.fixture
def nodes(machines):
    yield machines
    for machine in machines:
        machine.wait_for_nothing()


@ray.remote
class Actor:
    def __init__(self):
        self.blocks = []

    def take(self, n_mib=8, partition=None):
        self.blocks.append(bfcd.default().malloc(n_mib << 20, partition=partition))
        return self.blocks[-1].ptr

    def limits(self):
        return {d.name: d.bytes_limit // MIB for d in bfcd.default().devices().logical}

    def devices(self):
        return {d.name: (d.physical.uuid, d.physical.ordinal) for d in bfcd.default().devices().logical}

    def where(self):
        return os.environ["BFC_SOCKET"], os.getpid()

    def variable(self, name):
        return os.environ.get(name)


def options(size=f"{ACTOR_MIB}MiB", partition="train", **others):
    return {"num_cpus": 0} | bfcd.ray.options(size, partition, **others)


def get(result):
    return ray.get(result, timeout=CALL_S)


def kill(*actors):
    for actor in actors:
        ray.kill(actor)


def test_actors_fill_both_nodes_and_the_next_waits_in_rays_queue(nodes):
    actors = [Actor.options(**options()).remote() for _ in range(2 * NODE_MIB // ACTOR_MIB)]
    sockets = [socket for socket, _ in get([a.where.remote() for a in actors])]
    assert [sockets.count(str(m.socket)) for m in nodes] == [8, 8]
    get([a.take.remote() for a in actors])
    next_one = Actor.options(**options()).remote()
    place = next_one.where.remote()
    assert ray.wait([place], timeout=3)[0] == []
    for m in nodes:
        assert len(m.leases()) == 8 and m.bfcctl("waiting")["waiting"] == []

    with pytest.raises(bfcd.QuotaExceeded, match="lease 'u.*ray-.*more than its limit in 'train'"):
        get(actors[3].take.remote(ACTOR_MIB + 2))
    assert sum(lease["num_refusals"] for m in nodes for lease in m.leases()) == 1
    get([a.take.remote() for a in actors])

    kill(actors[5])
    assert get(place)[0] == sockets[5]
    kill(next_one, *(a for a in actors if a is not actors[5]))


def test_a_lease_is_named_after_the_job_and_has_the_limit_that_ray_counts(nodes):
    actor = Actor.options(**options(100 * MIB + 1, lease="trainer")).remote()
    socket, pid = get(actor.where.remote())
    (lease,) = [lease for m in nodes for lease in m.leases()]
    job = ray.get_runtime_context().get_job_id()
    parent = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    assert lease["name"] == f"u{os.getuid()}:ray-{job}-trainer-{parent}" and lease["bytes_limit"] == 102 * MIB
    wait_for(lambda: ray.available_resources()["bfcd_train"] == 2 * NODE_MIB - 102, "count of the actor's memory")
    kill(actor)


def test_kills_leave_nothing(nodes):
    for i in range(N_ROUNDS):
        actors = [Actor.options(**options()).remote() for _ in range(4)]
        places = get([a.where.remote() for a in actors])
        get([a.take.remote() for a in actors])
        for k, (actor, (_, pid)) in enumerate(zip(actors, places)):
            if (i + k) % 2:
                os.kill(pid, signal.SIGKILL)
            else:
                ray.kill(actor)
        for m in nodes:
            m.wait_for_nothing()


def test_an_actor_that_ray_restarts_has_a_new_lease(nodes):
    actor = Actor.options(**options(), max_restarts=1, max_task_retries=1).remote()
    _, pid = get(actor.where.remote())
    get(actor.take.remote(200))  # more than half: the old one must not count any more
    os.kill(pid, signal.SIGKILL)
    get(actor.take.remote(200))
    assert get(actor.where.remote())[1] != pid
    wait_for(lambda: sum(len(m.leases()) for m in nodes) == 1, "end of the first lease")
    kill(actor)


def test_the_end_of_a_raylet_leaves_nothing(machines):
    first, second = machines
    for _ in range(N_ROUNDS):
        actors = [Actor.options(**options()).remote() for _ in range(4)]
        get([a.take.remote() for a in actors])
        wait_for(lambda: sum(len(m.leases()) for m in machines) == 4, "leases of the actors")
        second.node.kill_raylet()
        second.wait_for_nothing()
        first.cluster.remove_node(second.node, allow_graceful=False)
        kill(*actors)
        first.wait_for_nothing()
        second.node = second.join(first.cluster)


def drive(cluster, program):
    """Another job, which has ended. What it printed."""
    start = f"import os, ray, bfcd.ray\nray.init({cluster.address!r}, namespace='jobs', log_to_driver=False)\n"
    command = [sys.executable, "-c", start + program]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, timeout=CALL_S).stdout.splitlines()


def test_an_actor_outlives_its_driver(nodes):
    printed = drive(
        nodes[0].cluster,
        """
@ray.remote(num_cpus=0, **bfcd.ray.options("64MiB", partition="train", lease="server"))
class Server:
    def take(self):
        self.block = bfcd.default().malloc(1 << 20)
        return bfcd.default().bytes_limit()
print("limit", ray.get(Server.options(name="server", lifetime="detached").remote().take.remote()))
""",
    )
    assert f"limit {64 * MIB}" in printed
    server = ray.get_actor("server", namespace="jobs")
    assert get(server.take.remote()) == 64 * MIB
    (lease,) = [lease for m in nodes for lease in m.leases()]
    assert "-server-" in lease["name"] and lease["bytes_in_use"] > 0
    kill(server)


def test_tasks_have_a_lease_and_what_else_they_ask_for(nodes):
    printed = drive(
        nodes[0].cluster,
        """
def limit():
    return bfcd.default().bytes_limit(), os.environ["MINE"]
ask = bfcd.ray.options("32MiB", "train", runtime_env={"env_vars": {"MINE": "1"}}, resources={"bfcd_infer": 2})
print("limits", *ray.get([ray.remote(limit).options(**ask).remote() for _ in range(3)]))
""",
    )
    assert f"limits{f' ({32 * MIB}, {chr(39)}1{chr(39)})' * 3}" in printed


def test_bfcd_restarts_under_actors_and_before_others(nodes):
    actor = Actor.options(**options()).remote()
    pointer = get(actor.take.remote())
    for m in nodes:
        m.process.kill()
        m.process.wait()
    late = Actor.options(**options()).remote()
    place = late.where.remote()
    assert ray.wait([place], timeout=2)[0] == []
    for m in nodes:
        m.start()
    assert get(late.limits.remote())["train"] == ACTOR_MIB
    assert get(actor.take.remote()) != pointer and get(actor.limits.remote())["train"] == ACTOR_MIB
    assert sum(len(m.leases()) for m in nodes) == 2
    kill(actor, late)


def test_more_than_any_node_has_fails_at_once(nodes):
    with pytest.raises(
        ValueError, match=r"no node of this Ray cluster has 4096 MiB in partition 'train' \(at most 2048 MiB\)"
    ):
        options("4GiB")
    with pytest.raises(ValueError, match=r"2 MiB in partition 'other' \(at most 0 MiB\)"):
        options({"train": "2MiB", "other": 1}, None)


def test_a_placement_group_reserves_memory(nodes):
    asks = options("1.5GiB")
    group = placement_group([asks["resources"]] * 2, strategy="STRICT_SPREAD")
    get(group.ready())
    actors = [
        Actor.options(
            **asks, scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
        ).remote()
        for i in range(2)
    ]
    assert {socket for socket, _ in get([a.where.remote() for a in actors])} == {str(m.socket) for m in nodes}
    get([a.take.remote() for a in actors])
    assert [len(m.leases()) for m in nodes] == [1, 1]
    kill(*actors)
    remove_placement_group(group)


def test_several_partitions(nodes):
    actor = Actor.options(**options({"infer": "64MiB", "train": "32MiB"}, None)).remote()
    assert get(actor.limits.remote()) == {"infer": 64, "train": 32}
    assert get(actor.variable.remote("BFC_PARTITION")) == "infer"
    get([actor.take.remote(48), actor.take.remote(16, "train")])
    for partition in ("infer", "train"):
        with pytest.raises(bfcd.QuotaExceeded, match=f"in '{partition}'"):
            get(actor.take.remote(48, partition))
    kill(actor)


def test_an_actor_sees_the_gpus_of_its_partitions(nodes, monkeypatch):
    folder = tempfile.mkdtemp(prefix="fake-cuda-ray-", dir="/dev/shm")
    monkeypatch.setenv("FAKE_CUDA_STATE", folder)
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "1GiB,1GiB")
    machine = GpuMachine()
    node = machine.join(nodes[0].cluster, num_gpus=2)
    for sizes, seen in (
        ({"first": "64MiB"}, {"first": 0, "second": None}),
        ({"second": "64MiB"}, {"first": None, "second": 0}),
        ({"second": "64MiB", "first": "64MiB"}, {"first": 1, "second": 0}),
    ):
        actor = Actor.options(**options(sizes, None), num_gpus=1).remote()  # Ray would give it the first GPU
        get(actor.take.remote())
        devices = get(actor.devices.remote())
        assert {name: ordinal for name, (_, ordinal) in devices.items()} == seen
        assert get(actor.variable.remote("CUDA_VISIBLE_DEVICES")) == ",".join(devices[name][0] for name in sizes)
        kill(actor)
    machine.wait_for_nothing()
    nodes[0].cluster.remove_node(node)
    machine.stop()
    shutil.rmtree(folder)
