#!/usr/bin/env -S python3 -B
# Clients in containers: with user, PID, mount and network namespaces of their own, as unshare makes them, and in real
# podman, rootful and rootless, with the CDI file of integrations/containers. All files are in a folder of its own below
# /tmp, and what changes in /etc and /run is visible to the test only, by a mount namespace. Jobs run as the users games
# and news, which Debian has.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: check-containers.py unshare|podman BFCD BFCCTL LIBBFCCLIENT CONTAINER-CLIENT CDI-FILE       as root
#
# BFC_TEST_KEEP=1 leaves the folder. Exits with 77 and a reason where such containers cannot run.
import glob
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile

from checks import LIMIT_S, finish, ok, read, run, wait_for, write

MIB = 1 << 20
USER, OTHER = 'games', 'news'
SUBUIDS = 300000  # of USER; and from SUBUIDS + 100000 on those of containers of root
GROUP = 4711  # a supplementary group
FOLDER = '/run/bfcd/client'  # in a container
HIDDEN, GROUPS = [], []

BFCD_YAML = '''
socket: {{path: {folder}/client/bfcd.sock}}
admin_socket: {{path: {folder}/admin.sock}}
devices:
  - id: host
    size: 256MiB
    partitions:
      - {{name: train, limit: 256MiB}}
tenants:
'''

TENANT = '''
  - name: {name}
    match: {match}
    quotas:
      - {{partition: train, limit: 64MiB}}
'''


class Skip(Exception):
    """This machine cannot run such containers."""


def mounts():
    """(where it is mounted, type, options) of each file system."""
    for line in read('/proc/self/mountinfo').splitlines():
        before, _, after = line.partition(' - ')
        kind, _, options = after.split()[:3]
        yield before.split()[4], kind, options.split(',')


def hierarchy():
    """(the mount of the hierarchy in which bfcd sees control groups, our path in it)"""
    found = {}
    for line in read('/proc/self/cgroup').splitlines():
        number, controllers, path = line.split(':', 2)
        if controllers == 'name=systemd' or (number == '0' and controllers == ''):
            found[controllers] = path
    name = 'name=systemd' if 'name=systemd' in found else ''
    for mount, kind, options in mounts() if name in found else []:
        if name in options if name else kind == 'cgroup2':
            return mount, found[name].rstrip('/')
    raise Skip('no control groups are mounted here')


class Group:
    """A control group, as a scheduler makes one for a pod."""

    def __init__(self, name):
        mount, above = hierarchy()
        self.path = f'{above}/bfcd-test-{os.getpid()}-{name}'
        self.folder = mount + self.path
        try:
            os.mkdir(self.folder)
        except OSError as e:
            raise Skip(f'no control group can be made: {e}')
        GROUPS.append(self)

    def command(self, *command):
        return ['sh', '-c', 'echo $$ >"$0/cgroup.procs" && exec "$@"', self.folder, *command]

    def has(self, pid):
        return any(self.path in line for line in read(f'/proc/{pid}/cgroup').splitlines())

    def remove(self):
        """In all hierarchies: podman makes it in each, also in the folder that prepare_mounts() hides."""
        wait_for(self.try_to_remove, f'end of {self.folder}')

    def try_to_remove(self):
        for mount in HIDDEN:
            shutil.rmtree(mount + self.path, ignore_errors=True)
        for where, _, _ in (f for m, kind, _ in mounts() if kind.startswith('cgroup')
                            for f in os.walk(m + self.path, topdown=False)):
            try:
                os.rmdir(where)
            except OSError:
                return False
        return True


def as_user(user, *command, groups=()):
    who = pwd.getpwnam(user)
    return ['setpriv', f'--reuid={who.pw_uid}', f'--regid={who.pw_gid}',
            *([f'--groups={",".join(map(str, groups))}'] if groups else ['--clear-groups']), *command]


class Job:
    """A container that runs the client, until its standard input ends."""

    def __init__(self, command, env=None, cwd=None):
        self.output = ''
        self.errors = tempfile.TemporaryFile('w+')
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, env=env,
                                        cwd=cwd)
        os.set_blocking(self.process.stdout.fileno(), False)

    def text(self):
        self.output += (self.process.stdout.read() or b'').decode()
        self.errors.seek(0)
        return self.output + self.errors.read()

    def wait(self, words):
        def is_there():
            return words in self.text() or 'waits' in self.text() or self.process.poll() is not None

        wait_for(is_there, lambda: f"'{words}' of the container: {self.text()}")
        return self.text()

    def end(self):
        self.process.stdin.close()
        self.process.wait(LIMIT_S)
        self.errors.close()


