#!/usr/bin/env -S python3 -B
# integrations/slurm with a real munged, slurmctld and slurmd, and a real daemon. All files are in a folder of its own
# below /tmp and all ports are free ones, so it disturbs no other Slurm. Jobs run as the users games and news, which
# Debian has.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: check-slurm.py BFCD BFCCTL LIBBFCCLIENT SPANK-PLUGIN       as root
#
# BFC_TEST_KEEP=1 leaves the folder with the logs. Exits with 77 without root or the Debian packages munge, slurmctld and
# slurmd. With slurmdbd and mariadb-server, it also looks at the records of sacct.
import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

from checks import finish, free_ports, listens, ok, read, run, wait_for, write

ROOT = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
SLURM = os.path.join(ROOT, 'integrations', 'slurm')
MIB = 1 << 20
USER, OTHER = 'games', 'news'

SOCKETS = '''
socket: {{path: {folder}/client.sock}}
admin_socket: {{path: {folder}/admin.sock}}
'''
BFCD_YAML = '''
devices:
  - id: host
    size: 1GiB
    partitions:
      - {name: train, limit: 1GiB}
tenants:
  - name: players
    match: {user: [games]}
    quotas:
      - {partition: train, limit: 1GiB}
'''

SLURM_CONF = '''
ClusterName=bfctest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={slurmctld_port}
SlurmdPort={slurmd_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=bfcd
JobSubmitPlugins=lua
PlugStackConfig={folder}/plugstack.conf
KillWait=2
ReturnToService=2
SchedulerParameters=sched_min_interval=0,bf_interval=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={slurmd_port} CPUs=8 {gres}
PartitionName=main Nodes=ALL Default=YES MaxTime=60
'''

ACCOUNTING = '''
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
'''

SLURMDBD_CONF = '''
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database_port}
StorageUser=root
StoragePass=none
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
'''

JOB_SUBMIT = '''
dofile("{slurm}/bfcd.lua")
function slurm_job_submit(job_desc, part_list, submit_uid)
   return bfcd_job_submit(job_desc)
end
function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
   return slurm.SUCCESS
end
return slurm.SUCCESS
'''

# usage: job.py [--until FILE] MIB...
JOB = '''#!/usr/bin/python3
import os, sys, time
sys.path.insert(0, "{folder}")
os.environ["BFC_LIBRARY"] = "{folder}/libbfcclient.so.0"
import bfcd
sizes, until = sys.argv[1:], None
if sizes[0] == "--until":
    until, sizes = sizes[1], sizes[2:]
client, blocks = bfcd.connect(cache=False), []
print("pid", os.getpid(), "parent", os.getppid(), "tenant", client.tenant, flush=True)
for mib in sizes:
    try:
        blocks.append(client.malloc(int(mib) << 20))
        print("has", mib, flush=True)
    except bfcd.Error as e:
        print("refused:", e, flush=True)
while until and not os.path.exists(until):
    time.sleep(0.1)
print("done", flush=True)
'''


def groups():
    """The control groups of jobs."""
    return {f'{where}/{f}' for where, folders, _ in os.walk('/sys/fs/cgroup') for f in folders if f.startswith('bfcd-job-')}


def is_running(pid):
    try:
        return read(f'/proc/{pid}/stat').rpartition(')')[2].split()[0] != 'Z'
    except (FileNotFoundError, ProcessLookupError):
        return False


