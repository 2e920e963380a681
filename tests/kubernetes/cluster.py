# A Kubernetes cluster of two nodes on this machine, in namespaces of its own: the API server and its like in one set of namespaces,
# each node in another one inside of it, with own processes, mounts, network, /run, /var/lib and /var/log. So the end of the first
# process ends all, whatever it does, and nothing stays mounted. Only control groups are visible outside, below one of our own.
#
# SPDX-License-Identifier: Apache-2.0
import contextlib
import datetime
import glob
import http.client
import json
import os
import re
import secrets
import shutil
import signal
import ssl
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), '..', 'integration'))
# pylint: disable=wrong-import-position
from checks import listens, read, run, wait_for, write  # noqa: E402

import images  # noqa: E402

MIB = 1 << 20
NODES = ('node1', 'node2')
API_ADDRESS, SERVICE_ADDRESS, HOST_ADDRESS, OUR_ADDRESS = '10.203.0.1', '10.96.0.1', '10.203.255.1', '10.203.255.2'
PARTITION = {'host': 'train', 'gpu': 'infer'}  # by type of the device
TENANTS = {'vision': 'vision', 'nlp': 'speech'}  # by namespace
DRIVER = 'memory.bfcd'
# What a kubelet sets for the whole machine. It sees a file of its own instead.
SYSCTLS = ('vm/overcommit_memory', 'vm/panic_on_oom', 'kernel/panic', 'kernel/panic_on_oops', 'kernel/keys/root_maxkeys',
           'kernel/keys/root_maxbytes')

KUBECONFIG = '''apiVersion: v1
kind: Config
clusters: [{{name: bfcd, cluster: {{server: "https://{address}:443", insecure-skip-tls-verify: true}}}}]
users: [{{name: user, user: {{token: "{token}"}}}}]
contexts: [{{name: bfcd, context: {{cluster: bfcd, user: user}}}}]
current-context: bfcd
'''

CONTAINERD = '''version = 3
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "localhost/pause:1"
[plugins."io.containerd.cri.v1.runtime"]
  enable_cdi = true
  cdi_spec_dirs = ["/var/run/cdi"]
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "{folder}/cni"
'''

CNI = '''{{"cniVersion": "1.0.0", "name": "pods", "plugins": [{{"type": "bridge", "bridge": "cni0", "isGateway": true,
  "ipam": {{"type": "host-local", "ranges": [[{{"subnet": "10.88.{number}.0/24"}}]], "routes": [{{"dst": "0.0.0.0/0"}}]}}}}]}}
'''

KUBELET = '''apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false
failSwapOn: false
cgroupDriver: cgroupfs
cgroupRoot: {cgroup}
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
authentication: {{anonymous: {{enabled: true}}, webhook: {{enabled: false}}}}
authorization: {{mode: AlwaysAllow}}
evictionHard: {{nodefs.available: "1%", imagefs.available: "1%", memory.available: 100Mi}}
resolvConf: /dev/null
syncFrequency: 5s
'''

BFCD = '''socket: {path: /run/bfcd/client/bfcd.sock, mode: "0666"}
admin_socket: {path: /run/bfcd/admin.sock}
monitor_socket: {path: /run/bfcd/monitor.sock, mode: "0660"}
lease_socket: {path: /run/bfcd/lease/lease.sock}
records: {file: /var/log/bfcd-records}
max_sessions: 512
timeouts: {reclaim: 30s}
devices:
  - id: host
    size: 1GiB
    partitions: [{name: train, limit: 1GiB, growth: on-demand}]
  - id: cuda:0
    headroom: 0
    partitions: [{name: infer, limit: 1GiB, share: fd, growth: on-demand}]
tenants:
  - name: vision
    match: {}
    quotas: [{partition: train, limit: 1GiB}, {partition: infer, limit: 1GiB}]
  - name: speech
    match: {}
    quotas: [{partition: train, limit: 1GiB}, {partition: infer, limit: 1GiB}]
'''