class Daemon:
    """bfcd with its three sockets, in a folder as /run/bfcd is."""

    def __init__(self, rig, name, tenants, wrapper=()):
        self.rig, self.folder = rig, rig.path(name)
        self.end_signal = signal.SIGKILL if '--kill-child' in wrapper else signal.SIGTERM  # unshare passes no others
        os.makedirs(self.path('client'))
        for folder in (self.folder, self.path('client')):
            os.chmod(folder, 0o755)
        write(self.path('bfcd.yaml'), BFCD_YAML.format(folder=self.folder) +
              ''.join(TENANT.format(name=k, match=v) for k, v in tenants.items()))
        self.out = open(self.path('out'), 'w', encoding='utf-8')
        self.process = subprocess.Popen([*wrapper, rig.bfcd, '--config', self.path('bfcd.yaml')], stdin=subprocess.DEVNULL,
                                        stdout=self.out, stderr=subprocess.STDOUT, env=rig.env)
        wait_for(lambda: self.ctl('status', check=False) or self.process.poll() is not None, 'bfcd')

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def ctl(self, *words, check=True):
        done = run([self.rig.bfcctl, '--socket', self.path('admin.sock'), '--json', *words], env=self.rig.env)
        if done.returncode != 0:
            if check:
                raise RuntimeError(f'bfcctl {words} failed: {done.stderr}{read(self.path("out"))}')
            return None
        return json.loads(done.stdout)

    def rows(self, *words):
        return next(v for v in self.ctl(*words).values() if isinstance(v, list))

    def lease(self, name, group):
        self.ctl('lease', 'create', name, '--tenant', 'pods', '--partition', 'train', '--limit', '16MiB', '--cgroup', group.path)

    def left(self):
        found = [f'lease {r["name"]}' for r in self.rows('lease', 'list')]
        found += [f'session {r["session_id"]}' for r in self.rows('sessions')]
        return found + [f'{r["bytes_reserved"]} bytes in {r["partition"]}' for r in self.rows('partitions') if r['bytes_reserved']]

    def stop(self):
        self.process.send_signal(self.end_signal)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.out.close()


class Rig:
    def __init__(self, bfcd, bfcctl, library, client, cdi):
        self.bfcd, self.bfcctl, self.cdi = map(os.path.realpath, (bfcd, bfcctl, cdi))
        self.folder = tempfile.mkdtemp(prefix='bfc-containers-', dir='/tmp')
        os.chmod(self.folder, 0o755)
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(('BFC_', 'XDG_', 'CONTAINER'))}
        self.daemons = []
        self.bfcclient = self.path('lib', 'libbfcclient.so.0')
        os.makedirs(self.path('lib'))
        shutil.copy(os.path.realpath(library), self.bfcclient)
        self.make_root(client)
        for where, folders, files in os.walk(self.folder):
            for name in folders + files:
                os.chmod(os.path.join(where, name), 0o755)

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def make_root(self, client):
        """The root folder of containers: the client and the libraries that it needs, but not those of bfcd."""
        libraries = re.findall(r'(?:=> )?(/\S+) \(0x', run(['ldd', client]).stdout)
        self.protobuf = next(f for f in libraries if 'libprotobuf-c.so' in f)
        for folder in ('proc', 'sys', 'dev', 'tmp', 'etc', FOLDER[1:]):
            os.makedirs(self.path('root', folder))
        shutil.copy(client, self.path('root', 'client'))
        for library in libraries:
            if 'libbfcclient' not in library and library != self.protobuf:
                os.makedirs(os.path.dirname(self.path('root', library[1:])), exist_ok=True)
                shutil.copy(os.path.realpath(library), self.path('root', library[1:]))

    def start(self, *arguments, **options):
        self.daemons.append(Daemon(self, *arguments, **options))
        return self.daemons[-1]

    def end(self):
        for daemon in self.daemons:
            daemon.stop()
        for group in GROUPS:
            group.try_to_remove()
        for path in glob.glob(self.path('podman-*', 'run', 'libpod', 'tmp', 'pause.pid')):
            try:  # rootless podman leaves a process that keeps its namespaces
                os.kill(int(read(path)), signal.SIGKILL)
            except ProcessLookupError:
                pass
        if os.environ.get('BFC_TEST_KEEP') != '1':
            shutil.rmtree(self.folder, ignore_errors=True)