class Rig:
    """The daemons. Each is a process of ours, so its end is seen."""

    def __init__(self, bfcd, bfcctl, library, plugin):
        self.folder = tempfile.mkdtemp(prefix='bfc-slurm-', dir='/tmp')
        os.chmod(self.folder, 0o755)
        for name, mode in (('state', 0o700), ('jobs', 0o700), ('spool', 0o755), ('out', 0o777), ('bin', 0o755)):
            os.mkdir(self.path(name))
            os.chmod(self.path(name), mode)
        # The users may not be able to read the build's folder.
        for source, name in ((bfcctl, 'bin/bfcctl'), (library, 'libbfcclient.so.0'), (plugin, 'spank_bfcd.so'),
                             (os.path.join(SLURM, 'bfcd-slurm'), 'bin/bfcd-slurm')):
            shutil.copy(os.path.realpath(source), self.path(name))
            os.chmod(self.path(name), 0o755)
        shutil.copytree(os.path.join(ROOT, 'python', 'bfcd'), self.path('bfcd'),
                        ignore=shutil.ignore_patterns('__pycache__'))
        os.chmod(self.path('bfcd'), 0o755)
        write(self.path('job.py'), JOB.format(folder=self.folder), 0o755)
        write(self.path('bfcd.yaml'), SOCKETS.format(folder=self.folder) + BFCD_YAML)
        self.bfcd_program = bfcd
        self.processes = {}
        self.has_accounting = all(map(shutil.which, ('slurmdbd', 'mariadbd', 'mariadb-install-db')))
        self.of_others = groups()
        self.env = {**os.environ, 'SLURM_CONF': self.path('slurm.conf'), 'PYTHONDONTWRITEBYTECODE': '1'}
        for name in list(self.env):
            if name.startswith(('BFC_', 'SLURM_', 'SBATCH_')) and name != 'SLURM_CONF':
                del self.env[name]

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def start(self, name, command):
        with open(self.path(f'{name}.out'), 'a', encoding='utf-8') as out:
            self.processes[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out,
                                                    stderr=subprocess.STDOUT, env=self.env)

    def stop(self, name):
        process = self.processes.pop(name, None)
        if process is None:
            return
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def start_bfcd(self):
        self.start('bfcd', [self.bfcd_program, '--config', self.path('bfcd.yaml')])
        wait_for(lambda: self.ctl('status', check=False), 'bfcd')

    def configure(self, **arguments):
        arguments = {'partition': 'train', 'client': self.path('client.sock'), 'admin': self.path('admin.sock'),
                     'bfcctl': self.path('bin/bfcctl'), 'helper': self.path('bin/bfcd-slurm'),
                     'state': self.path('jobs'), **arguments}
        write(self.path('plugstack.conf'), f'required {self.path("spank_bfcd.so")} '
              + ' '.join(f'{k}={v}' for k, v in arguments.items()) + '\n')

    def start_slurm(self):
        lines = run([self.path('bin/bfcd-slurm'), 'gres', f'admin={self.path("admin.sock")}',
                     f'bfcctl={self.path("bin/bfcctl")}'], env={**self.env, 'SLURMD_NODENAME': 'n1'})
        ok('Name=bfcd Type=train Count=1024' in lines.stdout, 'bfcd-slurm gres prints the partition',
           lines.stdout + lines.stderr)
        gres = re.search(r'\bGres=\S+', lines.stdout)[0]
        ports = free_ports(4)
        host = socket.gethostname().split('.')[0]
        write(self.path('gres.conf'), lines.stdout)
        write(self.path('job_submit.lua'), JOB_SUBMIT.format(slurm=SLURM))
        write(self.path('slurm.conf'), SLURM_CONF.format(host=host, folder=self.folder, slurmctld_port=ports[0],
                                                         slurmd_port=ports[1], gres=gres))
        with open(self.path('munge.key'), 'wb') as f:
            f.write(os.urandom(1024))
        os.chmod(self.path('munge.key'), 0o400)
        self.start('munged', ['munged', '--foreground', '--force', f'--key-file={self.path("munge.key")}',
                              f'--socket={self.path("munge.socket")}', f'--pid-file={self.path("munge.pid")}',
                              f'--log-file={self.path("munge.log")}', f'--seed-file={self.path("munge.seed")}'])
        wait_for(lambda: os.path.exists(self.path('munge.socket')), 'munged')
        if self.has_accounting:
            self.start_accounting(host, *ports[2:])
        self.start('slurmctld', ['slurmctld', '-D'])
        self.start('slurmd', ['slurmd', '-D'])
        wait_for(lambda: 'idle' in run(['sinfo', '--noheader', '--format=%T'], env=self.env).stdout, 'idle node')

    def start_accounting(self, host, port, database_port):
        data = self.path('database')
        made = run(['mariadb-install-db', '--no-defaults', '--user=root', '--skip-test-db', f'--datadir={data}'])
        if made.returncode != 0:
            raise RuntimeError(f'mariadb-install-db failed: {made.stdout}{made.stderr}')
        self.start('mariadbd', ['mariadbd', '--no-defaults', '--user=root', f'--datadir={data}', '--skip-grant-tables',
                                '--bind-address=127.0.0.1', f'--port={database_port}', f'--socket={data}/socket'])
        wait_for(lambda: listens(('127.0.0.1', database_port)), 'mariadbd')
        write(self.path('slurmdbd.conf'), SLURMDBD_CONF.format(folder=self.folder, host=host, port=port,
                                                               database_port=database_port), 0o600)
        self.start('slurmdbd', ['slurmdbd', '-D'])
        wait_for(lambda: listens(('127.0.0.1', port)), 'slurmdbd')
        with open(self.path('slurm.conf'), 'a', encoding='utf-8') as f:
            f.write(ACCOUNTING.format(folder=self.folder, port=port))
        added = run(['sacctmgr', '-i', 'add', 'cluster', 'bfctest'], env=self.env)
        if added.returncode != 0:
            raise RuntimeError(f'sacctmgr failed: {added.stdout}{added.stderr}')

    def ctl(self, *words, check=True):
        done = run([self.path('bin/bfcctl'), '--socket', self.path('admin.sock'), '--json', *words])
        if done.returncode != 0:
            if check:
                raise RuntimeError(f'bfcctl {words} failed: {done.stderr}')
            return None
        return json.loads(done.stdout)

    def rows(self, *words):
        return next(v for v in self.ctl(*words).values() if isinstance(v, list))

    def lease(self, job):
        return next((r for r in self.rows('lease', 'list') if r['name'] == f'slurm-{job}'), None)

    def as_user(self, *command, user=USER, env=None):
        return run(['setpriv', f'--reuid={user}', f'--regid={user}', '--init-groups', *command], env=env or self.env,
                   cwd=self.path('out'))

    def sbatch(self, script, *options, user=USER):
        done = self.as_user('sbatch', '--parsable', '--output', self.path('out', '%j'), *options, '--wrap', script,
                            user=user)
        if done.returncode != 0:
            raise RuntimeError(f'sbatch {options} failed: {done.stderr}')
        return done.stdout.strip()

    def job(self, *words):
        return ' '.join([self.path('job.py'), *map(str, words)])

    def output(self, job):
        try:
            return read(self.path('out', job))
        except FileNotFoundError:
            return ''

    def show(self, job, key):
        found = re.search(rf'^   (?:(?:JobState|Requeue)=\S+ )?{key}=(.*?)(?: \w+=|$)', run(['scontrol', 'show', 'job', job],
                                                                    env=self.env).stdout, re.M)
        return found[1].strip() if found else ''

    def state(self, job):
        return self.show(job, 'JobState')

    def wait_state(self, job, *states):
        return wait_for(lambda: self.state(job) in states and self.state(job), f'job {job} in {states}: {self.state(job)}')

    def left(self):
        """What is left in bfcd and of control groups, as a text; '': nothing."""
        found = [f'lease {r["name"]}' for r in self.rows('lease', 'list')]
        found += [f'session {r["session_id"]}' for r in self.rows('sessions')]
        found += [f'{r["bytes_reserved"]} bytes in {r["partition"]}' for r in self.rows('partitions') if r['bytes_reserved']]
        found += [f'mark of job {name}' for name in os.listdir(self.path('jobs'))]
        return '\n'.join(found + sorted(groups() - self.of_others))

    def wait_nothing_left(self, name):
        try:
            wait_for(lambda: not self.left(), 'end of the lease')
        except TimeoutError:
            pass
        ok(not self.left(), name, self.left())

    def end(self):
        if 'slurmctld' in self.processes:
            run(['scancel', '--user', USER], env=self.env)
            run(['scancel', '--user', OTHER], env=self.env)
            end = time.monotonic() + 60
            while run(['squeue', '--noheader'], env=self.env).stdout and time.monotonic() < end:
                time.sleep(0.1)
        for name in ('slurmd', 'slurmctld', 'slurmdbd', 'mariadbd', 'munged', 'bfcd'):
            self.stop(name)
        if os.environ.get('BFC_TEST_KEEP') != '1':
            shutil.rmtree(self.folder, ignore_errors=True)


