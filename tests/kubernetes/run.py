#!/usr/bin/env -S python3 -B
# A real Kubernetes cluster with bfcd (cluster.py) and what it must show (cases.py). scripts/test-kubernetes --cluster calls this.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: run.py --build FOLDER --programs FOLDER [--seed N] [CASE...]       as root
#        run.py --up ...     leaves it up, for a person
#        run.py --down       ends what was left up, or by a killed run
#        run.py --list
# BFC_TEST_KEEP=1 leaves the logs of a run in which no case failed, too.
import argparse
import contextlib
import glob
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback

import cases
import cluster
from cluster import kill, parent_of, pids, read, run, wait_for, write

PREFIX = '/tmp/bfcd-kube-'
ROOT = os.path.realpath(os.path.join(os.path.dirname(os.path.realpath(__file__)), '..', '..'))


class Build:
    """The programs of bfcd."""

    def __init__(self, folder, image):
        self.folder, self.image = folder, image
        self.bfcd, self.bfcctl, self.exporter, self.client, self.fake_cuda, self.driver, self.chart_tool = (
            os.path.join(folder, name) for name in ('daemon/bfcd', 'ctl/bfcctl', 'ctl/bfc-exporter',
                                                    'tests/integration/container_client', 'tests/fake_cuda/libcuda.so.1',
                                                    'kubernetes/bfcd-dra', 'kubernetes/chart'))
        self.chart = os.path.join(ROOT, 'packaging/chart/bfcd')


# ---- outside of its namespaces -------------------------------------------------------


def start_of(pid):
    """A process is known by its pid and this."""
    try:
        return read(f'/proc/{pid}/stat').rpartition(')')[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ''


def lives(owner):
    return bool(owner) and start_of(owner[0]) == owner[1]


class Outside:
    """A cluster's folder and its first process, as the caller sees them."""

    def __init__(self, folder):
        self.folder = folder

    def state(self):
        try:
            return json.loads(read(f'{self.folder}/state.json'))
        except (FileNotFoundError, ValueError):
            return {}

    def link(self):
        """The network interface to the cluster, if it is kept."""
        return 'kube-' + os.path.basename(self.folder).removeprefix(os.path.basename(PREFIX))

    def start(self, arguments, is_kept):
        """is_kept: it outlives this process."""
        end_with_us = [] if is_kept else ['setpriv', '--pdeathsig', 'KILL']
        out = open(f'{self.folder}/up.log', 'w', encoding='utf-8') if is_kept else None  # pylint: disable=consider-using-with
        process = subprocess.Popen(
            [*end_with_us, 'unshare', '--mount', '--propagation=private', '--pid', '--net', '--uts', '--ipc', '--fork', '--kill-child',
             '--mount-proc', 'bash', '-c', '"$@" & wait $!', 'init', sys.executable, '-B', os.path.realpath(__file__), '--inside',
             self.folder, *arguments],
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT if is_kept else None, start_new_session=is_kept)
        us = os.getpid()
        write(f'{self.folder}/state.json', json.dumps({
            'first': [process.pid, start_of(process.pid)], 'owner': [] if is_kept else [us, start_of(us)], 'is_kept': is_kept}))
        return process

    def end(self):
        """All of it. Whether nothing is left."""
        first = self.state().get('first')
        if lives(first):
            kill(first[0])
            inner = [pid for pid in pids() if parent_of(pid) == first[0]]
            for pid in inner:
                kill(pid)
        # Closing connections would keep it for minutes.
        run(['ip', 'link', 'delete', self.link()])
        cgroup = '/' + os.path.basename(self.folder)
        with contextlib.suppress(TimeoutError):
            wait_for(lambda: cluster.remove_group(cgroup), f'end of the control groups {cgroup}')
        shutil.rmtree(self.folder, ignore_errors=True)
        if os.path.exists(self.folder):  # a process of it may still be ending
            time.sleep(1)
            shutil.rmtree(self.folder, ignore_errors=True)
        left = [self.folder] if os.path.exists(self.folder) else []
        left += [mount + cgroup for mount in cluster.hierarchies() if os.path.exists(mount + cgroup)]
        return left


def down(of_ended_only=False):
    """Ends clusters that were left up, and those whose script was killed."""
    status = 0
    for folder in glob.glob(PREFIX + '*'):
        there = Outside(folder)
        state = there.state()
        if lives(state.get('owner')) or of_ended_only and (state.get('is_kept') or not state):
            continue
        left = there.end()
        print(f'{folder}: ' + (f'left: {" ".join(left)}' if left else 'ended and removed'))
        status |= bool(left)
    return status


def outside(arguments, options):
    down(of_ended_only=True)
    there = Outside(tempfile.mkdtemp(prefix=PREFIX))
    os.chmod(there.folder, 0o755)
    is_up = False
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda n, _: sys.exit(128 + n))
    try:
        process = there.start(arguments, options.up)
        if not options.up:
            return process.wait()
        wait_for(lambda: os.path.exists(f'{there.folder}/up') or process.poll() is not None, 'cluster')
        if process.poll() is not None:
            print(read(f'{there.folder}/up.log'), end='')
            return 1
        connect(there, process.pid)
        is_up = True
        print(f'''A cluster of {len(cluster.NODES)} nodes is up. For example:
  export KUBECONFIG={there.folder}/host.conf PATH={options.programs}:$PATH
  kubectl get nodes,resourceslices
  {there.folder}/enter node1 {options.build}/ctl/bfcctl status      # a command on a node
Logs: {there.folder}/log, {there.folder}/node1/log. The end: scripts/test-kubernetes --cluster --down''')
        return 0
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if not is_up:
            left = there.end()
            if left:
                print(f'left: {" ".join(left)}')