def check_container(daemon, group, name, uid, start):
    """start: a Job with these arguments of the client, in the group."""
    lease = f'lease-{name}'
    daemon.lease(lease, group)
    job = start('8', '12', '/run/bfcd/admin.sock', '/run/bfcd/monitor.sock', daemon.path('admin.sock'))
    text = job.wait('waits')
    ok('tenant pods' in text and 'has 8' in text, f'{name}: gets a block', text)
    ok('refused: ' in text and f"lease '{lease}'" in text, f'{name}: the limit of its lease applies', text)
    for path in ('/run/bfcd/admin.sock', '/run/bfcd/monitor.sock', daemon.path('admin.sock')):
        ok(f'{path}: No such file' in text, f'{name}: {path} is not reachable', text)
    rows = daemon.rows('-w', 'sessions')
    ok(len(rows) == 1 and rows[0].get('uid') == uid, f'{name}: one session, of uid {uid}', rows)
    pid = rows[0]['pid'] if rows else 0
    inside = int(re.search(r'pid (\d+)', text)[1]) if 'pid ' in text else 0
    ok(pid not in (0, inside) and group.has(pid), f'{name}: the daemon sees the pid of its own namespace', (pid, inside))
    rows = daemon.rows('lease', 'list')
    ok(len(rows) == 1 and rows[0]['bytes_reserved'] >= 8 * MIB, f'{name}: the lease is charged', rows)
    if pid == 0:
        raise RuntimeError(f'{name}: no session')
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not daemon.rows('sessions') and not daemon.rows('lease', 'list')[0]['bytes_reserved'], 'end of the session')
    ok(True, f'{name}: its memory is back after a kill')
    job.end()
    group.remove()
    wait_for(lambda: not daemon.left(), lambda: f'end of the lease: {daemon.left()}')
    ok(True, f'{name}: the lease ends with the control group')


# ---- unshare -----------------------------------------------------------------------

SPACES = ['unshare', '--user', '--map-root-user', '--pid', '--fork', '--mount', '--net', '--ipc', '--uts', '--kill-child']
# The container's mounts. $0: the root folder; $1: the folder of the client socket; $2, $3: libraries
MOUNTS = f'''set -e
mount --rbind "$0" "$0"
mount --bind "$1" "$0{FOLDER}"
mount -o remount,bind,ro "$0{FOLDER}"
for library in "$2" "$3"; do
        touch "$0/tmp/${{library##*/}}"
        mount --bind "$library" "$0/tmp/${{library##*/}}"
done
shift 3
LD_LIBRARY_PATH=/tmp exec chroot "$0" /client "$@"'''


def pod(rig, daemon, group, *words, user=USER, groups=()):
    return Job(group.command(*as_user(user, *SPACES, 'sh', '-c', MOUNTS, rig.path('root'), daemon.path('client'),
                                      rig.bfcclient, rig.protobuf, *words, groups=groups)), rig.env)


def need(*command):
    tried = run(command)
    if tried.returncode != 0:
        raise Skip(f'{" ".join(command)} does not run: {tried.stderr}')


def check_pod(rig):
    """User, PID, mount, network, IPC and UTS namespaces of its own."""
    need(*as_user(USER, *SPACES, 'true'))
    os.chmod(rig.path('root', 'tmp'), 0o777)
    daemon = rig.start('pod', {'pods': f'{{user: [{USER}]}}'})
    group = Group('pod')
    check_container(daemon, group, 'pod', pwd.getpwnam(USER).pw_uid, lambda *words: pod(rig, daemon, group, *words))


def check_modes(rig):
    """A container that sees the other sockets cannot open them: root in its user namespace is not root here."""
    need(*as_user(USER, *SPACES, 'true'))
    daemon = rig.start('modes', {'pods': f'{{user: [{USER}]}}'})
    paths = [daemon.path('admin.sock'), daemon.path('monitor.sock')]
    job = Job(as_user(USER, *SPACES, 'env', f'LD_LIBRARY_PATH={rig.path("lib")}',
                      f'BFC_SOCKET={daemon.path("client", "bfcd.sock")}', rig.path('root', 'client'), *paths), rig.env)
    text = job.wait('waits')
    ok('uid 0 ' in text, 'the job is root in its user namespace', text)
    for path in paths:
        ok(f'{path}: Permission denied' in text, f'the mode of {os.path.basename(path)} applies to it', text)
    job.end()


