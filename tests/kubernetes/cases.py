# What the cluster must show. A case is a function that gets the cluster and a source of random numbers, and returns its figures.
#
# SPDX-License-Identifier: Apache-2.0
import contextlib
import datetime
import glob
import itertools
import json
import os
import re
import shutil
import statistics
import time

from cluster import (FAKE_CUDA, MIB, NODES, PARTITION, TENANTS, Failed, Process, command_of, expect, kill, parent_of, pids, read, run,
                     wait_for, write)

CASES = {}
SPACE = 'vision'
numbers = itertools.count()


class Skip(Exception):
    """This machine lacks something for the case."""


def case(function):
    CASES[function.__name__.replace('_', '-')] = function
    return function


def run_case(it, name, rng):
    figures = CASES[name](it, rng)
    clean(it)
    return figures


# ---- pods ----------------------------------------------------------------------------


def claim_spec(memory, device='host'):
    """memory: in MiB."""
    request = {'deviceClassName': 'bfcd', 'capacity': {'requests': {'memory': f'{memory}Mi'}}, 'selectors': [
        {'cel': {'expression': f'device.attributes["memory.bfcd"].partition == "{PARTITION[device]}"'}}]}
    return {'devices': {'requests': [{'name': 'memory', 'exactly': request}]}}


class Pod:
    """A pod with a claim of its own, or without one, or with one of others (claim: its name)."""

    def __init__(self, it, *words, memory=0, device='host', node=NODES[0], namespace=SPACE, env=None, claim=None, uid=1000,
                 shell=None, volumes=None, mounts=None):
        self.it, self.namespace, self.node, self.device = it, namespace, node, device
        self.name = f'{device}-{next(numbers)}'
        self.path = f'/api/v1/namespaces/{namespace}/pods/{self.name}'
        claims = f'/apis/resource.k8s.io/v1/namespaces/{namespace}'
        if memory:
            it.post(f'{claims}/resourceclaimtemplates', {'metadata': {'name': self.name}, 'spec': {'spec': claim_spec(memory, device)}})
            source = {'resourceClaimTemplateName': self.name}
        else:
            source = {'resourceClaimName': claim}
        has_claim = bool(memory or claim)
        container = {
            'name': 'job', 'image': 'localhost/job:1', 'imagePullPolicy': 'Never',
            'command': ['/bin/sh', '-c', shell] if shell else ['/bin/job', *map(str, words)],
            'env': [{'name': k, 'value': v} for k, v in {'BFC_CACHE': 'off', **(env or {})}.items()],
            'securityContext': {'runAsUser': uid, 'runAsGroup': uid, 'allowPrivilegeEscalation': False, 'capabilities': {'drop': ['ALL']}},
            **({'resources': {'claims': [{'name': 'memory'}]}} if has_claim else {}),
            **({'volumeMounts': [{'name': name, 'mountPath': path} for name, path in mounts.items()]} if mounts else {})}
        spec = {'restartPolicy': 'Never', 'terminationGracePeriodSeconds': 1, 'containers': [container],
                'automountServiceAccountToken': False, 'enableServiceLinks': False,
                **({'resourceClaims': [{'name': 'memory', **source}]} if has_claim else {}),
                **({'nodeSelector': {'kubernetes.io/hostname': node}} if node else {}),
                **({'volumes': [{'name': name, 'hostPath': {'path': path}} for name, path in volumes.items()]} if volumes else {})}
        it.post(f'/api/v1/namespaces/{namespace}/pods', {'metadata': {'name': self.name}, 'spec': spec})

    def get(self):
        return self.it.get(self.path, check=False) or {'status': {'phase': 'gone'}, 'spec': {}, 'metadata': {}}

    def phase(self):
        return self.get()['status']['phase']

    def uid(self):
        return self.get()['metadata'].get('uid')

    def claim(self):
        """The name of its claim."""
        found = self.get()['status'].get('resourceClaimStatuses') or [{}]
        return found[0].get('resourceClaimName')

    def lines(self):
        """(time in seconds, line) of what its container printed, from the kubelet's file."""
        found = []
        for node in self.it.nodes.values():
            for path in glob.glob(node.path(f'log/pods/{self.namespace}_{self.name}_*/job/*.log')):
                with contextlib.suppress(FileNotFoundError):
                    found += [line.split(' ', 3) for line in read(path).splitlines()]
        return [(seconds_of(words[0]), words[3]) for words in found if len(words) == 4]

    def text(self):
        return ''.join(f'{line}\n' for _, line in self.lines())

    def wait(self, words):
        """Until it printed that, or has ended."""
        def is_there():
            return words in self.text() or self.phase() in ('Succeeded', 'Failed', 'gone')

        wait_for(is_there, lambda: f"'{words}' of pod {self.name}, which is {self.phase()}: {self.text()}{self.describe()}")
        text = self.text()
        expect(words in text, f"pod {self.name}, which is {self.phase()}, did not print '{words}'", text)
        return text

    def wait_phase(self, *phases):
        return wait_for(lambda: self.phase() in phases and self.phase(),
                        lambda: f'{phases} of pod {self.name}: {self.phase()}\n{self.describe()}')

    def describe(self):
        return self.it.kubectl('describe', 'pod', '--namespace', self.namespace, self.name, check=False).stdout

    def pids(self):
        """Of its containers, the sandbox's process included."""
        uid = self.uid()
        return [pid for pid in pids() if uid and in_group(pid, uid)]

    def end(self):
        """Its program ends when it sees the file."""
        self.it.kubectl('exec', '--namespace', self.namespace, self.name, '--', 'touch', '/tmp/end')

    def delete(self):
        self.it.request('DELETE', self.path, check=False)