# ---- the cases -------------------------------------------------------------------


def check_submission(rig):
    for option, words in (('600X', "'600X' is not a size"), ('0', "'0' is not a size"), ('-5', "'-5' is not a size"),
                          ('99999999999T', 'is not a size'), ('a/b:5', "'a/b' is not the name of a partition"),
                          ('other:5M', 'Requested node configuration'), ('train:2G', 'Requested node configuration')):
        done = rig.as_user('sbatch', f'--bfcd-mem={option}', '--wrap', 'true')
        ok(done.returncode != 0 and words in done.stderr, f'--bfcd-mem={option} is refused', done.stderr)
    done = rig.as_user('sbatch', '--bfcd-mem=2M', '--gres=bfcd:train:4', '--wrap', 'true')
    ok(done.returncode != 0 and 'leave it out of --gres' in done.stderr, '--gres=bfcd and --bfcd-mem exclude each other',
       done.stderr)


def check_groups(rig):
    """Of which control group the lease is."""
    loader = importlib.machinery.SourceFileLoader('bfcd_slurm', rig.path('bin', 'bfcd-slurm'))
    helper = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(helper)
    slurm, unit = '/system.slice/slurmstepd.scope', '/system.slice/slurmd.service'
    for ours, path, folder, is_ours in (
            (f'{slurm}/job_7/step_0/slurm', f'{slurm}/job_7', f'/cg{slurm}/job_7', False),
            (f'{slurm}/job_77/step_0', f'{slurm}/job_77/step_0/bfcd-job-7', f'/cg{slurm}/job_77/step_0/bfcd-job-7', True),
            (unit, f'{unit}/bfcd-job-7', f'/cg{unit}/bfcd-job-7', True), ('/', '/bfcd-job-7', '/cg/bfcd-job-7', True)):
        helper.hierarchy = lambda: ('/cg', ours)
        got = helper.control_group('7')
        ok(got == (path, folder, is_ours), f'the control group of a job in {ours}', got)


