#!/usr/bin/env python3
# Compares bfc-replay --plan with the limit that bisection finds: a real daemon for each limit, and a real
# replay. Both must be equal within 2 MiB, the step between limits.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: plan.py --bfcd BFCD --replay BFC-REPLAY [--scale F | --peak-mib N] [--cache on|off] [TRACE.csv ...]
#
# --device (or BFC_TEST_DEVICE) cuda-fd and cuda-ipc are for a GPU, or for the fake driver in LD_LIBRARY_PATH.
# Without a trace: generated ones, and on the host those of the folder BFC_TRACES, all scaled to --peak-mib. Each
# daemon makes memory up to its limit. Prints a line for each trace.
import argparse
import glob
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

MIB = 1 << 20
STEP = 2 * MIB  # limits are multiples of it


def run(command, **options):
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, **options)


def listens(path):
    with socket.socket(socket.AF_UNIX) as s:
        try:
            s.connect(path)
        except (FileNotFoundError, ConnectionRefusedError, PermissionError):  # its mode is set after its birth
            return False
    return True


class Tool:
    def __init__(self, arguments, folder):
        self.a = arguments
        self.folder = folder
        self.runs = []  # what each daemon for the trace did

    def replay(self, *arguments):
        return [self.a.replay, *arguments]

    def generate(self, name, seed):
        path = os.path.join(self.folder, f'{name}-{seed}.csv')
        with open(path, 'w', encoding='utf-8') as out:
            subprocess.run(self.replay('--generate', name, '--seed', str(seed)), stdout=out, check=True, timeout=600)
        return path

    def plan(self, trace, scale):
        done = run(self.replay('--plan', '--json', '--scale', repr(scale), '--cache', self.a.cache,
                               '--partition-config', self.config(256 * MIB), trace))
        if done.returncode != 0:
            sys.exit(f'{trace}: --plan failed with status {done.returncode}: {done.stderr}')
        return json.loads(done.stdout)

    def config(self, limit):
        path = os.path.join(self.folder, 'bfcd.yaml')
        mib = limit // MIB
        is_host = self.a.device == 'host'
        device = f'id: host\n    size: {mib}MiB' if is_host else 'id: cuda:0'
        share = {'host': '', 'cuda-fd': ', share: fd', 'cuda-ipc': ', share: cuda-ipc'}[self.a.device]
        with open(path, 'w', encoding='utf-8') as out:
            out.write(f'socket: {{path: {self.folder}/sock}}\nadmin_socket: {{path: {self.folder}/admin}}\n'
                      f'devices:\n  - {device}\n    partitions:\n'
                      f'      - {{name: plan, limit: {mib}MiB{share}}}\n'
                      f'tenants:\n  - name: plan\n    match: {{uid: [{os.getuid()}]}}\n'
                      f'    quotas: [{{partition: plan, limit: {mib}MiB}}]\n')
        return path

    def serves(self, trace, scale, limit):
        """Whether a daemon with this limit refuses nothing."""
        path = os.path.join(self.folder, 'sock')
        environment = dict(os.environ)
        if self.a.preload:
            environment['LD_PRELOAD'] = self.a.preload
        with open(os.path.join(self.folder, 'log'), 'w', encoding='utf-8') as log:
            daemon = subprocess.Popen([self.a.bfcd, '--config', self.config(limit)], stdin=subprocess.DEVNULL, stdout=log,
                                      stderr=log, env=environment)
        try:
            deadline = time.monotonic() + 120
            while not listens(path):
                if daemon.poll() is not None or time.monotonic() > deadline:
                    with open(os.path.join(self.folder, 'log'), encoding='utf-8') as log:
                        sys.exit(f'bfcd did not start: {log.read()}')
                time.sleep(0.005)
            done = run(self.replay('--socket', path, '--json', '--scale', repr(scale), '--cache', self.a.cache, trace))
            report = json.loads(done.stdout)
            if report['error']:
                sys.exit(f'{trace}: the replay failed: {report["error"]}')
            self.runs.append(f'{limit // MIB} MiB: {report["failure_message"] or "served"}')
            return report['failures'] == 0
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(timeout=120)
            for name in (path, path + '-admin'):
                if os.path.exists(name):
                    os.unlink(name)

    def serves_always(self, trace, scale, limit, n_runs=3):
        """One run can be served by chance: see bfcd.tools.plan."""
        return all(self.serves(trace, scale, limit) for _ in range(n_runs))

    def bisect(self, trace, scale, peak):
        """Without knowledge of the plan: from the peak of the blocks up in growing steps, then by bisection."""
        low = -(-peak // STEP) * STEP - STEP  # does not serve
        high = low + STEP
        stride = max(STEP, low // 64 // STEP * STEP)
        while not self.serves(trace, scale, high):
            low = high
            high += stride
            stride *= 2
        while high - low > STEP:
            middle = low + (high - low) // 2 // STEP * STEP
            if self.serves(trace, scale, middle):
                high = middle
            else:
                low = middle
        while not self.serves_always(trace, scale, high):
            high += STEP
        return high

    def compare(self, trace, scale):
        self.runs = []
        plan = self.plan(trace, scale)
        found = self.bisect(trace, scale, plan['peak_live_bytes'] + plan['reasons']['rounding_bytes'])
        difference = plan['limit_bytes'] - found
        print(f'{os.path.basename(trace)}: peak {plan["peak_live_bytes"]}, plan {plan["limit_bytes"] // MIB} MiB, '
              f'bisected {found // MIB} MiB, {difference / MIB:+g} MiB, '
              f'plan in {plan["seconds"]:.3f} s', flush=True)
        is_equal = abs(difference) <= STEP and self.is_exact(trace, scale, plan)
        if not is_equal:
            print('\n'.join(self.runs), flush=True)
        return is_equal

    def is_exact(self, trace, scale, plan):
        """The daemon serves the trace with the plan's limit, and not with the next lower one."""
        limit = plan['limit_bytes']
        least = plan['peak_live_bytes'] + plan['reasons']['rounding_bytes']
        if not self.serves(trace, scale, limit):
            print(f'{trace}: the daemon refuses with the plan, {limit // MIB} MiB')
            return False
        if limit - STEP >= least and self.serves_always(trace, scale, limit - STEP, 10):
            print(f'{trace}: the daemon serves with less than the plan, {limit // MIB - 2} MiB')
            return False
        return True


def scale_to(tool, trace, peak_mib):
    """Not enlarged: sizes would become rarer."""
    peak = tool.plan(trace, 1.0)['peak_live_bytes']
    return min(1.0, peak_mib * MIB / peak)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--bfcd', required=True)
    parser.add_argument('--replay', required=True)
    parser.add_argument('--device', default=os.environ.get('BFC_TEST_DEVICE', 'host'), choices=['host', 'cuda-fd', 'cuda-ipc'])
    parser.add_argument('--cache', default='on', choices=['on', 'off'])
    parser.add_argument('--scale', type=float)
    parser.add_argument('--peak-mib', type=float, default=64)
    parser.add_argument('--seconds', type=float, default=600, help='begin no further trace after so long')
    parser.add_argument('--preload', help='a library for the daemon, as one that makes no memory')
    parser.add_argument('traces', nargs='*')
    tool = Tool(parser.parse_args(), tempfile.mkdtemp(prefix='bfcd-plan-'))
    end = time.monotonic() + tool.a.seconds
    is_equal = True
    try:
        traces = tool.a.traces
        if not traces:
            traces = [tool.generate('transformer', 1), tool.generate('random', 2)]
            if os.environ.get('BFC_TRACES') and tool.a.device == 'host':
                traces += sorted(glob.glob(os.path.join(os.environ['BFC_TRACES'], '*.csv')))
        for trace in traces:
            if time.monotonic() > end:
                print(f'{trace}: left out, the time is over')
                continue
            scale = tool.a.scale
            if scale is None:
                scale = 1.0 if tool.a.traces else scale_to(tool, trace, tool.a.peak_mib)
            is_equal = tool.compare(trace, scale) and is_equal
    finally:
        shutil.rmtree(tool.folder, ignore_errors=True)
    if not is_equal:
        sys.exit('a plan differs from the bisected limit by more than 2 MiB')


main()
