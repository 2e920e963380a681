#!/usr/bin/env -S python3 -B
# Plans: what they say holds, what cannot be planned, and what is left of their daemons: nothing. tests/bench/plan.py
# compares them with the limits that daemons with memory need.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: check-plan.py BFC-REPLAY     TAP on standard output
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile

from checks import finish, ok, run, wait_for, write

REPLAY = sys.argv[1]
MIB = 1 << 20


class Plans:
    """In a folder of their own, which has all that they make for a time."""

    def __init__(self, folder):
        self.trace = os.path.join(folder, 't.csv')
        self.config = os.path.join(folder, 'bfcd.yaml')
        self.own = os.path.join(folder, 'own')
        os.mkdir(self.own)
        self.environment = dict(os.environ, TMPDIR=self.own)

    def run(self, *arguments, **variables):
        environment = dict(self.environment, **variables)
        return run([REPLAY, '--plan', '--json', *arguments, self.trace], env=environment, stdin=subprocess.DEVNULL)

    def find(self, *arguments, **variables):
        done = self.run(*arguments, **variables)
        if done.returncode != 0:
            return {'failed': done.stderr}
        return json.loads(done.stdout)

    def find_in(self, device, place, *arguments, quota=''):
        size = '{size: 512GiB, ' if device == 'host' else '{'
        write(self.config, f'''devices: [{size}id: "{device}", partitions: [{{name: p, limit: 512GiB, {place}}}]}}]
tenants: [{{name: t, match: {{uid: [{os.getuid()}]}}, quotas: [{{partition: p, limit: 512GiB{quota}}}]}}]
''')
        return self.find('--partition-config', self.config, *arguments)

    def daemons(self):
        """Those that run."""
        found = []
        for pid in filter(str.isdigit, os.listdir('/proc')):
            try:
                with open(f'/proc/{pid}/cmdline', 'rb') as f:
                    words = f.read().split(b'\0')
            except OSError:
                continue
            if words[0] == b'bfcd' and any(self.own.encode() in word for word in words):
                found.append(int(pid))
        return found

    def leaves_nothing(self, name):
        ok(not self.daemons() and not os.listdir(self.own), f'{name}: no daemon and no file is left',
           f'{self.daemons()} {os.listdir(self.own)}')


def equals(plan, name, **expected):
    got = {key: plan['reasons'].get(key, plan.get(key)) if 'reasons' in plan else plan for key in expected}
    ok(got == expected, name, f'{got}, not {expected}')


def check_sums(p):
    write(p.trace, run([REPLAY, '--generate', 'random', '--seed', '3']).stdout)
    for device, share in (('host', 'fd'), ('cuda:0', 'fd'), ('cuda:0', 'cuda-ipc')):
        for cache in ('on', 'off'):
            name = f'{device}, {share}, cache {cache}'
            plan = p.find_in(device, f'share: {share}' if device != 'host' else 'growth: on-demand', '--cache', cache)
            if 'failed' in plan:
                ok(False, name, plan)
                continue
            reasons = plan['reasons']
            ok(plan['limit_bytes'] == plan['peak_live_bytes'] + sum(reasons.values()), f'{name}: the sum', plan)
            ok(plan['peak_live_bytes'] + reasons['rounding_bytes'] <= plan['peak_charged_bytes'] <= plan['limit_bytes'],
               f'{name}: the charge', plan)
            ok(cache == 'on' or reasons['cache_bytes'] == 0, f'{name}: what the cache costs', plan)
    p.leaves_nothing('plans')


def check_limits(p):
    # One block, which needs no more than its extents.
    write(p.trace, 'id,lower,upper,size\n0,0,1,5242880\n')
    equals(p.find(), 'one block', limit_bytes=6 * MIB)
    equals(p.find_in('host', 'growth: preallocate'), 'one block, preallocated', limit_bytes=6 * MIB)
    # The peak is no multiple of the step with which the region is searched.
    write(p.trace, 'id,lower,upper,size\n0,0,1,52428800\n')
    equals(p.find(), 'no gaps', limit_bytes=50 * MIB, placement_bytes=0, extent_bytes=0)
    # Blocks 0 and 2 are freed around block 1, so block 3 does not fit into a region of the peak's 3 MiB.
    write(p.trace, 'id,lower,upper,size\n0,0,1,1048576\n1,0,2,1048576\n2,0,1,1048576\n3,1,2,2097152\n')
    equals(p.find(), 'gaps', peak_live_bytes=3 * MIB, placement_bytes=MIB)
    # A block of 1 byte is cut from a slab of 2 MiB, in which there is room for the other block, too. As a block of the
    # daemon that needs an extent of its own. Without the column flags a tag is a label only.
    for text, mib in (('id,lower,upper,size,tag\n0,0,9,1,\n1,1,9,1572864,w\n', 2),
                      ('id,lower,upper,size,tag,flags\n0,0,9,1,,0\n1,1,9,1572864,w,0\n', 4),
                      ('id,lower,upper,size,flags\n0,0,9,1,0\n1,1,9,1572864,2\n', 4)):
        write(p.trace, text)
        equals(p.find(), f'{mib} MiB for {text.split()[0]}', limit_bytes=mib * MIB)
    # More than any machine has.
    write(p.trace, 'id,lower,upper,size\n0,0,9,274877906944\n1,1,9,1\n')
    equals(p.find('--cache', 'off'), '256 GiB', limit_bytes=(256 << 30) + 2 * MIB)
    # With cuda-ipc a large block has its own extent, and preallocated memory is one extent. From 20 GiB on a GPU's
    # extents begin with 16 MiB.
    write(p.trace, 'id,lower,upper,size\n0,0,1,67108864\n')
    equals(p.find(), 'extents of the host', largest_extent_bytes=2 * MIB)
    equals(p.find_in('cuda:0', 'share: fd'), 'extents of a GPU', largest_extent_bytes=2 * MIB)
    equals(p.find('--share', 'cuda-ipc'), 'extents of cuda-ipc', largest_extent_bytes=64 * MIB)
    plan = p.find_in('cuda:0', 'share: cuda-ipc, growth: preallocate')
    equals(plan, 'a preallocated extent', largest_extent_bytes=plan.get('limit_bytes'))
    write(p.trace, 'id,lower,upper,size\n0,0,1,22548578304\n')
    equals(p.find_in('cuda:0', 'share: fd', '--cache', 'off'), '21 GiB of a GPU', limit_bytes=21 << 30)