def seconds_of(text):
    """Of a time with nanoseconds and a zone."""
    whole, _, rest = text.partition('.')
    fraction = re.match(r'\d*', rest)[0]
    zone = rest[len(fraction):].replace('Z', '+00:00')
    return datetime.datetime.fromisoformat(whole + zone).timestamp() + float(f'0.{fraction or 0}')


def in_group(pid, uid):
    try:
        text = read(f'/proc/{pid}/cgroup')
    except (FileNotFoundError, ProcessLookupError):
        return False
    return f'pod{uid}' in text


def job(it, memory, use=None, **options):
    """A pod that uses its memory until it is ended."""
    return Pod(it, use or memory, 'until=/tmp/end', memory=memory, **options)


# ---- what is left --------------------------------------------------------------------


def left(it):
    """Leases, charges, claims and CDI files, as a list; a cluster without pods has none."""
    found = [f'claim {c["metadata"]["name"]}' for c in it.claims()]
    for node in it.nodes.values():
        found += [f'{node.name}: lease {name}' for name in node.leases()]
        found += [f'{node.name}: session of pid {r["pid"]}' for r in node.rows('sessions')]
        found += [f'{node.name}: {r["bytes_reserved"]} bytes in {r["partition"]}' for r in node.rows('partitions') if r['bytes_reserved']]
        found += [f'{node.name}: CDI file of {uid}' for uid in node.claims()]
    return found


def clean(it):
    """Deletes all pods and claims. Nothing may be left then."""
    for namespace in (SPACE, 'nlp', 'other'):
        it.kubectl('delete', 'pods,resourceclaims,resourceclaimtemplates', '--all', '--namespace', namespace, '--wait=false')
    try:
        wait_for(lambda: not left(it), 'end')
    except TimeoutError as e:
        raise Failed(f'left without pods: {", ".join(left(it))}') from e


def check_same(it, pods):
    """What bfcd, the API server and the CDI files say of these running pods is one."""
    for node in it.nodes.values():
        here = {}
        for pod in pods:
            if pod.node == node.name:
                name = pod.claim()
                claim = it.get(f'/apis/resource.k8s.io/v1/namespaces/{pod.namespace}/resourceclaims/{name}')
                here[claim['metadata']['uid']] = claim
        leases = {uid: [name for name in node.leases() if uid in name] for uid in here}
        expect(all(len(names) == 1 for names in leases.values()), f'{node.name}: leases of claims', leases)
        expect(len(node.leases()) == len(here), f'{node.name}: leases', (sorted(node.leases()), sorted(here)))
        expect(node.claims() == set(here), f'{node.name}: CDI files', (node.claims(), set(here)))


def wait_same(it, pods, what=''):
    """Until check_same() holds."""
    last = []

    def is_same():
        try:
            check_same(it, pods)
            return True
        except Failed as e:
            last[:] = [e]
            return False

    wait_for(is_same, lambda: f'agreement of bfcd, the API server and the CDI files {what}: {last}')


# ---- the cases -----------------------------------------------------------------------