def direct(rig, daemon, user, *words):
    return Job(as_user(user, rig.path('root', 'client'), *words),
               {**rig.env, 'LD_LIBRARY_PATH': rig.path('lib'), 'BFC_SOCKET': daemon.path('client', 'bfcd.sock')})


def check_pid_namespace(rig):
    """A daemon in a PID namespace of its own sees no pid of processes outside of it."""
    wrapper = ['unshare', '--pid', '--fork', '--kill-child']
    need(*wrapper, 'true')
    daemon = rig.start('inner', {'pods': f'{{user: [{USER}]}}', 'places': '{cgroup: ["/none"]}'}, wrapper=wrapper)
    job = direct(rig, daemon, USER, '8')
    text = job.wait('waits')
    ok('has 8' in text, 'a client outside of its PID namespace is matched by its user', text)
    rows = daemon.rows('-w', 'sessions')
    ok(len(rows) == 1 and rows[0]['pid'] == 0, 'its pid is 0', rows)
    job.process.kill()
    job.end()
    wait_for(lambda: not daemon.left(), lambda: f'end of the session: {daemon.left()}')
    ok(True, 'its memory is back after a kill')
    text = direct(rig, daemon, OTHER).wait('no session')
    ok('in a PID namespace that the daemon does not see' in text and 'matches no tenant' in text,
       'a pattern of control groups does not match it', text)
    daemon.ctl('lease', 'create', 'one', '--tenant', 'pods', '--partition', 'train', '--limit', '16MiB', '--cgroup', '/none')
    text = direct(rig, daemon, USER).wait('no session')
    ok("lease 'one' in partition 'train': it is in a PID namespace that the daemon does not see" in text,
       'with a lease that may be its own it is refused', text)


def check_same_pids(rig):
    """bfcctl run, by users who have the client socket only, in containers whose processes have the same pids."""
    daemon = rig.start('same-pids', {'pods': f'{{user: [{USER}]}}\n    leases: self'})
    command = as_user(USER, *SPACES, rig.bfcctl, 'run', '--limit', '2MiB', '--', 'sh', '-c', 'echo waits; read line')
    need(*as_user(USER, *SPACES, rig.bfcctl, '--version'))  # a folder may be closed to it
    jobs = [Job(command, {**rig.env, 'BFC_SOCKET': daemon.path('client', 'bfcd.sock')}) for _ in range(12)]
    texts = [job.wait('waits') for job in jobs]
    names = {row['name'] for row in daemon.rows('lease', 'list')}
    ok(len(names) == len(jobs) and all('waits' in text for text in texts), 'each has a lease', (names, texts))
    for job in jobs:
        job.end()
    wait_for(lambda: not daemon.left(), lambda: f'end of the leases: {daemon.left()}')


def check_user_namespace(rig):
    """A daemon in a user namespace does not know users without a uid there, which the kernel shows as nobody."""
    wrapper = ['unshare', '--user', '--map-root-user']
    need(*wrapper, rig.bfcd, '--version')  # a folder may be closed to it
    nobody = int(read('/proc/sys/kernel/overflowuid'))
    daemon = rig.start('mapped', {'pods': '{uid: [0]}', 'nobody': f'{{uid: [{nobody}], gid: [{nobody}]}}'}, wrapper=wrapper)
    job = Job([rig.path('root', 'client'), '8'],
              {**rig.env, 'LD_LIBRARY_PATH': rig.path('lib'), 'BFC_SOCKET': daemon.path('client', 'bfcd.sock')})
    text = job.wait('waits')
    ok('tenant pods' in text and 'has 8' in text, 'a user with a uid is matched', text)
    job.end()
    text = direct(rig, daemon, OTHER).wait('no session')
    ok("a user without a uid in the daemon's user namespace matches no tenant" in text, 'another one is not nobody', text)


# ---- podman ------------------------------------------------------------------------