DRA = '''tenants: {tenants}
gpuDevices: ["example.org/fake-cuda={{uuid}}"]
'''

# The fake driver, in the place of NVIDIA's container toolkit.
FAKE_CUDA = {'FAKE_CUDA_STATE': '/run/fake-cuda', 'FAKE_CUDA_DEVICES': '1088MiB'}

# What the driver may do in the API server, as docs/kubernetes.md says.
RIGHTS = '''apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: bfcd-dra}
rules:
  - {apiGroups: [""], resources: [nodes], verbs: [get]}
  - {apiGroups: [resource.k8s.io], resources: [resourceclaims], verbs: [get]}
  - {apiGroups: [resource.k8s.io], resources: [resourceslices], verbs: ["*"]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: bfcd-dra}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: bfcd-dra}
subjects: [{kind: User, name: bfcd-dra, apiGroup: rbac.authorization.k8s.io}]
'''

CLASS = '''apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: bfcd}
spec:
  selectors: [{cel: {expression: 'device.driver == "memory.bfcd"'}}]
'''


class Failed(Exception):
    """A case did not show what it must."""


def expect(condition, what, got=''):
    if not condition:
        raise Failed(f'{what}: {got}' if got != '' else what)


# ---- processes ---------------------------------------------------------------------


def parent_of(pid):
    try:
        return int(read(f'/proc/{pid}/stat').rpartition(')')[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def command_of(pid):
    try:
        return read(f'/proc/{pid}/cmdline').split('\0')[:-1]
    except (FileNotFoundError, ProcessLookupError):
        return []


def pids():
    return [int(name) for name in os.listdir('/proc') if name.isdigit()]


def kill(pid, number=signal.SIGKILL):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Process:
    """A daemon. wrapper: a command that runs it in other namespaces, and forks; the daemon is then its child."""

    def __init__(self, name, command, log, wrapper=(), env=None):
        self.name, self.command, self.log, self.wrapper = name, command, log, list(wrapper)
        self.env = {**os.environ, **(env or {})}
        self.process, self.pid = None, 0

    def start(self):
        with open(self.log, 'a', encoding='utf-8') as out:
            self.process = subprocess.Popen([*self.wrapper, *self.command], stdin=subprocess.DEVNULL, stdout=out,
                                            stderr=subprocess.STDOUT, env=self.env)
        self.pid = self.process.pid if not self.wrapper else wait_for(
            lambda: next((pid for pid in pids() if parent_of(pid) == self.process.pid), 0) or self.process.poll() is not None and -1,
            f'process of {self.name}')
        return self

    def is_running(self):
        return self.process is not None and self.process.poll() is None

    def end(self, number=signal.SIGKILL):
        if self.is_running():
            kill(self.pid, number)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                kill(self.pid)
                self.process.wait(60)
        self.process = None

    def restart(self, number=signal.SIGKILL):
        self.end(number)
        self.start()


# ---- control groups ----------------------------------------------------------------


def hierarchies():
    """Where control groups are mounted."""
    return [line.split()[1] for line in read('/proc/mounts').splitlines() if line.split()[2] in ('cgroup', 'cgroup2')]


def make_group(path):
    """In each hierarchy, with what a kubelet needs of it."""
    for mount in hierarchies():
        above = mount
        for name in path.strip('/').split('/'):
            group = f'{above}/{name}'
            os.makedirs(group, exist_ok=True)
            for file in ('cpuset.cpus', 'cpuset.mems'):  # version 1: empty in a new group
                if os.path.exists(f'{group}/{file}') and not os.path.exists(f'{above}/cgroup.controllers'):
                    if not read(f'{group}/{file}').strip():
                        write_kernel(f'{group}/{file}', read(f'{above}/{file}'))
            if os.path.exists(f'{above}/cgroup.controllers'):
                for controller in read(f'{above}/cgroup.controllers').split():
                    with contextlib.suppress(OSError):
                        write_kernel(f'{above}/cgroup.subtree_control', f'+{controller}')
            above = group


def write_kernel(path, text):
    with open(path, 'w', encoding='utf-8') as f:
        f.write(text)


def remove_group(path):
    """Whether it is gone. Ends what is still in it."""
    is_gone = True
    for mount in hierarchies():
        for where, _, files in os.walk(mount + path, topdown=False):
            if 'cgroup.procs' in files:
                for pid in read(f'{where}/cgroup.procs').split():
                    kill(int(pid))
            try:
                os.rmdir(where)
            except OSError:
                is_gone = False
    return is_gone


# ---- the cluster -------------------------------------------------------------------


class Node:
    """A kubelet and what it needs, in namespaces of their own, with bfcd and its driver."""

    def __init__(self, cluster, name):
        self.cluster, self.name, self.number = cluster, name, NODES.index(name) + 1
        self.folder, self.address = cluster.path(name), f'10.203.0.{10 + self.number}'
        self.cgroup = f'{cluster.cgroup}/{name}'
        self.holder, self.processes = None, {}

    def path(self, *names):
        return os.path.join(self.folder, *names)

    # -- its namespaces

    def make_namespaces(self):
        for name in ('run/cdi', 'lib/kubelet', 'log', 'cni', 'sysctl'):
            os.makedirs(self.path(name))
        make_group(self.cgroup)
        lines = ['set -e', f'mount --bind {self.path("run")} /run', f'mount --bind {self.path("lib")} /var/lib',
                 f'mount --bind {self.path("log")} /var/log', 'mount -t tmpfs -o mode=1777 tmpfs /dev/shm',
                 'mkdir /run/fake-cuda', 'mount -t tmpfs -o mode=1777 tmpfs /run/fake-cuda']
        for name in SYSCTLS:
            own = self.path('sysctl', name.replace('/', '.'))
            write(own, read(f'/proc/sys/{name}'))
            lines.append(f'mount --bind {own} /proc/sys/{name}')
        lines += ['mount --make-rshared /', f'hostname {self.name}', 'ip link set lo up', f'touch {self.path("made")}',
                  'sleep infinity & wait']  # bash reaps what others leave behind
        self.holder = Process('namespaces', ['bash', '-c', '\n'.join(lines)], self.path('log', 'namespaces.log'),
                              ['unshare', '--mount', '--propagation=private', '--pid', '--net', '--uts', '--ipc', '--fork',
                               '--kill-child', '--mount-proc']).start()
        wait_for(lambda: os.path.exists(self.path('made')) or not self.holder.is_running(), 'namespaces')
        expect(self.holder.is_running(), 'no namespaces can be made', read(self.path('log', 'namespaces.log')))
        must('ip', 'link', 'add', self.name, 'type', 'veth', 'peer', 'name', 'eth0', 'netns', str(self.holder.pid))
        must('ip', 'link', 'set', self.name, 'master', 'nodes', 'up')
        for words in (['address', 'add', f'{self.address}/24', 'dev', 'eth0'], ['link', 'set', 'eth0', 'up'],
                      ['route', 'add', 'default', 'via', API_ADDRESS]):
            must(*self.enter(), 'ip', *words)
        must('ip', 'route', 'add', f'10.88.{self.number}.0/24', 'via', self.address)

    def enter(self):
        return ['nsenter', '--target', str(self.holder.pid), '--mount', '--uts', '--ipc', '--net', '--pid']

    def run(self, *words, **options):
        return run([*self.enter(), *words], **options)

    def pids_of(self, program):
        """Of processes outside of pods."""
        def space(pid):
            with contextlib.suppress(OSError):
                return os.readlink(f'/proc/{pid}/ns/pid')

        return [pid for pid in pids() if os.path.basename((command_of(pid) or [''])[0]) == program
                and space(pid) == space(self.holder.pid)]

    # -- its daemons

    def define(self, name, *command, env=None):
        self.processes[name] = Process(name, list(command), self.path('log', f'{name}.log'), self.enter(), env)
        return self.processes[name]

    def make(self):
        """All that runs on it."""
        c = self.cluster
        self.make_namespaces()
        path = {'PATH': f'{c.programs}:{os.environ["PATH"]}'}
        write(self.path('containerd.toml'), CONTAINERD.format(folder=self.folder))
        write(self.path('cni', '10-pods.conflist'), CNI.format(number=self.number))
        write(self.path('kubelet.yaml'), KUBELET.format(cgroup=self.cgroup))
        write(self.path('bfcd.yaml'), BFCD)
        write(self.path('dra.yaml'), DRA.format(tenants=json.dumps(TENANTS)))
        write(self.path('dra.conf'), KUBECONFIG.format(address=API_ADDRESS, token=c.tokens['bfcd-dra']))
        self.define('containerd', f'{c.programs}/containerd', '--config', self.path('containerd.toml'), env=path)
        self.define('kubelet', f'{c.programs}/kubelet', f'--config={self.path("kubelet.yaml")}', f'--kubeconfig={c.kubeconfig}',
                    f'--hostname-override={self.name}', f'--node-ip={self.address}', env=path)
        cuda = {**FAKE_CUDA, 'LD_LIBRARY_PATH': os.path.dirname(c.build.fake_cuda)}
        self.define('bfcd', c.build.bfcd, '--config', self.path('bfcd.yaml'), env=cuda)
        self.define('bfcd-dra', c.build.driver, '--config', self.path('dra.yaml'), '--node', self.name, '--kubeconfig',
                    self.path('dra.conf'), '--metrics', ':9846')
        self.define('bfc-exporter', c.build.exporter, '--listen', '127.0.0.1:9477')
        self.processes['containerd'].start()
        wait_for(lambda: self.run(f'{c.programs}/ctr', 'version').returncode == 0, f'containerd of {self.name}')
        for image in c.images:
            self.load(image)
        self.processes['kubelet'].start()
        wait_for(lambda: os.path.exists(self.path('lib/kubelet/plugins_registry')), f'kubelet of {self.name}')
        self.start_bfcd()

    def start_bfcd(self):
        """bfcd, its driver and exporter as processes of the node."""
        for name in ('client', 'lease'):
            os.makedirs(self.path('run/bfcd', name))
        self.processes['bfcd'].start()
        wait_for(lambda: self.ctl('status', check=False), f'bfcd of {self.name}')
        self.describe_gpu()
        self.processes['bfcd-dra'].start()
        self.processes['bfc-exporter'].start()

    def stop_bfcd(self):
        for name in ('bfcd-dra', 'bfc-exporter', 'bfcd'):
            self.processes[name].end(signal.SIGTERM)
        wait_for(lambda: not self.pids_of('bfcd-keeper'), f'end of the keepers of {self.name}')
        shutil.rmtree(self.path('run/bfcd'))

    def images(self, *words):
        done = self.run(f'{self.cluster.programs}/ctr', '-n', 'k8s.io', 'images', *words)
        expect(done.returncode == 0, f'ctr images {" ".join(words)} failed', done.stderr)
        return done.stdout

    def load(self, image):
        self.images('import', image)

    def describe_gpu(self):
        """The CDI file of the fake GPU."""
        uuid = next(r['uuid'] for r in self.ctl('status')['status']['devices'] if r['uuid'])
        library = '/usr/lib/fake-cuda'
        edits = {'env': [f'{k}={v}' for k, v in FAKE_CUDA.items()] + [f'LD_LIBRARY_PATH={library}'],
                 'mounts': [{'hostPath': os.path.dirname(self.cluster.build.fake_cuda), 'containerPath': library,
                             'options': ['bind', 'ro']},
                            {'hostPath': '/run/fake-cuda', 'containerPath': '/run/fake-cuda', 'options': ['bind', 'rw']}]}
        write(self.path('run/cdi/fake-cuda.json'), json.dumps({
            'cdiVersion': '0.6.0', 'kind': 'example.org/fake-cuda',
            'devices': [{'name': uuid.removeprefix('GPU-'), 'containerEdits': edits}]}))

    # -- what bfcd says

    def ctl(self, *words, check=True):
        done = self.run(self.cluster.build.bfcctl, '--json', *words)
        if done.returncode != 0:
            expect(not check, f'bfcctl {words} failed', done.stderr)
            return None
        return json.loads(done.stdout)

    def rows(self, *words):
        return next(v for v in self.ctl(*words).values() if isinstance(v, list))

    def leases(self):
        return {row['name']: row for row in self.rows('lease', 'list')}

    def claims(self):
        """The claims that are prepared here, by their CDI files."""
        return {re.fullmatch(r'.*/bfcd-claim-(.*)\.json', path)[1] for path in glob.glob(self.path('run/cdi/bfcd-claim-*.json'))}


class Cluster:
    """folder: has all files. build: the programs of bfcd. programs: the folder with those of Kubernetes."""

    def __init__(self, folder, build, programs):
        self.folder, self.build, self.programs = folder, build, programs
        self.cgroup = '/' + os.path.basename(folder)
        self.tokens = {name: secrets.token_hex(16) for name in ('admin', 'bfcd-dra')}
        self.kubeconfig = self.path('admin.conf')
        self.processes, self.images = {}, []
        self.nodes = {name: Node(self, name) for name in NODES}
        self.connection = None

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def note(self, text):
        """In the log of the cases."""
        with open(self.path('log', 'cases.log'), 'a', encoding='utf-8') as f:
            f.write(f'{datetime.datetime.now().isoformat(timespec="milliseconds")} {text}\n')

    def start(self, name, *command):
        self.processes[name] = Process(name, [f'{self.programs}/{name}', *command], self.path('log', f'{name}.log')).start()

    def up(self):
        for name in ('log', 'certs', 'etcd'):
            os.makedirs(self.path(name))
        for words in (['link', 'set', 'lo', 'up'], ['link', 'add', 'nodes', 'type', 'bridge'], ['link', 'set', 'nodes', 'up'],
                      ['address', 'add', f'{API_ADDRESS}/24', 'dev', 'nodes'],
                      ['address', 'add', f'{SERVICE_ADDRESS}/32', 'dev', 'nodes']):
            must('ip', *words)
        write_kernel('/proc/sys/net/ipv4/ip_forward', '1')
        self.images = [images.pause(self.path('pause.tar')), images.job(self.path('job.tar'), self.build)]
        self.start_control_plane()
        for node in self.nodes.values():
            node.make()
        self.apply(RIGHTS)
        self.apply(CLASS)
        for namespace in (*TENANTS, 'other'):
            self.post('/api/v1/namespaces', {'metadata': {'name': namespace}})
        wait_for(lambda: len(self.ready_nodes()) == len(NODES), 'Ready nodes')
        for namespace in (*TENANTS, 'other'):
            wait_for(lambda: self.get(f'/api/v1/namespaces/{namespace}/serviceaccounts/default', check=False), 'service account')
        wait_for(lambda: len(self.slices()) == len(NODES), 'ResourceSlices of all nodes')

    def start_control_plane(self):
        must('openssl', 'genrsa', '-out', self.path('sa.key'), '2048')
        must('openssl', 'rsa', '-in', self.path('sa.key'), '-pubout', '-out', self.path('sa.pub'))
        write(self.path('tokens.csv'), f'{self.tokens["admin"]},admin,1,system:masters\n{self.tokens["bfcd-dra"]},bfcd-dra,2\n', 0o600)
        write(self.kubeconfig, KUBECONFIG.format(address=API_ADDRESS, token=self.tokens['admin']), 0o600)
        os.environ['KUBECONFIG'] = self.kubeconfig
        etcd = 'http://127.0.0.1:2379'
        self.start('etcd', '--data-dir', self.path('etcd'), '--unsafe-no-fsync', '--listen-client-urls', etcd,
                   '--advertise-client-urls', etcd, '--listen-peer-urls', 'http://127.0.0.1:2380')
        self.start('kube-apiserver', f'--etcd-servers={etcd}', f'--cert-dir={self.path("certs")}', '--secure-port=443',
                   '--service-account-issuer=https://kubernetes.default.svc',
                   f'--service-account-key-file={self.path("sa.pub")}', f'--service-account-signing-key-file={self.path("sa.key")}',
                   f'--token-auth-file={self.path("tokens.csv")}', '--authorization-mode=RBAC', '--allow-privileged=true',
                   '--service-cluster-ip-range=10.96.0.0/16', f'--advertise-address={API_ADDRESS}',
                   '--endpoint-reconciler-type=none', '--kubelet-preferred-address-types=InternalIP')
        wait_for(lambda: listens((API_ADDRESS, 443)) and self.get('/readyz', check=False) is not None, 'API server')
        self.start('kube-controller-manager', f'--kubeconfig={self.kubeconfig}', '--leader-elect=false',
                   f'--service-account-private-key-file={self.path("sa.key")}',
                   f'--root-ca-file={self.path("certs", "apiserver.crt")}')
        self.start('kube-scheduler', f'--kubeconfig={self.kubeconfig}', '--leader-elect=false')

    # -- the API

    def request(self, method, path, body=None, check=True):
        text = None if body is None else json.dumps(body)
        for last in (False, True):  # the server closes connections that were idle
            try:
                if self.connection is None:
                    context = ssl.create_default_context()
                    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                    self.connection = http.client.HTTPSConnection(API_ADDRESS, 443, context=context, timeout=60)
                self.connection.request(method, path, text, {'Authorization': f'Bearer {self.tokens["admin"]}',
                                                             'Content-Type': 'application/json'})
                response = self.connection.getresponse()
                answer = response.read().decode()
                break
            except (OSError, http.client.HTTPException):
                self.connection = None
                if last:
                    raise
        if response.status >= 400:
            expect(not check, f'{method} {path}: {response.status}', answer)
            return None
        return json.loads(answer) if answer.startswith('{') else answer

    def get(self, path, check=True):
        try:
            return self.request('GET', path, check=check)
        except OSError:
            if check:
                raise
            return None

    def post(self, path, body):
        return self.request('POST', path, body)

    def ready_nodes(self):
        return [n['metadata']['name'] for n in self.get('/api/v1/nodes')['items']
                if any(c['type'] == 'Ready' and c['status'] == 'True' for c in n.get('status', {}).get('conditions', []))]

    def slices(self):
        """The devices of each node."""
        return {s['spec']['nodeName']: s['spec'].get('devices', [])
                for s in self.get('/apis/resource.k8s.io/v1/resourceslices')['items'] if s['spec'].get('devices')}

    def claims(self):
        return self.get('/apis/resource.k8s.io/v1/resourceclaims')['items']

    def kubectl(self, *words, check=True, **options):
        done = run([f'{self.programs}/kubectl', *words], **options)
        expect(done.returncode == 0 or not check, f'kubectl {" ".join(words)} failed', done.stderr)
        return done

    def apply(self, text):
        self.kubectl('apply', '-f', '-', input=text)


def must(*words):
    done = run(words)
    expect(done.returncode == 0, f'{" ".join(words)} failed', done.stderr)
    return done.stdout


def save_logs(folder, where):
    """What each daemon printed, and the outputs of pods."""
    os.makedirs(where, exist_ok=True)
    for source in ('.', *NODES):
        if os.path.isdir(os.path.join(folder, source, 'log')):
            with contextlib.suppress(shutil.Error):  # logs of pods that end
                shutil.copytree(os.path.join(folder, source, 'log'), os.path.join(where, source), symlinks=True, dirs_exist_ok=True)
