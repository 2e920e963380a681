"""Pictures of a trace, which bfc-replay writes to standard input: for PyTorch's memory viewer, for Perfetto, and as a plot.

The first line is a list of labels as JSON; each other one is a buffer: lower, upper, size, the numbers of the labels that
are its tag and its track ("tenant/partition"), and its flags (-1: the trace has none).

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import bisect
import collections
import json
import sys
from typing import NamedTuple

from . import _snapshot, _text
from ._bfcctl import Bfcctl, Failure
from ._file import write

NO_END = (1 << 63) - 1  # `upper` of a buffer that was never freed
PROGRAM = "bfc-replay"
GRANULE = 256
MAX_SERIES = 24  # tags with a counter of their own in Perfetto, those with the highest peaks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default="trace", help="of the trace, for the plot's title")
    parser.add_argument("--snapshot", help="a pickle for PyTorch's memory viewer")
    parser.add_argument("--timeline", help="Chrome trace JSON, for Perfetto")
    parser.add_argument("--plot", help="an SVG of the live bytes over time")


class Buffer(NamedTuple):
    lower: int
    upper: int
    size: int
    tag: int
    track: int
    flags: int


class Trace:
    """events: (time since the first, buffer, is_free) in order: at equal times frees are first, ties keep the file's order.
    Buffers that are never freed have no free."""

    def __init__(self, labels: list[str], buffers: list[Buffer]) -> None:
        self.labels, self.buffers = labels, buffers
        order = [(b.lower, 1, i) for i, b in enumerate(buffers)]
        order += [(b.upper, 0, i) for i, b in enumerate(buffers) if b.upper < NO_END]
        order.sort()
        first = order[0][0]
        self.events = [(time - first, i, is_alloc == 0) for time, is_alloc, i in order]
        self.last_time = self.events[-1][0]
        live = self.peak = self.n_to_peak = 0
        for n, (_, i, is_free) in enumerate(self.events, 1):
            live += -buffers[i].size if is_free else buffers[i].size
            if live > self.peak:
                self.peak, self.n_to_peak = live, n
        self.peak_time = self.events[self.n_to_peak - 1][0]


def read() -> Trace:
    lines = iter(sys.stdin)
    labels = json.loads(next(lines))
    return Trace(labels, [Buffer(*map(int, line.split())) for line in lines])


# ---- PyTorch's memory viewer -----------------------------------------------------------


class Space:
    """The places that bfcd's allocator chooses: best fit, the lowest address on ties, at once merged. n_bytes: of the region
    before it grows."""

    def __init__(self, n_bytes: int = 0) -> None:
        self.end = n_bytes  # of the region, which grows for a block that does not fit
        self._sizes: list[tuple[int, int]] = []  # of free ranges: size, address
        self._begins: dict[int, int] = {}  # their sizes, by their begin and by their end
        self._ends: dict[int, int] = {}
        if n_bytes > 0:
            self._put(0, n_bytes)

    def _put(self, at: int, size: int) -> None:
        bisect.insort(self._sizes, (size, at))
        self._begins[at] = self._ends[at + size] = size

    def _take(self, at: int, size: int) -> None:
        del self._sizes[bisect.bisect_left(self._sizes, (size, at))]
        del self._begins[at], self._ends[at + size]

    def alloc(self, size: int) -> int:
        i = bisect.bisect_left(self._sizes, (size, 0))
        if i < len(self._sizes):
            n, at = self._sizes[i]
            self._take(at, n)
            if n > size:
                self._put(at + size, n - size)
            return at
        at = self.end - self._ends.get(self.end, 0)  # a free range at the end grows
        if at < self.end:
            self._take(at, self.end - at)
        self.end = at + size
        return at

    def free(self, at: int, size: int) -> None:
        if before := self._ends.get(at):
            self._take(at - before, before)
            at, size = at - before, size + before
        if after := self._begins.get(at + size):
            self._take(at + size, after)
            size += after
        self._put(at, size)


def snapshot(t: Trace) -> bytes:
    space, places, events = Space(), {}, []
    where = [_snapshot.frames(label) for label in t.labels]
    sizes = [-(-b.size // GRANULE) * GRANULE for b in t.buffers]
    for _, i, is_free in t.events:
        if is_free:
            space.free(places[i], sizes[i])
        else:
            places[i] = space.alloc(sizes[i])
        if space.end > 1 << 40:
            raise Failure("the trace does not fit into 1 TiB of addresses")
        of = _snapshot.BASE_ADDRESS + places[i], sizes[i], where[t.buffers[i].tag]
        events += [_snapshot.event("free_requested", *of)] if is_free else []
        events.append(_snapshot.event("free_completed" if is_free else "alloc", *of))
        if is_free:
            del places[i]
    n_bytes = -(-space.end // _snapshot.UNIT) * _snapshot.UNIT
    blocks = [
        _snapshot.block(_snapshot.BASE_ADDRESS + at, sizes[i], t.buffers[i].size, True, where[t.buffers[i].tag])
        for i, at in sorted(places.items(), key=lambda item: item[1])
    ]
    whole = _snapshot.segment(_snapshot.BASE_ADDRESS, n_bytes, blocks)
    begin = _snapshot.event("segment_alloc", _snapshot.BASE_ADDRESS, n_bytes, [])
    return _snapshot.dump([whole], [[begin, *events]])


# ---- Perfetto --------------------------------------------------------------------------


def timeline(t: Trace) -> bytes:
    """A counter of each track, and of each of the tags with the highest peaks in it. A process of Perfetto's for each track,
    so that its counters are together."""
    live: collections.Counter[tuple[int, int]] = collections.Counter()  # by track and tag; tag 0: all of the track
    peaks: collections.Counter[tuple[int, int]] = collections.Counter()
    for _, i, is_free in t.events:
        b = t.buffers[i]
        live[b.track, b.tag] += -b.size if is_free else b.size
        peaks[b.track, b.tag] = max(peaks[b.track, b.tag], live[b.track, b.tag])
    chosen = {key for key, _ in peaks.most_common(MAX_SERIES) if key[1] != 0}
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": track + 1, "name": "process_name", "args": {"name": t.labels[track] or "trace"}}
        for track in sorted({b.track for b in t.buffers})
    ]
    live.clear()
    shown: dict[tuple[int, int], int] = {}
    changed: dict[tuple[int, int], None] = {}
    for n, (time, i, is_free) in enumerate(t.events):
        b = t.buffers[i]
        for key in {(b.track, 0): None, (b.track, b.tag): None}:
            live[key] += -b.size if is_free else b.size
            if key[1] == 0 or key in chosen:
                changed[key] = None
        if n + 1 < len(t.events) and t.events[n + 1][0] == time:
            continue  # all events of one time are one step
        for track, tag in changed:
            if live[track, tag] != shown.get((track, tag), 0):
                name = (t.labels[track] or "live") + (": " + t.labels[tag] if tag else "")
                of = {"ph": "C", "pid": track + 1, "tid": 0, "ts": time, "name": name}
                events.append(of | {"args": {"bytes": live[track, tag]}})
                shown[track, tag] = live[track, tag]
        changed.clear()
    return (json.dumps({"displayTimeUnit": "ns", "traceEvents": events}, separators=(",", ":")) + "\n").encode()


# ---- plot ------------------------------------------------------------------------------

N_GROUPS = 9  # shown by themselves; one more is all others
N_COLUMNS, LEFT, TOP, HEIGHT, ROW, BAR = 840, 90, 60, 320, 22, 420
LIGHT = "#3366cc #dc7633 #2e8b57 #b03a8c #8a7f00 #17808e #c0392b #6a5acd #7a5230 #8c8c8c".split()
DARK = "#7aa2f7 #f0a36b #6fcf97 #e08bc5 #d9cf5a #5fc9d6 #f08a80 #a99df5 #c9a27a #a0a0a0".split()


def _colours(of: list[str]) -> str:
    return "\n".join(f".g{i} {{ fill: {colour} }}" for i, colour in enumerate(of))


STYLE = f"""<style>
svg {{ background: #ffffff; font: 13px sans-serif }}
text {{ fill: #1a1a1a }} .dim {{ fill: #5a5a5a }} line, .frame {{ stroke: #b0b0b0; fill: none }}
.peak {{ stroke: #c00000; stroke-dasharray: 4 3 }}
{_colours(LIGHT)}
@media (prefers-color-scheme: dark) {{
svg {{ background: #16181d }} text {{ fill: #e6e6e6 }} .dim {{ fill: #a8a8a8 }}
line, .frame {{ stroke: #555b66 }} .peak {{ stroke: #ff8080 }}
{_colours(DARK)}
}}
</style>"""


class Group(NamedTuple):
    name: str
    at_peak: int
    n_at_peak: int  # blocks


class Plot:
    """Live bytes over time by tag, and what is live at the peak; by size in a trace without tags. A column of pixels shows
    the moment of its time at which most is live, so the peak is always seen. The file refers to nothing else."""

    def __init__(self, t: Trace, name: str) -> None:
        self.trace, self.name = t, _text.escape(name)
        self.by_size = not any(b.tag for b in t.buffers)
        self.ids = [b.size if self.by_size else b.tag for b in t.buffers]
        self._choose_groups()
        self._fill_columns()

    def _choose_groups(self) -> None:
        t = self.trace
        at_peak: collections.Counter[int] = collections.Counter({group: 0 for group in self.ids})
        n_at_peak: collections.Counter[int] = collections.Counter()
        for _, i, is_free in t.events[: t.n_to_peak]:
            at_peak[self.ids[i]] += -t.buffers[i].size if is_free else t.buffers[i].size
            n_at_peak[self.ids[i]] += -1 if is_free else 1
        order = sorted(at_peak, key=lambda group: (-at_peak[group], group))
        self.places = {group: min(i, N_GROUPS) for i, group in enumerate(order)}
        self.groups = [Group(self._name(g), at_peak[g], n_at_peak[g]) for g in order[:N_GROUPS]]
        if rest := order[N_GROUPS:]:
            others = "other sizes" if self.by_size else "other tags"
            self.groups.append(Group(others, sum(at_peak[g] for g in rest), sum(n_at_peak[g] for g in rest)))

    def _name(self, group: int) -> str:
        if self.by_size:
            return f"blocks of {_text.size(group)}"
        return self.trace.labels[group] if group else "(no tag)"

    def _column(self, time: int) -> int:
        return int(time / self.trace.last_time * (N_COLUMNS - 1)) if self.trace.last_time else 0

    def _fill_columns(self) -> None:
        now = [0] * len(self.groups)
        total, at = 0, 0
        totals = [0] * N_COLUMNS
        self.columns = [now[:] for _ in range(N_COLUMNS)]
        for time, i, is_free in self.trace.events:
            to, change = self._column(time), -self.trace.buffers[i].size if is_free else self.trace.buffers[i].size
            while at < to:  # what was live up to here is live in all columns on the way
                at += 1
                if total > totals[at]:
                    totals[at], self.columns[at] = total, now[:]
            now[self.places[self.ids[i]]] += change
            total += change
            if total > totals[at]:
                totals[at], self.columns[at] = total, now[:]

    def _y(self, n_bytes: float) -> float:
        return TOP + HEIGHT - n_bytes / self.trace.peak * HEIGHT

    def _axes(self) -> list[str]:
        lines, right, below = [], LEFT + N_COLUMNS, TOP + HEIGHT + 18
        for i in range(5):
            n_bytes = self.trace.peak * i // 4
            y = self._y(n_bytes)
            lines.append(
                f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
                f'<text class="dim" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_text.size(n_bytes)}</text>'
            )
        lines.append(
            f'<text class="dim" x="{LEFT}" y="{below}">0</text>'
            f'<text class="dim" x="{right}" y="{below}" text-anchor="end">{self.trace.last_time}</text>'
            f'<text class="dim" x="{LEFT + N_COLUMNS // 2}" y="{below}" text-anchor="middle">time</text>'
        )
        return lines

    def _area(self, group: int) -> str:
        """The group's part of each column, above those before it."""
        low = [(i, sum(column[:group])) for i, column in enumerate(self.columns)]
        high = [(i, sum(column[: group + 1])) for i, column in enumerate(self.columns)]
        points = [f"{LEFT + i},{self._y(n_bytes):.1f}" for i, n_bytes in high + low[::-1]]
        return f'<path class="g{group}" d="M{"L".join(points)}Z"/>'

    def _bars(self) -> list[str]:
        y = TOP + HEIGHT + 70
        by = "size" if self.by_size else "tag"
        lines = [f'<text x="{LEFT}" y="{y - 14}" font-weight="bold">Live at the peak, by {by}</text>']
        for i, (name, n_bytes, n) in enumerate(self.groups):
            if n_bytes == 0:
                continue
            lines.append(
                f'<rect class="g{i}" x="{LEFT}" y="{y}" width="{1 + n_bytes / self.trace.peak * BAR:.1f}" height="{ROW - 6}"/>'
                f'<text x="{LEFT + BAR + 12}" y="{y + 13}">{_text.xml(name)}: {_text.size(n_bytes)} in {n} '
                f"block{'' if n == 1 else 's'}</text>"
            )
            y += ROW
        return lines

    def svg(self) -> bytes:
        t, width, height = self.trace, LEFT + N_COLUMNS + 30, TOP + HEIGHT + 90 + (N_GROUPS + 1) * ROW
        peak, name = LEFT + self._column(t.peak_time), _text.xml(self.name)
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
            f"<title>Live bytes of {name}</title>",
            STYLE,
            f'<text x="{LEFT}" y="24" font-weight="bold">{name}</text><text class="dim" x="{LEFT}" y="44">'
            f"{len(t.buffers)} buffers; peak {_text.size(t.peak)} ({t.peak} bytes) at time {t.peak_time}</text>",
            *self._axes(),
            *(self._area(i) for i in range(len(self.groups))),
            f'<line class="peak" x1="{peak}" x2="{peak}" y1="{TOP - 6}" y2="{TOP + HEIGHT}"/>',
            *self._bars(),
            "</svg>",
        ]
        return ("\n".join(lines) + "\n").encode()


def run(options: argparse.Namespace, _: Bfcctl) -> None:
    t = read()
    if options.snapshot is not None:
        write(options.snapshot, snapshot(t))
    if options.timeline is not None:
        write(options.timeline, timeline(t))
    if options.plot is not None:
        write(options.plot, Plot(t, options.name).svg())