def connect(there, pid):
    """A network interface to the cluster, and what a person needs."""
    inner = next(p for p in pids() if parent_of(p) == pid)
    name = there.link()
    cluster.must('ip', 'link', 'add', name, 'type', 'veth', 'peer', 'name', 'host', 'netns', str(inner))
    enter = ['nsenter', '--target', str(inner), '--mount', '--uts', '--ipc', '--net', '--pid']
    for words in ([*enter, 'ip', 'address', 'add', f'{cluster.OUR_ADDRESS}/30', 'dev', 'host'],
                  [*enter, 'ip', 'link', 'set', 'host', 'up'],
                  ['ip', 'address', 'add', f'{cluster.HOST_ADDRESS}/30', 'dev', name], ['ip', 'link', 'set', name, 'up']):
        cluster.must(*words)
    write(f'{there.folder}/host.conf', read(f'{there.folder}/admin.conf').replace(cluster.API_ADDRESS, cluster.OUR_ADDRESS), 0o600)
    holders = json.loads(read(f'{there.folder}/up'))
    write(f'{there.folder}/enter', f'''#!/bin/sh
# usage: enter NODE COMMAND...
case $1 in {' '.join(f'{n}) pid={p};;' for n, p in holders.items())} *) echo "usage: $0 {'|'.join(holders)} COMMAND..." >&2; exit 2;; esac
shift
exec {' '.join(enter)} nsenter --target "$pid" --mount --uts --ipc --net --pid "$@"
''', 0o755)


# ---- inside --------------------------------------------------------------------------


def inside(folder, options):
    it = cluster.Cluster(folder, Build(options.build, options.image), options.programs)
    start = time.monotonic()
    try:
        it.up()
    except Exception:  # pylint: disable=broad-except
        print(f'{"up":12} FAILED:', flush=True)
        traceback.print_exc()
        keep_logs(folder)
        return 1
    version = it.get('/version')['gitVersion']
    print(f'{"up":12} ok, {time.monotonic() - start:.0f} s: {len(it.nodes)} nodes of Kubernetes {version}; --seed {options.seed}',
          flush=True)
    if options.up:
        write(f'{folder}/up', json.dumps({name: node.holder.pid for name, node in it.nodes.items()}))
        while True:
            signal.pause()
    names = options.cases or list(cases.CASES)
    status, is_first = 0, True
    for name in names:
        status |= run_case(it, name, options.seed, is_first)
        is_first = False
    if status or os.environ.get('BFC_TEST_KEEP') == '1':
        keep_logs(folder)
    return status


def run_case(it, name, seed, is_first):
    start = time.monotonic()
    try:
        figures = cases.run_case(it, name, random.Random(f'{seed} {name}'))
        print(f'{name:12} ok, {time.monotonic() - start:.0f} s: {figures}', flush=True)
        return 0
    except cases.Skip as e:
        print(f'{name:12} not run here: {e}', flush=True)
        return 0
    except (cluster.Failed, TimeoutError) as e:
        print(f'{name:12} FAILED, {time.monotonic() - start:.0f} s, with --seed {seed}: {e}', flush=True)
    except Exception:  # pylint: disable=broad-except
        print(f'{name:12} FAILED, {time.monotonic() - start:.0f} s, with --seed {seed}:', flush=True)
        traceback.print_exc()
    with contextlib.suppress(Exception):
        cases.clean(it)
    return 1


def keep_logs(folder):
    where = folder.replace(PREFIX, PREFIX.rstrip('-') + '.log-')
    cluster.save_logs(folder, where)
    print(f'logs: {where}', flush=True)


def main():
    parser = argparse.ArgumentParser(usage='scripts/test-kubernetes --cluster [--up | --down | --list | [--seed N] [CASE...]]')
    parser.add_argument('--inside', help=argparse.SUPPRESS)
    parser.add_argument('--up', action='store_true')
    parser.add_argument('--down', action='store_true')
    parser.add_argument('--list', action='store_true')
    parser.add_argument('--seed', type=int, default=None)
    parser.add_argument('--build', default=os.path.join(ROOT, 'build-test'))
    parser.add_argument('--programs', default=None)
    parser.add_argument('--image', default='', help=argparse.SUPPRESS)
    parser.add_argument('cases', nargs='*')
    options = parser.parse_args()
    if options.list:
        for name, case in cases.CASES.items():
            print(f'{name:12} {" ".join(case.__doc__.split())}')
        return 0
    unknown = [name for name in options.cases if name not in cases.CASES]
    if unknown:
        parser.error(f'there is no case {" ".join(unknown)}; --list names them')
    if os.getuid() != 0:
        print('a cluster needs root, for namespaces, mounts and control groups')
        return 77
    if options.down:
        return down()
    if options.inside:
        return inside(options.inside, options)
    options.build = os.path.realpath(options.build)
    if 'upgrade' in (options.cases or cases.CASES) and not options.up:
        done = subprocess.run([os.path.join(ROOT, 'scripts/image'), os.path.join(options.build, 'kubernetes')], check=False,
                              stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            print(f'the image cannot be built: {done.stdout}')
            return 1
        options.image = done.stdout.splitlines()[-1]
    seed = options.seed if options.seed is not None else random.randrange(1 << 32)
    arguments = ['--build', options.build, '--programs', options.programs, '--image', options.image, '--seed', str(seed), *options.cases]
    return outside(arguments + (['--up'] if options.up else []), options)


if __name__ == '__main__':
    sys.exit(main())