class Podman:
    """podman of a user with a storage of its own, and an image of the root folder."""

    def __init__(self, rig, user):
        self.rig, self.user, self.folder = rig, user, rig.path(f'podman-{user}')
        for folder in (self.folder, os.path.join(self.folder, 'run')):
            os.makedirs(folder, 0o700, exist_ok=True)
            shutil.chown(folder, user, pwd.getpwnam(user).pw_gid)
        self.env = {**rig.env, 'HOME': self.folder, 'XDG_RUNTIME_DIR': os.path.join(self.folder, 'run')}
        done = self.run('import', rig.path('image.tar'), 'client')
        if done.returncode != 0:
            raise Skip(f'podman cannot import an image: {done.stderr}')
        done = run(self.command('run', *self.options(), '--device=bfcd/client=library', 'client', '/client'), env=self.env,
                   cwd=self.folder)
        if 'no session: cannot reach bfcd' not in done.stdout:
            raise Skip(f'podman of {user} cannot run a container: {done.stdout}{done.stderr}')

    def command(self, *words, groups=()):
        command = ['podman', '--root', os.path.join(self.folder, 'root'), '--runroot', os.path.join(self.folder, 'runroot'),
                   '--storage-driver=vfs', '--cgroup-manager=cgroupfs', '--events-backend=none', *words]
        return command if self.user == 'root' else as_user(self.user, *command, groups=groups)

    def options(self):
        """Limits that podman may set without CAP_SYS_RESOURCE; only root can make control groups here."""
        return ['--rm', '--interactive', '--network=none', '--log-driver=none', '--ulimit=nofile=1024:1024',
                '--ulimit=nproc=1024:1024', *([] if self.user == 'root' else ['--cgroups=disabled'])]

    def run(self, *words):
        return run(self.command(*words), env=self.env, cwd=self.folder)

    def start(self, *words, group=None, groups=(), options=('--device=bfcd/client=socket',), wrapper=()):
        command = self.command('run', *self.options(), '--device=bfcd/client=library', *options, 'client', '/client', *words,
                               groups=groups)
        return Job(group.command(*command) if group else [*wrapper, *command], self.env, self.folder)


def install_cdi_file(rig, daemon):
    """The file of integrations/containers, with the paths of this test on the host's side."""
    text = read(rig.cdi)
    for pattern, path, times in ((re.escape(FOLDER), daemon.path('client'), 1), (r'\S+/libbfcclient\.so\.0', rig.bfcclient, 2),
                                 (r'\S+/bfcd/preload', rig.path('lib'), 1)):
        text, count = re.subn(f'hostPath: {pattern}$', f'hostPath: {path}', text, flags=re.M)
        ok(count == times, f'the CDI file mounts {path}', text)
    write('/run/cdi/bfcd.yaml', text)


def check_rootful(rig):
    """A user namespace with uids of its own, and a control group that podman makes."""
    uid = SUBUIDS + 100000 + 1000
    daemon = rig.start('rootful', {'pods': f'{{uid: [{uid}]}}'})
    install_cdi_file(rig, daemon)
    podman = Podman(rig, 'root')
    group = Group('rootful')
    options = ['--device=bfcd/client=socket', f'--cgroup-parent={group.path}', f'--uidmap=0:{SUBUIDS + 100000}:65536',
               '--user=1000:1000']
    check_container(daemon, group, 'rootful', uid, lambda *words: podman.start(*words, options=options))


def check_run(rig):
    """bfcctl run gives a container of podman a lease: podman has no daemon, so the container is in the process tree."""
    daemon = rig.start('run', {'pods': '{uid: [0]}'})
    install_cdi_file(rig, daemon)
    wrapper = [rig.bfcctl, '--socket', daemon.path('admin.sock'), 'run', '--limit', '16MiB', '--tenant', 'pods', '--partition',
               'train', '--']
    job = Podman(rig, 'root').start('8', '12', wrapper=wrapper)
    text = job.wait('waits')
    ok('has 8' in text and re.search("refused: .*lease 'run-", text), 'bfcctl run: its lease limits the container', text)
    job.end()
    wait_for(lambda: not daemon.left(), lambda: f'end of the lease: {daemon.left()}')