@case
def five_pods(it, _):
    """Five pods of 400Mi on a partition of 1Gi: two run, three wait with the scheduler's reason, and all run in turn."""
    figures = []
    for device in PARTITION:
        pods = [job(it, 400, device=device) for _ in range(5)]
        waiting, n_ended = list(pods), 0
        while waiting:
            wanted = min(2, len(waiting))
            running = wait_for(lambda: (r := [p for p in waiting if p.phase() == 'Running']) and len(r) == wanted and r,
                               lambda: f'{wanted} running: {[(p.name, p.phase(), p.text()) for p in pods]}')
            for pod in running:
                expect('has 400' in pod.wait('waits'), 'a pod has its memory', pod.text())
            others = [p for p in waiting if p not in running]
            if n_ended == 0:
                expect(all(p.phase() == 'Pending' for p in others) and len(others) == 3, 'three are pending',
                       [(p.name, p.phase()) for p in pods])
                reasons = wait_for(lambda: (r := {m[1] for p in others if (m := re.search(
                    r'FailedScheduling .*?: (.*)', p.describe()))}) and r, 'reason of the scheduler')
                expect(all('cannot allocate all claims' in r for r in reasons), 'the reason', reasons)
            check_same(it, running)
            running[0].end()
            expect(running[0].wait_phase('Succeeded', 'Failed') == 'Succeeded', 'it ends well', running[0].text())
            waiting.remove(running[0])
            n_ended += 1
        figures.append(f'{device}: {n_ended} in turn')
    return f'{", ".join(figures)}; the others wait: "{sorted(reasons)[0].split(",")[0]}"'


@case
def two_nodes(it, _):
    """Five pods of 400Mi where a node has room for two: two run on each, and the fifth waits for a claim to end."""
    pods = [job(it, 400, node=None) for _ in range(5)]
    running = wait_for(lambda: (r := [p for p in pods if p.phase() == 'Running']) and len(r) == 4 and r, '4 running')
    waiting = next(p for p in pods if p not in running)
    where = sorted(p.get()['spec']['nodeName'] for p in running)
    expect(where == sorted(NODES * 2), 'two on each node', where)
    expect(waiting.phase() == 'Pending', 'the fifth waits', waiting.phase())
    running[0].delete()
    waiting.wait('has 400')
    return f'{len(running)} run, 1 waited until another was deleted'


@case
def over_claim(it, _):
    """A pod over its claim is refused with the lease's name, and goes on or fails as its program decides; others go on."""
    figures = []
    for device in PARTITION:
        other = job(it, 200, device=device)
        other.wait('has 200')
        goes_on = Pod(it, 64, 64, 'until=/tmp/end', memory=100, device=device)
        fails = Pod(it, memory=100, device=device, shell='job 64 64 >/tmp/out; cat /tmp/out; ! grep refused /tmp/out')
        text = goes_on.wait('waits')
        expect('has 64' in text, 'it has what is within its claim', text)
        refused = re.search(r'refused: (.*)', text)
        name = next(name for name in it.nodes[NODES[0]].leases() if name.startswith(f'{goes_on.name}.'))
        expect(refused and f"lease '{name}'" in refused[1], f'the refusal names the lease {name}', text)
        expect(fails.wait_phase('Succeeded', 'Failed') == 'Failed', 'a program that gives up fails', fails.text())
        time.sleep(2)  # goes on for a while
        expect(goes_on.phase() == 'Running' and 'lost' not in goes_on.text(), 'the other program goes on', goes_on.text())
        expect(other.phase() == 'Running' and 'lost' not in other.text(), 'another pod does not notice', other.text())
        figures.append(device)
        for pod in (other, goes_on):
            pod.end()
            expect(pod.wait_phase('Succeeded', 'Failed') == 'Succeeded', 'it ends well', pod.text())
    return f'{", ".join(figures)}: "{refused[1].split(", largest")[0]}"'


SOCKETS = ('/run/bfcd/admin.sock', '/run/bfcd/monitor.sock', '/run/bfcd/lease/lease.sock', '/run/bfcd/keepers/host')


