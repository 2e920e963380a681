#!/usr/bin/env -S python3 -B
# A job of two-builds.py, with the Python package and the library of one build. It works until it reads a line: "state", and
# it checks all that it has, prints what that is, and waits for the next line; "go"; "end", or the end of its input.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: job.py KIND SOCKET NAME PEER CACHE     prints a line of JSON for each answer
import contextlib
import json
import random
import select
import sys
import time

import bfcd

KIND, SOCKET, NAME, PEER, CACHE = sys.argv[1:]
MIB = 1 << 20
N_NAMES = 3
seeds = random.Random(NAME)


def pattern(seed, n_bytes):
    """Of any length, from a few random bytes, which is fast."""
    piece = random.Random(seed).randbytes(min(n_bytes, 997))
    return (piece * (n_bytes // len(piece) + 1))[:n_bytes]


class Job:
    tenant = 'red'

    def __init__(self):
        self.client = bfcd.connect(SOCKET, tenant=self.tenant, partition='train', name=NAME, cache=CACHE == 'on')
        self.blocks = []  # (block, seed of its contents)
        self.n_direct = self.n_wrong = self.n_done = 0

    def allocate(self, n_bytes, **options):
        block, seed = self.client.malloc(n_bytes, **options), seeds.random()
        block.write(pattern(seed, n_bytes))
        self.blocks.append((block, seed))

    def check(self, block, seed):
        self.n_wrong += block.read() != pattern(seed, block.nbytes)

    def free(self, i):
        block, seed = self.blocks.pop(i)
        self.check(block, seed)
        block.free()

    def state(self):
        for block, seed in self.blocks:
            self.check(block, seed)
        self.client.shared()  # asks the daemon, so the session has been resumed
        return {'blocks': len(self.blocks), 'bytes': sum(-(-b.nbytes // 256) * 256 for b, _ in self.blocks),
                'direct': self.n_direct, 'counted_direct': self.client.memory_stats()['bytes_direct'], 'wrong': self.n_wrong, 'done': self.n_done}

    def end(self):
        while self.blocks:
            self.free(-1)


class Blocks(Job):
    """Blocks of many sizes, and direct charges."""

    def step(self):
        if len(self.blocks) < 24 and seeds.random() < 0.6:
            self.allocate(seeds.choice((1, 300, 5000, 70000, 700000)))
        elif self.blocks:
            self.free(seeds.randrange(len(self.blocks)))
        if seeds.random() < 0.1:
            n_bytes = seeds.randrange(1, MIB)
            if self.n_direct < 4 * MIB:
                self.client.charge(n_bytes)
                self.n_direct += n_bytes
            else:
                self.client.uncharge(self.n_direct)
                self.n_direct = 0


class Pod(Blocks):
    tenant = None


class Shares(Job):
    """Blocks by name: its own are published and freed, those of its peer attached and detached."""

    def __init__(self):
        super().__init__()
        self.own = {}

    def step(self):
        name = f'{NAME}-{seeds.randrange(N_NAMES)}'
        if name in self.own and seeds.random() < 0.5:
            self.check(*self.own[name])
            self.own.pop(name)[0].free()
        elif name not in self.own:
            block = self.client.malloc(70000, whole=True)
            block.write(pattern(name, block.nbytes))
            with contextlib.suppress(bfcd.Exists):  # its peer has the last one still
                self.client.publish(block, name)
                self.own[name] = block, name
        name = f'{PEER}-{seeds.randrange(N_NAMES)}'
        with contextlib.suppress(bfcd.NotFound):
            self.blocks.append((self.client.attach(name), name))
        if len(self.blocks) > 4:
            self.free(0)

    def state(self):
        for block, seed in self.own.values():
            self.check(block, seed)
        return super().state()

    def end(self):
        super().end()
        while self.own:
            block, seed = self.own.popitem()[1]
            self.check(block, seed)
            block.free()


class Waits(Job):
    """More than half of the tenant's memory, for a moment: one of two such jobs waits."""

    tenant = 'blue'

    def step(self):
        self.allocate(20 * MIB, wait=300)
        time.sleep(0.05)
        self.free(0)


def lines():
    """None: there is no line."""
    while True:
        yield sys.stdin.readline().strip() if select.select([sys.stdin], [], [], 0)[0] else None


def answer(**fields):
    print(json.dumps(fields), flush=True)


def main():
    sys.stdin.readline()  # its leases have been made
    job = {'blocks': Blocks, 'pod': Pod, 'shares': Shares, 'waits': Waits}[KIND]()
    answer(version=bfcd.__version__)
    for line in lines():
        if line is None:
            job.step()
            job.n_done += 1
            time.sleep(0.002)  # the daemons have two processors, too
        elif line == 'state':
            answer(**job.state())
            if sys.stdin.readline().strip() != 'go':
                break
        else:
            break
    job.end()
    answer(**job.state())


try:
    main()
except (bfcd.Error, ValueError, RuntimeError) as e:
    answer(error=f'{type(e).__name__}: {e}')
    sys.exit(1)
