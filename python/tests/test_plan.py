# Plans: what a run that is served by chance changes. tests/integration/check-plan.py compares plans with daemons.
#
# SPDX-License-Identifier: Apache-2.0
import pytest
from bfcd.tools import plan
from bfcd.tools._bfcctl import Failure

STEP = plan.STEP


class Runs:
    """Limits from `least` on serve; one step less does in the runs whose numbers are in `by_chance`."""

    def __init__(self, least, by_chance=()):
        self.least, self.by_chance, self.n, self.refusal = least, by_chance, 0, "the limit is too low"

    def daemon(self, limit):
        self.n += limit == self.least - STEP
        return limit >= self.least or (limit == self.least - STEP and self.n in self.by_chance)


def find(runs):
    return plan._serve_again(runs, plan._search(runs, runs.daemon, STEP, STEP))


@pytest.mark.parametrize("by_chance", [(), (1,), (1, 2), (1, 2, 3)])
def test_chance(by_chance):
    runs = Runs(100 * STEP, by_chance)
    assert find(runs) == 100 * STEP
    assert find(Runs(100 * STEP, by_chance=(1, 2, 3, 4))) == 99 * STEP  # served four times


def test_no_limit():
    with pytest.raises(Failure, match="no limit serves the trace: the limit is too low"):
        plan._serve_again(Runs(1 << 60), 100 * STEP)