@case
def reach(it, _):
    """A pod reaches neither other sockets of bfcd nor another pod's lease, and is in no other tenant than its namespace's."""
    other = job(it, 100)
    other.wait('has 100')
    uid = next(iter(it.nodes[NODES[0]].claims()))
    there = f'/run/bfcd/leases/{uid}/bfcd.sock'
    pod = Pod(it, 8, *SOCKETS, there, '/run/bfcd/client/bfcd.sock', memory=16)
    text = pod.wait('done')
    expect(text.count('No such file') == len(SOCKETS) + 1, 'no other socket is there', text)
    expect('/run/bfcd/client/bfcd.sock: connected' in text, 'its own is', text)
    # With the folder of the node, as a pod of a namespace without Pod Security can have it, the modes count.
    pod = Pod(it, *[path.replace('/run/', '/node/') for path in (*SOCKETS, there)], memory=16, volumes={'run': '/run/bfcd'},
              mounts={'run': '/node/bfcd'})
    text = pod.wait('done')
    expect(text.count('Permission denied') + text.count('No such file') == len(SOCKETS) + 1, 'the modes keep it out', text)
    expect('connected' not in text, 'nothing is reached', text)
    pod = Pod(it, memory=16, shell='BFC_TENANT=speech job 8; BFC_PARTITION=infer job 8')
    pod.wait_phase('Succeeded', 'Failed')
    text = pod.text()
    expect(text.count('no session: ') >= 1 and 'tenant speech' not in text, 'another tenant is refused', text)
    expect('has 8' not in text, 'another partition is refused', text)
    pod = Pod(it, 8, memory=16, namespace='other')
    event = wait_for(lambda: re.search(r"namespace 'other' has no tenant[^\n]*", pod.describe()), 'event of the pod')
    expect(other.phase() == 'Running' and 'lost' not in other.text(), 'another pod does not notice', other.text())
    return f'{len(SOCKETS)} sockets and 1 lease out of reach; "{event[0]}"'


@case
def shared_claim(it, _):
    """Two pods of one ResourceClaim have one sum; the lease ends with the last of them."""
    figures = []
    for device in PARTITION:
        name = f'shared-{device}'
        it.post(f'/apis/resource.k8s.io/v1/namespaces/{SPACE}/resourceclaims',
                {'metadata': {'name': name}, 'spec': claim_spec(200, device)})
        first = Pod(it, 120, 'until=/tmp/end', claim=name, device=device)
        first.wait('has 120')
        second = Pod(it, 60, 60, 'until=/tmp/end', claim=name, device=device)
        text = second.wait('waits')
        expect('has 60' in text and re.search(r"refused: .*lease '", text), 'the second has what is left of the sum', text)
        node = it.nodes[NODES[0]]
        expect(len(node.leases()) == 1, 'one lease', node.leases())
        first.end()
        first.wait_phase('Succeeded')
        first.delete()
        wait_for(lambda: first.phase() == 'gone', 'end of the first')
        expect(len(node.leases()) == 1 and second.phase() == 'Running', 'the lease goes on', node.leases())
        third = Pod(it, 100, claim=name, device=device)
        expect('has 100' in third.wait('done'), 'another pod gets what the first had', third.text())
        second.end()
        expect(second.wait_phase('Succeeded', 'Failed') == 'Succeeded', 'it ends well', second.text())
        for pod in (second, third):
            pod.delete()
        wait_for(lambda: not node.leases() and not node.claims(), 'end of the lease')
        figures.append(device)
    return f'{", ".join(figures)}: 120 + 60 of 200 MiB, one lease'


@case
def drained(it, _):
    """A pod that was placed on a device that is then drained waits for it; one that runs there goes on."""
    node = it.nodes[NODES[0]]
    runs = job(it, 100, device='gpu')
    runs.wait('has 100')
    node.processes['bfcd-dra'].end()
    placed = job(it, 100, device='gpu')
    wait_for(lambda: placed.get()['spec'].get('nodeName'), 'node of the pod')
    node.ctl('drain', 'cuda:0')
    node.processes['bfcd-dra'].start()
    event = wait_for(lambda: re.search(r"partition 'infer' gets no new pods: [^\n]*", placed.describe()), lambda: placed.describe())
    wait_same(it, [runs])
    waits = job(it, 100, device='gpu')
    wait_for(lambda: 'cannot allocate all claims' in waits.describe(), 'reason of the scheduler, which sees the taint')
    expect(runs.phase() == 'Running', 'the first goes on', runs.text())
    node.ctl('resume', 'cuda:0')
    for pod in (placed, waits):
        pod.wait('has 100')
    expect(runs.phase() == 'Running' and 'lost' not in runs.text(), 'the first goes on', runs.text())
    return f'"{event[0]}"'


# ---- kills ---------------------------------------------------------------------------


