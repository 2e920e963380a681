#!/usr/bin/env -S python3 -B
# Upgrades and downgrades of bfcd under load, between two builds: their daemons are ended and killed in turn, over the same
# sockets and keepers, while jobs with both libraries work. After each exchange the jobs' blocks have their contents, and
# sessions, charges and leases are what they were. The keepers are those of the build that ran first.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: two-builds.py OLD NEW FAKE-CUDA ROUNDS     TAP on standard output; OLD, NEW: prefixes that scripts/upgrade-test makes
import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / 'integration'))
from checks import LIMIT_S, finish, listens, ok, read, run, wait_for, write  # noqa: E402

OLD, NEW, FAKE_CUDA = map(pathlib.Path, sys.argv[1:4])
ROUNDS = int(sys.argv[4])
NAMES = {OLD: 'old', NEW: 'new'}
LOAD_S = 0.5  # between exchanges
DEVICES = {'host': ('host', 'size: 768MiB', ''), 'cuda-fd': ('cuda:0', 'headroom: 0', 'share: fd, '),
           'cuda-ipc': ('cuda:0', 'headroom: 0', 'share: cuda-ipc, ')}
CONFIG = '''
socket: {{path: {folder}/bfcd.sock, mode: "0666"}}
admin_socket: {{path: {folder}/admin.sock, mode: "0600"}}
lease_socket: {{path: {folder}/lease.sock}}
timeouts: {{reclaim: 60s, quarantine: 60m}}
devices:
  - id: {device}
    {key}
    partitions: [{{{share}name: train, limit: 512MiB, growth: on-demand}}]
tenants:
  - {{name: red, match: {{uid: [{uid}]}}, quotas: [{{partition: train, limit: 384MiB}}]}}
  - {{name: blue, match: {{uid: [{uid}]}}, quotas: [{{partition: train, limit: 32MiB}}]}}
  - {{name: load, match: {{uid: [{uid}]}}, quotas: [{{partition: train, limit: 128MiB}}]}}
  - {{name: pod, match: {{uid: [65533]}}, quotas: [{{partition: train, limit: 64MiB}}]}}
'''
TRACE = 'id,lower,upper,size\n' + ''.join(f'{i},{2 * i},{2 * i + 1 + i % 40},{1 + i * 7919 % 300000}\n' for i in range(500))
COMMANDS = ('status', 'partitions', 'tenants', 'sessions', 'blocks', 'extents', 'shared', 'keep', 'waiting', 'refusals',
            'grants', 'lease list', 'config')


def knows_sockets(build):
    return '--socket-name' in run([build / 'bin/bfcctl', 'lease', 'create', '--help']).stdout


class Counts:
    """One line for each name, with how often it was looked at, and the first times that it did not hold."""

    def __init__(self, title):
        self.title, self.checks = title, {}

    def add(self, name, condition, got='', n=1):
        check = self.checks.setdefault(name, [0, []])
        check[0] += n
        if not condition:
            check[1].append(str(got))
        return condition

    def report(self):
        for name, (n, failures) in self.checks.items():
            ok(not failures, f'{self.title}: {name}: {n}', '\n'.join(failures[:3]))


class Group:
    """A control group, if one can be made here."""

    def __init__(self, name):
        for root in ('/sys/fs/cgroup/systemd', '/sys/fs/cgroup/unified', '/sys/fs/cgroup'):
            self.name, self.path = f'/{name}', pathlib.Path(root) / name
            with contextlib.suppress(OSError):
                self.path.mkdir()
                (self.path / 'cgroup.procs').read_text()
                return
            with contextlib.suppress(OSError):
                self.path.rmdir()
        self.path = None

    def remove(self):
        if self.path:
            wait_for(self.is_removed, f'end of the processes in {self.path}')

    def is_removed(self):
        with contextlib.suppress(OSError):
            self.path.rmdir()
        return not self.path.exists()


