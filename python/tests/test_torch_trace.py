# PyTorch's snapshots: the lifetimes that they tell of, and pickles that are refused. tests/integration/check-views.py reads
# them by bfc-replay.
#
# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import pickle
import subprocess

import pytest
from bfcd.tools.torch_trace import NO_END, Reader, Wrong, unpickle
from conftest import LIMIT_S, host_only

pytestmark = host_only
BASE = 0x7F0000000000
FRAMES = [{"filename": "/usr/lib/libtorch.so", "line": 1, "name": "c"}, {"filename": "/x/model.py", "line": 12, "name": "f"}]


def event(action, address, size, frames=FRAMES):
    return {"action": action, "addr": address, "size": size, "frames": list(frames)}


def block(state, address, size):
    return {"state": state, "address": address, "size": size}


def read(top):
    return Reader(unpickle(pickle.dumps(top)))


def snapshot():
    blocks = [
        block("active_allocated", BASE, 2048),
        block("inactive", BASE + 2048, 512),
        block("active_allocated", BASE + 4096, 777),  # from before the recording
    ]
    trace = [
        event("segment_alloc", BASE, 1 << 20),
        event("alloc", BASE, 512),
        event("free_requested", BASE, 512),
        event("alloc", BASE + 1024, 1024),
        event("free_completed", BASE, 512),
        event("alloc", BASE, 2048),
        event("free_completed", BASE + 1024, 1024),
        event("free_completed", BASE + 65536, 333),  # allocated before the recording
    ]
    return {"segments": [{"device": 0, "address": BASE, "blocks": blocks}], "device_traces": [trace]}


def test_lifetimes():
    r = read(snapshot())
    assert [b[:3] for b in r.buffers] == [(0, NO_END, 777), (0, 6, 333), (1, 3, 512), (2, 5, 1024), (4, NO_END, 2048)]
    assert r.buffers[2][3] == "model.py:12 f" and r.buffers[0][3] == "" and r.device == 0


def test_blocks_without_addresses():
    """As older snapshots have them."""
    s = snapshot()
    for b in s["segments"][0]["blocks"]:
        del b["address"]
    s["device_traces"] = []
    assert [b[:3] for b in read(s).buffers] == [(0, NO_END, 2048), (0, NO_END, 777)]


def test_refused_requests():
    """The first is followed by an allocation, so the job went on. The second has ended it: its frees are those of an
    exception. The second GPU is left out."""
    oom = {"action": "oom", "device_free": 1, "frames": []}
    first = [event("alloc", BASE, 1000), oom | {"size": 70000}, event("alloc", BASE + 4096, 2000), oom | {"size": 5000}]
    r = read({"segments": [], "device_traces": [[*first, event("free_completed", BASE, 1000)], [event("alloc", BASE, 1000)]]})
    assert len(r.buffers) == 3
    assert [(b[1] - b[0], b[2]) for b in r.buffers if b[2] == 5000] == [(1, 5000)]
    assert (r.n_others, r.n_other_events, r.n_survived) == (1, 1, 1)


def test_a_tag_is_one_field():
    odd = [{"filename": "/x/a,b.py", "line": 1, "name": "f\n" + "é" * 100}]
    tag = read({"segments": [], "device_traces": [[event("alloc", 1, 1, odd)]]}).buffers[0][3]
    assert tag.startswith("a;b.py:1 f??") and len(tag) == 63


def test_the_same_blocks_many_times():
    """60,000 times the same segment, which has 60,000 times the same block: no file has more items than bytes."""
    segment = {"device": 0, "address": 0, "blocks": [block("active_allocated", BASE, 2048)] * 60000}
    with pytest.raises(Wrong, match="the same events or blocks several times"):
        read({"segments": [segment] * 60000})


def test_the_same_frames_many_times():
    """10,000 events with the same list of 100,000 frames, as PyTorch writes it for events of one place."""
    frames = [{}] * 100000
    events = [{"action": "alloc", "addr": i, "size": 1, "frames": frames} for i in range(10000)]
    assert len(read({"segments": [], "device_traces": [events]}).buffers) == 10000


@pytest.mark.parametrize("top", [None, [], {}, {"segments": []}, {"segments": 5}, {"segments": [7, {}, {"blocks": 3}]}])
def test_what_is_no_snapshot(top):
    with pytest.raises(Wrong, match="no memory snapshot|no allocations"):
        read(top)


@pytest.mark.parametrize("wrong", [{"size": 0}, {"size": -1}, {"size": "1"}, {"size": 1 << 64}, {"addr": None}, {"addr": [1]}])
def test_wrong_events(wrong):
    with pytest.raises(Wrong, match="no memory snapshot"):
        read({"segments": [], "device_traces": [[event("alloc", BASE, 1) | wrong]]})


@pytest.mark.parametrize("protocol", range(6))
def test_each_protocol_is_read(protocol):
    assert len(Reader(unpickle(pickle.dumps(snapshot(), protocol))).buffers) == 5


def test_whatever_is_left_out_at_the_end_there_is_an_error():
    data = pickle.dumps(snapshot())
    for n in range(len(data)):
        with pytest.raises(Wrong, match="damaged"):
            unpickle(data[:n])


class Evil:
    def __reduce__(self):
        return os.mkdir, ("made-by-a-pickle",)


def test_a_pickle_that_names_a_function_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for protocol in range(6):
        with pytest.raises(Wrong, match="no plain data: it names .*mkdir"):
            unpickle(pickle.dumps({"segments": [Evil()]}, protocol))
    assert list(tmp_path.iterdir()) == []


REFUSED = [b"cos\nsystem\n.", b"\x8c\x02os\x8c\x06system\x93.", b"N)R.", b"N}b.", b"N)\x81.", b"Q.", b"\x82\x01.", b"X\xff\xff\xff\xff"]
REFUSED += [b"\x8d" + b"\xff" * 8, b".", b"h\0.", b"Ne.", b"(Ne.", b"N(Ne.", b"t.", b"\x86.", b"(i__builtin__\neval\n.", b"(cos\nsystem\no."]


@pytest.mark.parametrize("instructions", REFUSED)
def test_other_instructions_are_refused(instructions):
    with pytest.raises(Wrong):
        unpickle(b"\x80\x04" + instructions)


def test_a_list_in_itself_is_no_trouble():
    top = {"segments": [], "device_traces": [[event("alloc", BASE, 5)]]}
    top["device_traces"][0].append(top["device_traces"][0])
    top["segments"].append(top["segments"])
    assert len(read(top).buffers) == 1


def replayed(tmp_path, data):
    """Whatever a file has, bfc-replay says one sentence."""
    path = tmp_path / "--x.pickle"
    path.write_bytes(data)
    command = [str(pathlib.Path(os.environ["BFCCTL"]).with_name("bfc-replay")), "--plan", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)


def test_small_pickles_that_ask_for_much_memory(tmp_path):
    events = [event("alloc", BASE, 1)] * 20000
    done = replayed(tmp_path, pickle.dumps({"segments": [], "device_traces": [events] * 20000}))
    assert done.returncode == 2 and "the same events or blocks several times" in done.stderr
    done = replayed(tmp_path, b"\x80\x04Nr\xf0\xff\xff\x0f.")  # a place in the memo
    assert done.returncode == 2 and "MiB of memory" in done.stderr
