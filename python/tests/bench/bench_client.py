#!/usr/bin/env python3
# What the calls of the Python package cost, in microseconds: an allocation that is dropped, or freed by a call, a NumPy
# array (empty), and the statistics; and the processor time of a program that only imports it.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: bench_client.py [--bytes N] [--rounds N] [--calls N] [--json] [--bfcd PROGRAM] [--max-alloc-us X] [--max-stats-us X]
#        [--max-import-us X]
#
# It connects to the daemon of BFC_SOCKET; with --bfcd it starts one for itself. Each figure is the median of the rounds.
# A round is short, so that most rounds are not interrupted on a busy machine. The limits make the exit status 1 where a
# median is above them.
import argparse
import gc
import importlib.util
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[n]) for n in (2, 1)]

import bfcd  # noqa: E402


def median_us(call, n_rounds, n_calls):
    """The median over the rounds of the microseconds of one call."""
    rounds = []
    for _ in range(n_rounds + 1):
        start = time.perf_counter_ns()
        for _ in range(n_calls):
            call()
        rounds.append((time.perf_counter_ns() - start) / n_calls / 1000)
    return statistics.median(rounds[1:])  # the first fills caches


def measure(client, args):
    malloc = client.malloc

    def alloc():
        malloc(args.bytes)  # freed at once, because nothing refers to it

    def alloc_and_free():
        malloc(args.bytes).free()

    def array():
        client.empty(args.bytes, "u1")

    cases = {"alloc_and_drop_us": alloc, "alloc_and_free_us": alloc_and_free, "memory_stats_us": client.memory_stats}
    if importlib.util.find_spec("numpy"):
        cases["empty_us"] = array
    gc.disable()
    try:
        return {name: median_us(call, args.rounds, args.calls) for name, call in cases.items()}
    finally:
        gc.enable()


def import_us(n_times=5):
    """The least of some processes, with the interpreter's own time; in a checkout the package has no bytecode caches."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": sys.path[0]}
    times = []
    for _ in range(n_times):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", "import bfcd"], env=environment, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times) * 1e6


def arguments():
    parser = argparse.ArgumentParser(description="What the calls of the Python package cost.")
    parser.add_argument("--bytes", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--calls", type=int, default=100, help="in a round")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--bfcd", metavar="PROGRAM", help="starts this daemon; by default the one that runs is used")
    parser.add_argument("--max-alloc-us", type=float, metavar="US", help="fail if an allocation takes longer")
    parser.add_argument("--max-stats-us", type=float, metavar="US", help="fail if memory_stats() takes longer")
    parser.add_argument("--max-import-us", type=float, metavar="US", help="fail if the import takes longer")
    return parser.parse_args()


def run(args, socket=None):
    client = bfcd.connect(socket)
    figures = measure(client, args) | {"import_us": import_us()}
    if client.bytes_in_use() != 0:
        sys.exit(f"{client.bytes_in_use()} bytes are left")
    client.close()
    return figures


def run_with_daemon(args):
    os.environ["BFCD"] = args.bfcd
    from conftest import Daemon  # which needs pytest

    daemon = Daemon()
    try:
        return run(args, daemon.socket)
    finally:
        daemon.stop()


def main():
    args = arguments()
    figures = run_with_daemon(args) if args.bfcd else run(args)
    if args.json:
        print(json.dumps({"bytes": args.bytes, "rounds": args.rounds, "calls": args.calls} | figures))
    else:
        for name, us in figures.items():
            print(f"{name.removesuffix('_us'):<16}{us:8.2f} us")
    limits = {name: args.max_alloc_us for name in figures}
    limits |= {"memory_stats_us": args.max_stats_us, "import_us": args.max_import_us}
    above = [name for name, limit in limits.items() if limit is not None and figures[name] > limit]
    if above:
        sys.exit(f"above the limit: {', '.join(above)}")


main()