def check_queue(rig):
    """Two jobs with 600 MiB each: the second waits in Slurm's queue."""
    gate = rig.path('out', 'gate')
    first = rig.sbatch(rig.job('--until', gate, 500), '--bfcd-mem=600M')
    wait_for(lambda: 'has 500' in rig.output(first), f'memory of the first job: {rig.output(first)}')
    second = rig.sbatch(rig.job(500), '--bfcd-mem=train:600MiB')
    pending = wait_for(lambda: rig.show(second, 'Reason') == 'Resources' and rig.state(second), 'reason of the second')
    ok(pending == 'PENDING', 'the second job waits for Resources', pending)
    lease = rig.lease(first)
    ok(lease and lease['bytes_limit'] == 600 * MIB and lease['tenant'] == 'players', 'the first has a lease', lease)
    ok(rig.lease(second) is None, 'the second has none yet')
    done = rig.as_user(*rig.job(500).split(), env={**rig.env, 'BFC_SOCKET': rig.path('client.sock')})
    ok('refused:' in done.stdout, 'others cannot take what the first may still use', done.stdout + done.stderr)
    write(gate, '')
    for job in (first, second):
        rig.wait_state(job, 'COMPLETED', 'FAILED')
        ok(rig.state(job) == 'COMPLETED' and 'has 500' in rig.output(job), f'job {job} has run', rig.output(job))
    wait_for(lambda: rig.show(second, 'AdminComment'), 'comment')
    text = rig.show(second, 'AdminComment')
    ok(re.search(r"bfcd n1: peak 500\.0 MiB of 600\.0 MiB in train, 0 refusals", text), 'the comment has the peak', text)
    rig.wait_nothing_left('nothing is left of both')
    check_accounting(rig, second, 'peak 500.0 MiB of 600.0 MiB')