class Killer:
    """Kills one thing after the other under running pods, and says after each what must be there."""

    def __init__(self, it, rng):
        self.it, self.rng, self.counts = it, rng, {}
        self.pods, self.n_without_bfcd = [], 0

    def fill(self):
        """Two pods on each device of each node, as long as there are fewer."""
        for node in NODES:
            for device in PARTITION:
                while sum(p.node == node and p.device == device for p in self.pods) < 2:
                    pod = job(self.it, self.rng.choice((40, 100, 200)), device=device, node=node)
                    self.pods.append(pod)

    def check(self, what):
        """All pods run with their memory, and nothing else is there."""
        for pod in list(self.pods):
            try:
                pod.wait('waits')
            except TimeoutError as e:
                raise Failed(f'after the kill of {what}: {e}') from e
            except Failed as e:
                # A program that begins in the second without bfcd is told so, and may try again. This one ends.
                if not what.startswith('bfcd') or 'no session: cannot reach bfcd' not in pod.text():
                    raise Failed(f'after the kill of {what}: {e}') from e
                self.n_without_bfcd += 1
                self.drop([pod])
                self.fill()
                self.check(what)
                return
        wait_same(self.it, self.pods, f'after the kill of {what}')
        for pod in self.pods:
            expect(pod.phase() == 'Running' and 'lost' not in pod.text(), f'after the kill of {what} pod {pod.name} goes on',
                   f'{pod.phase()} {pod.text()}')

    def drop(self, pods):
        """These pods have ended by the kill. Nothing of them may stay."""
        for pod in pods:
            phase = pod.wait_phase('Failed', 'Succeeded', 'gone')
            expect(phase != 'Succeeded', f'pod {pod.name} did not end by itself', pod.text())
            pod.delete()
            self.pods.remove(pod)

    # Each kills one thing, and brings back what a supervisor would. The result: the pods that end by it, by design.

    def kill_process(self):
        """The job's process: its pod fails."""
        pod = self.rng.choice(self.pods)
        for pid in pod.pids():
            if command_of(pid)[:1] == ['/bin/job']:
                kill(pid)
        return [pod]

    def kill_container(self):
        """The shim of containerd, with all that it runs: its pod fails."""
        pod = self.rng.choice(self.pods)
        shims = {parent_of(pid) for pid in pod.pids() if command_of(pid)[:1] == ['/pause']}
        for pid in (*shims, *pod.pids()):
            kill(pid)
        return [pod]

    def restart(self, name):
        node = self.it.nodes[self.rng.choice(NODES)]
        node.processes[name].end()
        time.sleep(self.rng.choice((0, 0, 0.2, 1, 3)))
        node.processes[name].start()
        return []

    def kill_kubelet(self):
        """Pods go on."""
        return self.restart('kubelet')

    def kill_containerd(self):
        """Containers go on: each has a shim."""
        return self.restart('containerd')

    def kill_driver(self):
        """Pods go on."""
        return self.restart('bfcd-dra')

    def kill_bfcd(self):
        """Jobs resume their sessions."""
        return self.restart('bfcd')

    def keeper(self, device):
        node = self.it.nodes[self.rng.choice(NODES)]
        found = [pid for pid in node.pids_of('bfcd-keeper') if command_of(pid)[1:3] == [device, '--socket']]
        expect(len(found) == 1, f'{node.name} has one keeper of {device}', [command_of(pid) for pid in node.pids_of('bfcd-keeper')])
        kill(found[0])
        return node

    def kill_host_keeper(self):
        """bfcd has all that it had, and gives it to another one."""
        node = self.keeper('host')
        wait_for(lambda: node.pids_of('bfcd-keeper'), 'keeper')
        return []

    def kill_gpu_keeper(self):
        """It has the memory of the GPU: the device is lost with what jobs have there, and is opened again when they have ended."""
        node = self.keeper('cuda:0')
        return [p for p in self.pods if p.node == node.name and p.device == 'gpu']

    def restart_each_container(self):
        """Where the chart runs them: the kubelet starts each again. The names of those that were killed."""
        killed = []
        for program in ('bfcd', 'bfcd-dra'):
            node = self.it.nodes[self.rng.choice(NODES)]
            before = node.pids_of(program)
            expect(len(before) == 1, f'{node.name} has one {program}', before)
            kill(before[0])
            wait_for(lambda: (now := node.pids_of(program)) and now != before, f'another {program}')
            killed.append(program)
        for device, kill_keeper in (('host', self.kill_host_keeper), ('GPU', self.kill_gpu_keeper)):
            self.drop(kill_keeper())
            killed.append(f'the keeper of the {device}')
        self.fill()
        self.check(', '.join(killed))
        return killed


N_KILLS = 50