class Job:
    """tests/upgrade/job.py, which waits to be started. lease: its session is in it."""

    def __init__(self, site, kind, build, name, peer='-', cache='off', socket=None):
        self.name, self.kind, self.cache, self.lease = name, kind, cache, None
        self.last = {}
        self.errors = open(site.folder / f'{name}.err', 'w+', encoding='utf-8')
        self.child = subprocess.Popen(
            [sys.executable, '-B', HERE / 'job.py', kind, socket or site.folder / 'bfcd.sock', name, peer, cache], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
            env=site.environment | {'BFC_LIBRARY': str(build / 'lib/libbfcclient.so.0'), 'PYTHONPATH': str(build / 'python')})

    def say(self, line):
        with contextlib.suppress(BrokenPipeError):
            print(line, file=self.child.stdin, flush=True)

    def answer(self):
        line = self.child.stdout.readline()
        if not line:
            self.errors.seek(0)
        self.last = json.loads(line) if line else {'error': f'it has ended: {self.errors.read()}'}
        return self.last

    def end(self):
        """What it says at last."""
        self.say('end')
        return self.answer()

    def kill(self):
        self.child.kill()
        self.child.wait()
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.close()
        self.child.stdout.close()
        self.errors.close()


class Site:
    """A folder with the sockets and keepers of one daemon after the other."""

    def __init__(self, device, first):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix='bfcd-upgrade-', dir='/tmp'))
        self.environment = os.environ | {'FAKE_CUDA_STATE': str(self.folder / 'cuda'), 'FAKE_CUDA_DEVICES': '768MiB',
                                         'LD_LIBRARY_PATH': str(FAKE_CUDA)}
        self.environment.pop('JOURNAL_STREAM', None)
        self.counts = Counts(f'{device}, {NAMES[first]} keepers')
        self.jobs, self.replays, self.daemon, self.build = [], [], None, first
        self.log = self.folder / 'log'
        self.group = Group(self.folder.name)
        name, key, share = DEVICES[device]
        write(self.folder / 'bfcd.yaml', CONFIG.format(folder=self.folder, device=name, key=key, share=share, uid=os.getuid()))

    # ---- daemons ----

    def start(self, build):
        self.build = build
        with open(self.log, 'a', encoding='utf-8') as log:
            self.daemon = subprocess.Popen([build / 'sbin/bfcd', '--config', self.folder / 'bfcd.yaml'], env=self.environment,
                                           stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log)
        wait_for(lambda: listens(str(self.folder / 'admin.sock')) or self.daemon.poll() is not None, 'daemon')
        if self.daemon.poll() is not None:
            raise RuntimeError(f'the {NAMES[build]} bfcd has ended: {read(self.log)}')

    def end_daemon(self, number):
        self.daemon.send_signal(number)
        status = self.daemon.wait(LIMIT_S)
        self.counts.add('daemons end', status in (0, -signal.SIGKILL), status)

    def exchange(self, build, number):
        """The other daemon, in the place of this one."""
        self.end_daemon(number)
        self.start(build)
        name = f'{"upgrades" if build == NEW else "downgrades"} by {number.name}'
        self.counts.add(name, True)

    def ctl(self, *words, build=None, socket='admin.sock'):
        done = run([(build or self.build) / 'bin/bfcctl', '--socket', self.folder / socket, *map(str, words)])
        if done.returncode != 0:
            raise RuntimeError(f'bfcctl {words}: {done.stderr}')
        return done.stdout

    def rows(self, what):
        return json.loads(self.ctl('--json', *what.split()))[what.split()[0] + 's' * (what == 'lease list')]

    def take_errors(self):
        """Of the log, since the last time."""
        lines = read(self.log).splitlines()
        self.log.write_text('')
        return [line for line in lines if 'error:' in line]

    # ---- jobs ----

    def add(self, kind, build, i, lease=(), **options):
        job = Job(self, kind, build, f'{NAMES[build]}-{kind}-{i}', **options)
        self.jobs.append(job)
        if lease:
            self.lend(job, *lease)
        job.say('start')
        return job

    def lend(self, job, socket, kind):
        job.lease = f'lease-{job.name}'
        words = ['--pid', job.child.pid]
        if kind == 'cgroup':
            (self.group.path / 'cgroup.procs').write_text(str(job.child.pid))
            words = ['--cgroup', self.group.name]
        self.ctl('lease', 'create', job.lease, '--tenant', 'red', '--partition', 'train', '--limit', '64MiB', *words,
                 socket=socket)

    def lend_socket(self):
        self.ctl('lease', 'create', 'pod', '--tenant', 'pod', '--partition', 'train', '--limit', '64MiB', '--socket-name', 'pod')

    def add_jobs(self):
        for build in (OLD, NEW):
            self.add('blocks', build, 'cached', cache='on')
            self.add('blocks', build, 'plain')
            self.add('blocks', build, 'in-pid', lease=('admin.sock', 'pid'))
            self.add('shares', build, 0, peer=f'{NAMES[NEW if build == OLD else OLD]}-shares-0')
            self.add('waits', build, 0)
            self.add_replay(build)
        if self.group.path:
            self.add('blocks', OLD, 'in-group', lease=('lease.sock', 'cgroup'))
        if knows_sockets(OLD) and knows_sockets(NEW):
            self.lend_socket()
            self.add('pod', OLD, 0, socket=self.folder / 'leases/pod/bfcd.sock').lease = 'pod'
        self.ctl('lease', 'create', 'later', '--tenant', 'blue', '--partition', 'train', '--limit', '2MiB', '--cgroup', '/bfcd-none')
        for job in self.jobs:
            self.counts.add('jobs begin', 'version' in job.answer(), f'{job.name}: {job.last}')

    def add_replay(self, build):
        trace = self.folder / 'trace.csv'
        if not trace.exists():
            trace.write_text(TRACE)
        self.replays.append(subprocess.Popen(
            [build / 'bin/bfc-replay', '--socket', self.folder / 'bfcd.sock', '--tenant', 'load', '--repeat', '1000000', '--verify',
             '--json', trace], env=self.environment, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT))

    def pause(self):
        """The jobs that answer with what they have."""
        for job in self.jobs:
            job.say('state')
        well = [job for job in self.jobs if 'error' not in job.answer()]
        self.counts.add('jobs go on', len(well) == len(self.jobs), [(j.name, j.last) for j in self.jobs if j not in well],
                        len(well))
        return well

    def go_on(self):
        for job in self.jobs:
            job.say('go')

    # ---- checks ----

    def check(self, leases):
        """After an exchange. leases: what they were before."""
        well, add = self.pause(), self.counts.add
        add('blocks with their contents', not any(job.last['wrong'] for job in well),
            [(j.name, j.last) for j in well if j.last['wrong']], sum(job.last['blocks'] for job in well))
        n_replays = sum(replay.poll() is None for replay in self.replays)
        wait_for(lambda: self.rows('sessions') and all(row['state'] == 'live' for row in self.rows('sessions')), 'resumed sessions')
        add('sessions of jobs and of bfc-replay', len(self.rows('sessions')) == len(well) + n_replays, self.rows('sessions'),
            len(well) + n_replays)
        rows = {row['name']: row for row in self.rows('sessions')}
        for job in well:
            self.check_session(job, rows[job.name])
        direct = {row['tenant']: row['bytes_direct'] for row in self.rows('tenants')}
        expected = sum(job.last['direct'] for job in well if job.kind == 'blocks')
        add('direct charges of the tenant', direct['red'] == expected, (direct, expected))
        after = self.lease_words()
        add('leases as before', after == leases, f'{leases}\n{after}', len(after))
        self.check_tools()
        add('errors in the log', not (errors := self.take_errors()), '\n'.join(errors), 0)
        self.go_on()

    def check_session(self, job, row):
        add, what = self.counts.add, (job.name, job.last, row)
        add("sessions' direct charges", job.last['direct'] == job.last['counted_direct'] == row['bytes_direct'], what)
        add("sessions' leases", row.get('leases', []) == ([job.lease] if job.lease else []), what)
        if job.kind in ('blocks', 'pod') and job.cache == 'off':
            add("sessions' blocks and bytes", (row['num_blocks'], row['bytes_in_use']) == (job.last['blocks'], job.last['bytes']),
                what)
        elif job.cache == 'on':
            add("sessions' blocks and bytes", row['bytes_in_use'] >= job.last['bytes'], what)

    def lease_words(self):
        kept = 'name', 'tenant', 'partition', 'bytes_limit', 'match_kind', 'match', 'state', 'made_by'
        return sorted(tuple(row[key] for key in kept) for row in self.rows('lease list'))

    def check_tools(self):
        for build in (OLD, NEW):
            for command in COMMANDS:
                try:
                    json.loads(self.ctl('--json', *command.split(), build=build))
                    said = ''
                except (RuntimeError, ValueError) as e:
                    said = str(e)
                self.counts.add('commands of both bfcctl', not said, said)
            metrics = self.ctl('metrics', build=build)
            self.counts.add('commands of both bfcctl', 'bfcd_' in metrics, metrics)

    def rounds(self, n):
        numbers = [signal.SIGTERM, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]
        for i in range(n):
            time.sleep(LOAD_S * (0.5 + random.random()))
            leases = self.lease_words()
            self.exchange(NEW if self.build == OLD else OLD, numbers[i % 4])
            self.check(leases)

    def downgrade_with_socket(self):
        """To a build that does not know sockets of leases, and back: the lease and its job end, the others do not."""
        if self.build == OLD:
            self.exchange(NEW, signal.SIGTERM)
        leases, add = self.lease_words(), self.counts.add
        self.take_errors()
        self.lend_socket()
        job = Job(self, 'pod', NEW, 'pod', socket=self.folder / 'leases/pod/bfcd.sock')
        try:
            job.say('start')
            add('a job at a socket that the old build does not know begins', 'version' in job.answer(), job.last)
            wait_for(lambda: any(row['bytes_in_use'] for row in self.rows('lease list') if row['name'] == 'pod'), 'blocks of the job')
            self.exchange(OLD, signal.SIGTERM)
            errors = self.take_errors()
            add('the old build rejects only the record of the lease by a socket', len(errors) == 1 and 'lease' in errors[0] and
                'what it matches is invalid' in errors[0], errors)
            self.check(leases)
            self.exchange(NEW, signal.SIGTERM)
            self.check(leases)
            job.say('state')
            add('its job is told that its session has ended', 'Disconnected' in job.answer().get('error', ''), job.last)
        finally:
            job.kill()
        self.lend_socket()
        job = Job(self, 'pod', NEW, 'pod', socket=self.folder / 'leases/pod/bfcd.sock')
        try:
            job.say('start')
            add('the lease can be made again, and has a job', 'version' in job.answer(), job.last)
            add('the lease can be made again, and has a job', 'error' not in job.end(), job.last)
        finally:
            job.kill()
        self.ctl('lease', 'end', 'pod')

    def finish(self):
        """All jobs end well, and nothing is left."""
        for job in self.jobs:
            said = job.end()
            self.counts.add('jobs end without blocks', not said.get('error', said.get('wrong') or said.get('blocks')),
                            f'{job.name}: {said}')
            self.counts.add('steps of jobs', True, n=said.get('done', 0))
        for replay in self.replays:
            replay.send_signal(signal.SIGTERM)
            said = replay.communicate(timeout=LIMIT_S)[0]
            result = json.JSONDecoder().raw_decode(said[said.find('{'):])[0] if '{' in said else {'error': 'no result'}
            self.counts.add('operations of bfc-replay, without a failure', result.get('error', '') is None and not any(
                result.get(key) for key in ('failures', 'corruptions', 'blocks_left')), said, result.get('operations', 0))
        for job in self.jobs:
            job.kill()
        wait_for(lambda: not self.rows('sessions'), 'end of sessions')
        wait_for(lambda: not any(row['bytes_in_use'] or row['bytes_direct'] for row in self.rows('tenants')), 'end of charges')
        left = [row for row in self.rows('tenants') if row['bytes_in_use'] or row['bytes_direct'] or row['bytes_unreclaimed']]
        self.counts.add('nothing is charged in the end', not left, left)

    def stop(self):
        for job in self.jobs:
            job.kill()
        for replay in self.replays:
            if replay.poll() is None:
                replay.kill()
            replay.communicate()
        if self.daemon and self.daemon.poll() is None:
            self.daemon.kill()
            self.daemon.wait()
        run([self.build / 'sbin/bfcd', '--stop-keepers', self.folder / 'admin.sock'], env=self.environment)
        self.group.remove()
        shutil.rmtree(self.folder)


def exchange_on(device, first):
    site = Site(device, first)
    try:
        site.start(first)
        site.add_jobs()
        site.rounds(ROUNDS)
        if knows_sockets(NEW) and not knows_sockets(OLD):
            site.downgrade_with_socket()
        site.finish()
    except Exception as e:
        site.counts.add('it runs to its end', False, f'{type(e).__name__}: {e}\n{read(site.log)[-3000:]}')
    finally:
        site.stop()
        site.counts.report()


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for device in os.environ.get('BFC_TEST_DEVICE', ' '.join(DEVICES)).split():
        for first in (OLD, NEW):
            exchange_on(device, first)
    return finish()


if __name__ == '__main__':
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