def check_rootless(rig):
    """Which uid and which groups arrive."""
    own = pwd.getpwnam(USER).pw_uid
    daemon = rig.start('rootless', {'pods': f'{{uid: [{own}]}}', 'by-group': f'{{gid: [{GROUP}]}}'})
    install_cdi_file(rig, daemon)
    podman = Podman(rig, USER)
    group = Group('rootless')
    check_container(daemon, group, 'rootless', own, lambda *words: podman.start(*words, group=group))
    mount = f'--mount=type=bind,source={daemon.path("client")},target={FOLDER},readonly'
    for name, options, uid, words in (
            ('keep-id', ['--userns=keep-id'], own, 'tenant pods'),
            ('another uid', ['--user=1000:1000'], SUBUIDS + 999, 'matches no tenant'),
            ('keep-groups', ['--user=1000:1000', '--group-add=keep-groups'], SUBUIDS + 999, 'tenant by-group')):
        job = podman.start(options=[mount, *options], groups=[GROUP])
        text = job.wait('waits')
        rows = daemon.rows('-w', 'sessions')
        ok(words in text and (f'uid {uid}, ' in text if 'no session' in text else [r['uid'] for r in rows] == [uid]),
           f'rootless, {name}: uid {uid}, {words}', f'{text}{rows}')
        job.end()
        wait_for(lambda: not daemon.left(), lambda: f'end of the session: {daemon.left()}')


def in_own_mounts(arguments):
    """Runs the program again where its mounts are visible to itself only."""
    has_made = not os.path.isdir('/run/cdi')
    if has_made:
        os.mkdir('/run/cdi')
    try:
        return subprocess.run(['unshare', '--mount', '--propagation=private', sys.executable, '-B', *arguments],
                              env={**os.environ, 'BFC_TEST_HAS_MOUNTS': '1'}).returncode
    finally:
        if has_made:
            os.rmdir('/run/cdi')


def prepare_mounts(rig):
    run(['mount', '--make-rshared', '/'])  # podman warns of others
    made = run(['mount', '-t', 'tmpfs', 'tmpfs', '/run/cdi'])
    if made.returncode != 0:
        raise Skip(f'nothing can be mounted: {made.stderr}')
    write(rig.path('subid'), f'{USER}:{SUBUIDS}:65536\n')
    for path in filter(os.path.exists, ('/etc/subuid', '/etc/subgid')):
        run(['mount', '--bind', rig.path('subid'), path])
    # crun refuses to run where cgroup2 is mounted beside the hierarchies of version 1 and has controllers.
    kinds = {kind for _, kind, _ in mounts()}
    for mount, kind, _ in list(mounts()):
        if kind == 'cgroup2' and 'cgroup' in kinds:
            run(['mount', '-t', 'tmpfs', 'tmpfs', mount])
            HIDDEN.append(mount)
    run(['tar', '-C', rig.path('root'), '-cf', rig.path('image.tar'), '.'])


CASES = {'unshare': [check_pod, check_modes, check_pid_namespace, check_same_pids, check_user_namespace],
         'podman': [check_rootful, check_run, check_rootless]}


def main():
    kind = sys.argv[1]
    if os.getuid() != 0 or not all(map(shutil.which, ('unshare', 'setpriv', 'ldd'))):
        print('1..0 # SKIP needs root, and the programs unshare, setpriv and ldd')
        return 77
    if kind == 'podman' and not shutil.which('podman'):
        print('1..0 # SKIP needs the package podman')
        return 77
    if kind == 'podman' and os.environ.pop('BFC_TEST_HAS_MOUNTS', None) is None:
        return in_own_mounts(sys.argv)
    only = os.environ.get('BFC_TEST_ONLY', '').split()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit('ended by SIGTERM'))
    rig = Rig(*sys.argv[2:7])
    n_run = n_skipped = 0
    try:
        if kind == 'podman':
            prepare_mounts(rig)
        for case in CASES[kind]:
            if only and case.__name__ not in only:
                continue
            n_run += 1
            try:
                case(rig)
            except Skip as e:
                n_skipped += 1
                ok(True, f'{case.__name__} # SKIP {" ".join(str(e).split())}')
    except Skip as e:
        n_skipped += 1
        ok(True, f'containers # SKIP {" ".join(str(e).split())}')
    except (TimeoutError, RuntimeError) as e:
        ok(False, 'the test runs to its end', e)
    finally:
        rig.end()
    return finish() or (77 if n_skipped >= n_run else 0)


if __name__ == '__main__':
    sys.exit(main())