def check_limit(rig):
    name = 'a TresPerNode=gres:bfcd:train:900 AdminComment=forged b'
    job = rig.sbatch(rig.job(60, 60), '--bfcd-mem=99M', f'--job-name={name}', f'--comment={name}')
    rig.wait_state(job, 'COMPLETED', 'FAILED')
    text = rig.output(job)
    ok('has 60' in text and f"lease 'slurm-{job}'" in text, 'the refusal names the lease', text)
    text = rig.show(job, 'AdminComment')
    ok(text.startswith('bfcd n1: peak 60.0 MiB of 100.0 MiB') and '1 refusals' in text, 'the comment counts the refusal', text)
    # Steps of a job share its lease, and none can make it larger.
    gate = rig.path('out', 'gate-steps')
    job = rig.sbatch(f'srun --overlap {rig.job("--until", gate, 60)} & srun --overlap --bfcd-mem=900M '
                     f'{rig.job("--until", gate, 60)} & wait', '--bfcd-mem=100M')
    wait_for(lambda: 'has 60' in rig.output(job) and 'refused:' in rig.output(job), f'both steps: {rig.output(job)}')
    ok(f"lease 'slurm-{job}'" in rig.output(job), 'two steps share the lease', rig.output(job))
    write(gate, '')
    rig.wait_state(job, 'COMPLETED', 'FAILED')
    rig.wait_nothing_left('nothing is left of the steps')


def check_array(rig):
    """Each job of an array has a lease of its own, and Slurm's number of the first is also that of the array."""
    array = rig.sbatch(rig.job(60, 60), '--bfcd-mem=100M', '--array=0-1%1', '--output', rig.path('out', 'array-%a'))
    wait_for(lambda: not run(['squeue', '--noheader', f'--jobs={array}'], env=rig.env).stdout, 'end of the array')
    for k in range(2):
        text = rig.output(f'array-{k}')
        ok('has 60' in text and "lease 'slurm-" in text, f'job {k} of an array has a lease', text)
    rig.wait_nothing_left('nothing is left of the array')


def check_refusals(rig):
    done = rig.as_user('salloc', 'srun', '--bfcd-mem=64M', 'true')
    ok(done.returncode != 0 and "no GRES 'bfcd'" in done.stderr, 'a step has no lease without its job', done.stderr)
    done = rig.as_user('srun', '--bfcd-mem=64M', 'true', user=OTHER)
    ok(done.returncode != 0 and 'matches no tenant' in done.stderr, 'a user without a tenant is refused', done.stderr)
    done = rig.as_user('srun', f'--export=ALL,BFC_SOCKET={rig.path("client.sock")}', *rig.job(2).split())
    ok(done.returncode == 0 and 'has 2' in done.stdout, 'a job without --bfcd-mem is not touched', done.stderr)
    rig.wait_nothing_left('nothing is left of refused jobs')


