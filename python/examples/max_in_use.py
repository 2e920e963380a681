"""How much memory a program needs: the most that was in use at one time, for three patterns of allocation.

TensorFlow has the operations BytesInUse and MaxBytesInUse for this question. bfcd's memory_stats() has the same
figures under the names `bytes_in_use` and `peak_bytes_in_use`.

The sizes are in KiB. Neither the sum of all blocks nor the largest block is the answer: the peak depends on the order
of allocations and frees.

    python3 max_in_use.py

SPDX-License-Identifier: Apache-2.0
"""

import bfcd

KIB = 1024


class Pattern:
    """Allocates blocks by name and prints both figures after each step."""

    def __init__(self, client, title):
        self.client = client
        self.blocks = {}
        client.reset_peak()
        print(f"{title}\n{'':<16}{'BytesInUse':>12}{'MaxBytesInUse':>15}   KiB")

    def alloc(self, name, kib):
        self.blocks[name] = self.client.malloc(kib * KIB, tag=name)
        self.show(f"alloc {name} {kib}")

    def free(self, name):
        self.blocks.pop(name).free()
        self.show(f"free {name}")

    def show(self, step):
        stats = self.client.memory_stats()
        print(f"{step:<16}{stats['bytes_in_use'] // KIB:>12}{stats['peak_bytes_in_use'] // KIB:>15}")

    def end(self, expected_kib):
        peak = self.client.memory_stats()["peak_bytes_in_use"]
        assert peak == expected_kib * KIB, f"the peak is {peak} bytes, expected {expected_kib} KiB"
        self.blocks.clear()
        print(f"peak: {expected_kib} KiB\n")


def sequential(client):
    """A chain of operations. The inputs can be freed only after the output has been allocated, so the 50 of `c` come on
    top of the 300 of `a` and `b`."""
    p = Pattern(client, "sequential, with overlap")
    p.alloc("a", 100)
    p.alloc("b", 200)
    p.alloc("c", 50)
    p.free("a")
    p.free("b")
    p.alloc("d", 150)
    p.free("c")
    p.free("d")
    p.end(350)


def branching(client):
    """Two branches read the same input one after the other. The first keeps its result, its temporary block is gone
    before the second branch starts. The peak is in the second branch, although the first has the largest block."""
    p = Pattern(client, "branching")
    p.alloc("input", 100)
    p.alloc("temporary1", 250)
    p.alloc("result1", 50)
    p.free("temporary1")
    p.alloc("temporary2", 150)
    p.alloc("result2", 125)
    p.free("temporary2")
    p.free("input")
    p.alloc("sum", 50)
    p.end(425)


def free_before_alloc(client):
    """The same blocks in two orders: a block that is freed before the next one is allocated makes the peak smaller."""
    p = Pattern(client, "free after alloc")
    p.alloc("old", 200)
    p.alloc("new", 200)
    p.free("old")
    p.end(400)

    p = Pattern(client, "free before alloc")
    p.alloc("old", 200)
    p.free("old")
    p.alloc("new", 200)
    p.end(200)


def main():
    client = bfcd.default()
    sequential(client)
    branching(client)
    free_before_alloc(client)


if __name__ == "__main__":
    main()
