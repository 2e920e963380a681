"""Traces made to order, for bfc-replay: a generator simulates a program that allocates and frees.

Each event is one tick of the clock, so no two events share a time and the order in the file is the order of allocation. Buffers
that are live at the end are freed then, oldest first.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import math

from ._bfcctl import Bfcctl, WrongUse

PROGRAM = "bfc-replay"
MASK = (1 << 64) - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", required=True, help="transformer or random")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1, help="by which each size is multiplied")


class Player:
    """buffers: [lower, upper, size]; upper is 0 for a live one."""

    def __init__(self, seed: int) -> None:
        self.buffers: list[list[int]] = []
        self.clock = 0
        self.random = (seed + 1) * 0x9E3779B97F4A7C15 & MASK | 1  # neighbouring seeds differ, and none is 0
        for _ in range(8):
            self.roll(2)

    def roll(self, n: int) -> int:
        """A xorshift generator with a multiplied output: short, and the same everywhere."""
        self.random ^= self.random >> 12
        self.random ^= self.random << 25 & MASK
        self.random ^= self.random >> 27
        return ((self.random * 0x2545F4914F6CDD1D & MASK) >> 32) % n

    def take(self, n_bytes: int) -> int:
        self.buffers.append([self.clock, 0, n_bytes])
        self.clock += 1
        return len(self.buffers) - 1

    def give(self, buffer: int) -> None:
        self.buffers[buffer][1] = self.clock
        self.clock += 1


# ---- a transformer's training ----------------------------------------------------------

N_LAYERS, N_STEPS, WIDTH, N_HEADS, BATCH, VOCABULARY = 6, 3, 256, 4, 4, 4096
WORD = 4  # bytes of a float
# Of one layer: query, key and value; projection; into and out of the feed-forward part; two norms.
WEIGHTS = [WORD * n for n in (3 * WIDTH**2, WIDTH**2, 4 * WIDTH**2, 4 * WIDTH**2, 2 * WIDTH, 2 * WIDTH)]


def _kept(length: int) -> list[int]:
    """The activations of one layer that its backward pass needs."""
    hidden, scores = BATCH * length * WIDTH, BATCH * N_HEADS * length * length
    words = (hidden, hidden * 3, scores, scores, hidden, hidden, hidden * 4, hidden * 4, BATCH * length * 2)
    return [WORD * n for n in words]


def _forward(p: Player, sizes: list[int]) -> list[int]:
    kept = []
    for size in sizes:
        workspace = p.take(size // 2)
        kept.append(p.take(size))
        p.give(workspace)
    return kept


def _backward(p: Player, sizes: list[int], kept: list[int]) -> list[int]:
    """Gives the layer's activations back and makes its weights' gradients."""
    gradients = [0] * len(WEIGHTS)
    for i in reversed(range(len(sizes))):
        gradient = p.take(sizes[i])
        if i < len(WEIGHTS):
            gradients[i] = p.take(WEIGHTS[i])
        p.give(kept[i])
        p.give(gradient)
    return gradients


def _step(p: Player) -> None:
    length = 64 + 16 * p.roll(9)  # batches are padded to their longest sentence
    sizes = _kept(length)
    first = p.take(BATCH * length * 8)
    embedded = p.take(BATCH * length * WIDTH * WORD)
    kept = [_forward(p, sizes) for _ in range(N_LAYERS)]
    logits = p.take(BATCH * length * VOCABULARY * WORD)
    softmax = p.take(BATCH * length * VOCABULARY * WORD)
    p.give(logits)
    gradients = [_backward(p, sizes, of_layer) for of_layer in reversed(kept)]
    for buffer in (softmax, embedded, first):
        p.give(buffer)
    for of_layer in reversed(gradients):
        for size, gradient in zip(WEIGHTS, of_layer):
            update = p.take(size)
            p.give(gradient)
            p.give(update)


def transformer(p: Player) -> None:
    for _ in range(3):  # weights and the optimizer's two moments stay to the end
        p.take(VOCABULARY * WIDTH * WORD)
        for size in WEIGHTS * N_LAYERS:
            p.take(size)
    for _ in range(N_STEPS):
        _step(p)


# ---- anything --------------------------------------------------------------------------


def anything(p: Player) -> None:
    """Sizes from 1 byte to 4 MiB, each magnitude as likely as the others; about 100 buffers live at a time, and which of them
    goes is chance."""
    live: list[int] = []
    for _ in range(2000):
        magnitude = 1 << p.roll(23)
        if len(live) == 100 or (live and p.roll(3) == 0):
            which = p.roll(len(live))
            p.give(live[which])
            live[which] = live[-1]
            live.pop()
        else:
            live.append(p.take(magnitude + p.roll(magnitude)))


GENERATORS = {"transformer": transformer, "random": anything}


def generate(name: str, seed: int, scale: float) -> str:
    """CSV. WrongUse."""
    if name not in GENERATORS:
        raise WrongUse(f'unknown generator "{name}"; the generators are {" and ".join(GENERATORS)}')
    p = Player(seed)
    GENERATORS[name](p)
    for i, buffer in enumerate(p.buffers):
        if buffer[1] == 0:
            p.give(i)
    if max(size for _, _, size in p.buffers) * scale >= 1 << 63:
        raise WrongUse(f"--scale {scale:g} makes a buffer of 2^63 bytes or more")
    lines = [f"{i},{lower},{upper},{max(math.ceil(size * scale), 1)}\n" for i, (lower, upper, size) in enumerate(p.buffers)]
    return "id,lower,upper,size\n" + "".join(lines)


def run(options: argparse.Namespace, _: Bfcctl) -> None:
    print(generate(options.name, options.seed, options.scale), end="")