def check_variables(p):
    write(p.trace, run([REPLAY, '--generate', 'random', '--seed', '3']).stdout)
    names = ('PARTITION', 'TENANT', 'SOCKET', 'INHERIT', 'CACHE', 'RETURN_MS', 'WAIT_MS', 'TRACE')
    plans = [p.find(), p.find(**{f'BFC_{name}': 'off' for name in names})]
    for plan in plans:
        for key in ('seconds', 'replays'):  # one that is served by chance takes further ones
            plan.pop(key, None)
    ok(plans[0] == plans[1] and 'limit_bytes' in plans[0], 'no variable changes a plan', plans)


def check_failures(p):
    plan = p.find_in('host', 'growth: on-demand', '--cache', 'off', quota=', max_blocks: 20')
    ok('no limit serves the trace: ' in plan.get('failed', '') and 'max_blocks is 20' in plan['failed'],
       'what is refused for another reason than the limit has no plan', plan)
    done = p.run(TMPDIR=os.path.join(p.own, 'none'))
    ok(done.returncode == 1 and 'No such file' in done.stderr, 'no folder for the sockets', done.stderr)
    long = os.path.join(p.own, 'x' * 100)
    os.mkdir(long)
    done = p.run(TMPDIR=long)
    ok(done.returncode == 0, 'a folder whose path is too long for a socket', done.stderr)
    os.rmdir(long)
    copies = os.path.join(os.path.dirname(p.own), 'copies')
    os.mkdir(copies)
    copy = shutil.copy(REPLAY, copies)
    alone = dict(p.environment, PATH=copies)
    done = run([copy, '--plan', p.trace], env=alone, stdin=subprocess.DEVNULL)
    ok(done.returncode == 1 and 'in the Python package bfcd' in done.stderr, 'no bfcd-tools', done.stderr)
    shutil.copy(os.path.join(os.path.dirname(REPLAY), 'bfcd-tools'), copies)
    os.symlink(sys.executable, os.path.join(copies, 'python3'))
    done = run([copy, '--plan', p.trace], env=alone, stdin=subprocess.DEVNULL)
    ok(done.returncode == 1 and 'bfcd cannot be run: No such file' in done.stderr, 'no bfcd', done.stderr)
    p.leaves_nothing('failures')


def check_end(p, number):
    """SIGINT as by a terminal."""
    name = number.name
    with subprocess.Popen([REPLAY, '--plan', '--cache', 'off', p.trace], env=p.environment, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as plan:
        wait_for(p.daemons, 'daemon')
        os.killpg(plan.pid, number)
        _, errors = plan.communicate(timeout=600)
    if number == signal.SIGKILL:
        wait_for(lambda: not p.daemons(), 'end of the daemon')
        ok(True, f'{name}: the daemon ends')
    else:
        ok(plan.returncode == 1 and 'no plan: Interrupted' in errors, name, f'{plan.returncode} {errors}')
        p.leaves_nothing(name)


def check_link(p):
    """Where others can write the parent folder, the plan's own can be exchanged for a link."""
    kept = os.path.join(os.path.dirname(p.own), 'kept')
    os.mkdir(kept)
    write(os.path.join(kept, 'file'), '')
    with subprocess.Popen([REPLAY, '--plan', '--cache', 'off', p.trace], env=p.environment, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as plan:
        def exchange():
            os.kill(plan.pid, signal.SIGSTOP)
            found = os.listdir(p.own) if p.daemons() else []
            for name in found:
                path = os.path.join(p.own, name)
                os.rename(path, f'{kept}.{name}')
                os.symlink(kept, path)
            if found:
                os.kill(plan.pid, signal.SIGINT)
            os.kill(plan.pid, signal.SIGCONT)
            return found
        wait_for(exchange, 'daemon')
        plan.communicate(timeout=600)
    ok(os.listdir(kept) == ['file'], 'what a link in the place of the folder names stays')
    for name in os.listdir(p.own):
        os.unlink(os.path.join(p.own, name))


def check_lost(p):
    """The daemon is killed, as for lack of memory."""
    with subprocess.Popen([REPLAY, '--plan', '--cache', 'off', p.trace], env=p.environment, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as plan:
        while plan.poll() is None:  # each daemon: one may have ended just now
            for pid in p.daemons():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        _, errors = plan.communicate()
    ok(plan.returncode == 1 and 'no plan: ' in errors, 'a daemon that is killed', errors)


with tempfile.TemporaryDirectory(prefix='bfcd-rig-') as root:
    plans = Plans(root)
    check_sums(plans)
    check_limits(plans)
    check_variables(plans)
    check_failures(plans)
    # From here on a plan takes seconds.
    write(plans.trace, 'id,lower,upper,size\n' + ''.join(f'{i},{i},{i + 300},4096\n' for i in range(200000)))
    check_lost(plans)
    check_link(plans)
    for s in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        check_end(plans, s)
sys.exit(finish())
