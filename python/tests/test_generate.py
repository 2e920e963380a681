# Traces made to order: the same seed gives the same trace, and a scale changes sizes only.
#
# SPDX-License-Identifier: Apache-2.0
import pytest
from bfcd.tools._bfcctl import WrongUse
from bfcd.tools.generate import generate
from bfcd.tools.trace import Buffer, Trace


def read(text):
    lines = text.splitlines()
    assert lines[0] == "id,lower,upper,size"
    return Trace([""], [Buffer(*map(int, line.split(",")[1:]), 0, 0, -1) for line in lines[1:]])


@pytest.mark.parametrize("name", ["transformer", "random"])
def test_generators(name):
    text = generate(name, 7, 1)
    assert text == generate(name, 7, 1)
    assert text != generate(name, 8, 1)
    trace = read(text)
    assert len(trace.buffers) > 500
    assert all(b.lower < b.upper for b in trace.buffers)
    assert len({time for time, _, _ in trace.events}) == 2 * len(trace.buffers)
    assert 32 << 20 < trace.peak < 250 << 20  # fits a demonstration
    assert [b.size for b in read(generate(name, 7, 1e-9)).buffers] == [1] * len(trace.buffers)


def test_known_traces():
    """A seed gives the trace that it always gave."""
    assert generate("random", 7, 1).splitlines()[1:4] == ["0,0,7,16190", "1,1,3,34", "2,2,6,1458706"]
    assert generate("transformer", 7, 1).splitlines()[-1] == "824,1536,1538,2048"


@pytest.mark.parametrize("name, scale, error", [("transfomer", 1, "unknown generator"), ("transformer", 1e15, "2\\^63 bytes")])
def test_refusals(name, scale, error):
    with pytest.raises(WrongUse, match=error):
        generate(name, 1, scale)