@case
def kills(it, rng):
    """50 times kill -9 of processes of pods, shims, kubelet, containerd, driver, bfcd and keepers, some during the start or the
    end of pods: no lease, charge or claim is left over, and none is lost."""
    k = Killer(it, rng)
    kinds = [name for name in dir(k) if name.startswith('kill_')]
    wanted = (kinds * (N_KILLS // len(kinds) + 1))[:N_KILLS]
    rng.shuffle(wanted)
    k.fill()
    k.check('nothing')
    n_during = 0
    for i, name in enumerate(wanted):
        if rng.random() < 0.5:  # while a pod ends, and another one begins
            n_during += 1
            gone = rng.choice(k.pods)
            gone.delete()
            k.pods.remove(gone)
            k.fill()
            time.sleep(rng.random() * 1.5)
            if name in ('kill_process', 'kill_container', 'kill_gpu_keeper'):  # which end pods that run
                k.check(f'nothing before {i + 1}')
        it.note(f'kill {i + 1} of {N_KILLS}: {name[5:]}')
        ended = getattr(k, name)()
        k.drop([pod for pod in ended if pod in k.pods])
        k.fill()
        k.check(f'{name[5:]} ({i + 1} of {N_KILLS})')
        k.counts[name[5:]] = k.counts.get(name[5:], 0) + 1
    counts = ', '.join(f'{n} {what}' for what, n in sorted(k.counts.items()))
    return (f'{N_KILLS} ({counts}), {n_during} of them while a pod began or ended; {k.n_without_bfcd} pods began in a moment '
            'without bfcd and failed')


@case
def restarts(it, rng):
    """Kubelet, bfcd and driver end and start in each order under running pods; a pod is deleted, and one made, while bfcd or the
    driver is away."""
    node = it.nodes[NODES[0]]
    pods = [job(it, 100, device=device) for device in PARTITION]
    for pod in pods:
        pod.wait('has 100')
    orders = list(itertools.permutations(('kubelet', 'bfcd', 'bfcd-dra')))
    for order in orders:
        for name in order:
            node.processes[name].end(rng.choice((9, 15)))
        for name in order:
            node.processes[name].start()
        wait_for(lambda: node.ctl('status', check=False), 'bfcd')
        wait_for(lambda: len(it.ready_nodes()) == len(NODES), 'Ready nodes')
        check_same(it, pods)
        for pod in pods:
            expect(pod.phase() == 'Running' and 'lost' not in pod.text(), f'after {order} a pod goes on', pod.text())
    for name in ('bfcd', 'bfcd-dra'):
        goes, stays = job(it, 100), job(it, 100)
        goes.wait('has 100')
        stays.wait('has 100')
        node.processes[name].end()
        goes.delete()
        new = job(it, 100)
        time.sleep(3)
        expect(new.phase() == 'Pending', f'without {name} no pod starts', new.phase())
        node.processes[name].start()
        new.wait('has 100')
        wait_for(lambda: goes.phase() == 'gone', 'end of the deleted pod')
        wait_same(it, [*pods, stays, new])
        for pod in (stays, new):
            pod.delete()
    for pod in pods:
        pod.end()
        expect(pod.wait_phase('Succeeded', 'Failed') == 'Succeeded', 'it ends well', pod.text())
    return f'{len(orders)} orders; a pod that was deleted and one that was made without bfcd, and without the driver'


# ---- figures -------------------------------------------------------------------------

N_TIMES = 12


@case
def times(it, _):
    """From the request for a pod to its first output, with a claim and without, in turns; 100 claims; the memory of the driver."""
    took = {True: [], False: []}
    shell = 'echo begins'
    for has_claim in (True, False) * N_TIMES:
        start = time.time()
        pod = Pod(it, memory=16 if has_claim else 0, shell=shell)
        pod.wait('begins')
        took[has_claim].append(pod.lines()[0][0] - start)
        pod.wait_phase('Succeeded')
        pod.delete()
        wait_for(lambda: pod.phase() == 'gone', 'end of the pod')
    medians = {k: statistics.median(v) for k, v in took.items()}
    rates = {}
    for has_claim in (True, False):
        start = time.monotonic()
        pods = [Pod(it, memory=16 if has_claim else 0, shell=shell, node=None) for _ in range(100)]
        for pod in pods:
            pod.wait_phase('Succeeded')
        for pod in pods:
            pod.delete()
        wait_for(lambda: not left(it), 'end of all claims')
        rates[has_claim] = 60 * len(pods) / (time.monotonic() - start)
    driver = it.nodes[NODES[0]].processes['bfcd-dra'].pid
    memory = int(re.search(r'VmRSS:\s+(\d+)', read(f'/proc/{driver}/status'))[1]) / 1024
    return (f'{medians[True] * 1000:.0f} ms with a claim, {medians[False] * 1000:.0f} ms without (medians of {N_TIMES}); '
            f'{rates[True]:.0f} pods with claims a minute, {rates[False]:.0f} without; the driver has {memory:.0f} MiB')


@case
def metrics(it, _):
    """A real Prometheus has the bytes of each pod, as bfcctl does, with the labels lease, namespace and pod."""
    node = it.nodes[NODES[0]]
    write(node.path('prometheus.yaml'), PROMETHEUS)
    address = f'{node.address}:9090'
    prometheus = Process('prometheus', ['prometheus', f'--config.file={node.path("prometheus.yaml")}',
                                        f'--storage.tsdb.path={node.path("prometheus")}', f'--web.listen-address={address}'],
                         node.path('log/prometheus.log'), node.enter()).start()
    try:
        pods = [job(it, 100, use=use, device=device) for device in PARTITION for use in (40, 80)]
        pods.append(job(it, 60, namespace='nlp'))
        for pod in pods:
            pod.wait('has')
        last = []

        def is_equal():
            last[:] = [sorted(query(address, JOINED)), sorted(of_bfcctl(node, pods))]
            return last[0] == last[1] and len(last[0]) == len(pods)

        wait_for(is_equal, lambda: f'same bytes in Prometheus and bfcctl: {last}')
        return f'{len(pods)} pods; {" ".join(f"{pod}={n // MIB}MiB" for _, pod, n in last[0])}'
    finally:
        prometheus.end()


PROMETHEUS = '''global: {scrape_interval: 1s, scrape_timeout: 1s}
scrape_configs:
  - job_name: bfcd
    params: {leases: [each]}
    static_configs: [{targets: ["127.0.0.1:9477"]}]
  - job_name: bfcd-dra
    static_configs: [{targets: ["127.0.0.1:9846"]}]
'''
JOINED = 'sum by (namespace, pod) (bfcd_lease_reserved_bytes * on (lease) group_right () bfcd_claim_info)'


def query(address, text):
    """(namespace, pod, bytes) of each."""
    done = run(['curl', '-sS', '--get', '--data-urlencode', f'query={text}', f'http://{address}/api/v1/query'])
    try:
        rows = json.loads(done.stdout)['data']['result']
    except (ValueError, KeyError):
        return [('error', done.stdout + done.stderr, 0)]
    return [(r['metric'].get('namespace', ''), r['metric'].get('pod', ''), int(r['value'][1])) for r in rows]


def of_bfcctl(node, pods):
    rows = node.leases()
    return [(pod.namespace, pod.name, next((row['bytes_reserved'] for name, row in rows.items() if name.startswith(f'{pod.name}.')), 0))
            for pod in pods]


# ---- the chart -----------------------------------------------------------------------

CHART_SPACE = 'bfcd'


def chart(it, tag, size):
    """The chart's objects for two devices. The keeper of the GPU gets the fake driver in the place of NVIDIA's runtime class."""
    values = {
        'image': {'repository': 'localhost/bfcd', 'tag': tag, 'pullPolicy': 'Never'}, 'tenants': TENANTS,
        'gpu': {'runtimeClassName': '', 'visibleDevices': '', 'devices': ['example.org/fake-cuda={uuid}'], 'proxy': False},
        'config': {
            'max_sessions': 512,
            'devices': [
                {'id': 'host', 'size': '1GiB', 'partitions': [{'name': 'train', 'limit': size}]},
                {'id': 'cuda:0', 'headroom': 0, 'partitions': [{'name': 'infer', 'limit': size, 'share': 'fd'}]}],
            'tenants': [{'name': name, 'match': {}, 'quotas': [{'partition': p, 'limit': size} for p in PARTITION.values()]}
                        for name in TENANTS.values()]}}
    write(it.path('values.json'), json.dumps(values))
    done = run([it.build.chart_tool, '--namespace', CHART_SPACE, '--values', it.path('values.json'), it.build.chart])
    expect(done.returncode == 0, 'the chart can be rendered', done.stderr)
    listed = it.kubectl('create', '--dry-run=client', '--output=json', '-f', '-', input=done.stdout).stdout
    objects = list(json_objects(listed))
    library = '/usr/lib/fake-cuda'
    for o in objects:
        if o['kind'] == 'DaemonSet' and o['metadata']['name'].endswith('-keepers'):
            spec = o['spec']['template']['spec']
            for name, source in (('fake-cuda', os.path.dirname(it.build.fake_cuda)), ('fake-state', FAKE_CUDA['FAKE_CUDA_STATE'])):
                spec['volumes'].append({'name': name, 'hostPath': {'path': source}})
            for container in spec['containers']:
                container.setdefault('env', []).extend(
                    {'name': k, 'value': v} for k, v in {**FAKE_CUDA, 'LD_LIBRARY_PATH': library}.items())
                container['volumeMounts'] += [{'name': 'fake-cuda', 'mountPath': library},
                                              {'name': 'fake-state', 'mountPath': FAKE_CUDA['FAKE_CUDA_STATE']}]
    return json.dumps({'apiVersion': 'v1', 'kind': 'List', 'items': objects})


def json_objects(text):
    """kubectl prints one object after the other, or a list."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        yield from value['items'] if value['kind'] == 'List' else [value]
        while at < len(text) and text[at].isspace():
            at += 1


def wait_rolled_out(it):
    for name in ('bfcd', 'bfcd-keepers'):
        path = f'/apis/apps/v1/namespaces/{CHART_SPACE}/daemonsets/{name}'

        def is_out():
            o = it.get(path)
            s = o['status']
            is_new = name.endswith('-keepers') or s.get('updatedNumberScheduled') == len(NODES)
            return s.get('observedGeneration') == o['metadata']['generation'] and is_new and s.get('numberReady') == len(NODES)

        wait_for(is_out, lambda: f'rollout of {name}: ' + it.kubectl('describe', 'pods', '--namespace', CHART_SPACE).stdout[-3000:])


def pods_of_chart(it):
    return {p['metadata']['name']: p['metadata']['uid'] for p in it.get(f'/api/v1/namespaces/{CHART_SPACE}/pods')['items']}


@case
def upgrade(it, rng):
    """The chart runs bfcd, keepers and driver as pods; an upgrade of the image and a change of the configuration under running
    pods lose nothing."""
    if not it.build.image:
        raise Skip('no image was built')
    for node in it.nodes.values():
        node.stop_bfcd()
        node.load(it.build.image)
        name = next(word for word in node.images('list', '-q').split() if word.startswith('localhost/bfcd:'))
        for tag in ('one', 'two'):
            node.images('tag', '--force', name, f'localhost/bfcd:{tag}')
    it.post('/api/v1/namespaces', {'metadata': {'name': CHART_SPACE}})
    try:
        it.apply(chart(it, 'one', '1GiB'))
        wait_rolled_out(it)
        wait_for(lambda: len(it.slices()) == len(NODES) and not any(d.get('taints') for ds in it.slices().values() for d in ds),
                 lambda: f'ResourceSlices without taints: {it.slices()}')
        k = Killer(it, rng)
        k.fill()
        k.check('nothing')
        times = []
        for what, tag, size in (('image', 'two', '1GiB'), ('configuration', 'two', '1022MiB'), ('image', 'one', '1GiB')):
            before, start = pods_of_chart(it), time.monotonic()
            it.apply(chart(it, tag, size))
            new = job(it, 20, node=None)  # begins meanwhile
            wait_rolled_out(it)
            after = pods_of_chart(it)
            same = {name for name in before if after.get(name) == before[name]}
            expect(len(same) == len(NODES) and all('keepers' in name for name in same), 'only the keepers are as they were',
                   (before, after))
            new.wait('has 20')
            new.end()
            expect(new.wait_phase('Succeeded', 'Failed') == 'Succeeded', 'it ends well', new.text())
            new.delete()
            wait_for(lambda: new.phase() == 'gone', 'end of the pod')
            k.check(f'the pods of bfcd, for another {what}')
            times.append(time.monotonic() - start)
        killed = k.restart_each_container()
        for pod in k.pods:
            pod.end()
            expect(pod.wait_phase('Succeeded', 'Failed') == 'Succeeded', 'it ends well', pod.text())
        clean(it)
        return f'{len(k.pods)} pods; {len(times)} upgrades, {max(times):.0f} s at most; kill -9 of {", ".join(killed)}'
    finally:
        it.kubectl('delete', 'namespace', CHART_SPACE, check=False)
        for node in it.nodes.values():
            shutil.rmtree(node.path('run/bfcd'), ignore_errors=True)
            node.start_bfcd()