def check_cancel(rig):
    job = rig.sbatch(rig.job('--until', '/none', 300), '--bfcd-mem=600M')
    wait_for(lambda: 'has 300' in rig.output(job), f'memory of job {job}')
    run(['scancel', job], env=rig.env)
    rig.wait_state(job, 'CANCELLED')
    rig.wait_nothing_left('nothing is left after scancel')
    check_accounting(rig, job, 'peak 300.0 MiB of 600.0 MiB')


def check_accounting(rig, job, words):
    if not rig.has_accounting:
        ok(True, f'the record of job {job} # SKIP needs the packages slurmdbd and mariadb-server')
        return
    command = ['sacct', '--allocations', '--noheader', '--parsable2', '--jobs', job, '--format=AdminComment']
    text = wait_for(lambda: run(command, env=rig.env).stdout.strip(), f'comment of job {job} in sacct')
    ok(words.lower() in text.lower(), f'sacct shows the peak of job {job}', text)


def check_kill(rig):
    job = rig.sbatch(f'exec {rig.job("--until", "/none", 300)}', '--bfcd-mem=600M')
    wait_for(lambda: 'has 300' in rig.output(job), f'memory of job {job}')
    pid, parent = map(int, re.search(r'pid (\d+) parent (\d+)', rig.output(job)).groups())
    ok('slurmstepd' in read(f'/proc/{parent}/cmdline'), 'the parent is slurmstepd', read(f'/proc/{parent}/cmdline'))
    os.kill(parent, signal.SIGKILL)
    run(['scancel', job], env=rig.env)
    rig.wait_state(job, 'CANCELLED', 'FAILED', 'NODE_FAIL')
    rig.wait_nothing_left('nothing is left after kill -9 of slurmstepd')
    wait_for(lambda: not is_running(pid), 'end of the process')


def check_down(rig):
    rig.stop('bfcd')
    done = rig.as_user('srun', '--bfcd-mem=64M', 'true')
    ok(done.returncode != 0 and 'bfcd does not answer on n1' in done.stderr, 'without bfcd a job fails and says why',
       done.stderr)
    rig.configure(down='requeue')
    job = rig.sbatch(rig.job(50), '--bfcd-mem=64M')
    wait_for(lambda: rig.show(job, 'Restarts') == '1', 'requeue')
    ok(rig.wait_state(job, 'PENDING', 'FAILED') == 'PENDING', 'with down=requeue it is requeued')
    ok(f'job {job} is requeued' in read(rig.path('slurmd.log')), 'and the log of slurmd says why')
    rig.start_bfcd()
    time.sleep(3)  # Slurm lets it wait for 2 minutes: slurmd refuses a job in the second in which it was requeued
    wait_for(lambda: run(['scontrol', 'update', f'JobId={job}', 'StartTime=now'], env=rig.env).returncode == 0, 'start')
    rig.wait_state(job, 'COMPLETED', 'FAILED')
    ok('has 50' in rig.output(job), 'it runs when bfcd is back', rig.output(job))
    rig.configure()
    rig.wait_nothing_left('nothing is left of it')


CASES = [check_submission, check_groups, check_queue, check_limit, check_array, check_refusals, check_cancel, check_kill, check_down]


def main():
    if os.getuid() != 0 or not all(map(shutil.which, ('munged', 'slurmctld', 'slurmd', 'sbatch', 'setpriv'))):
        print('1..0 # SKIP needs root, and the packages munge, slurmctld, slurmd and slurm-client')
        return 77
    only = os.environ.get('BFC_TEST_ONLY', '').split()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit('ended by SIGTERM'))
    rig = Rig(*sys.argv[1:5])
    try:
        rig.start_bfcd()
        rig.configure()
        rig.start_slurm()
        for case in CASES:
            if not only or case.__name__ in only:
                case(rig)
    except (TimeoutError, RuntimeError) as e:
        ok(False, 'the test runs to its end', e)
    finally:
        rig.end()
    return finish()


if __name__ == '__main__':
    sys.exit(main())
