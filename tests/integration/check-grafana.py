#!/usr/bin/env -S python3 -B
# The dashboard and the rules of integrations/grafana. A real Prometheus scrapes bfc-exporter beside a real daemon and
# jobs; every expression of the dashboard, the rules and the README is evaluated, and the README's answers to an
# operator's questions equal what bfcctl prints.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: check-grafana.py --static                   promtool and the dashboard's structure; nothing is started
#        check-grafana.py BFCD BFCCTL BFC-REPLAY BFC-EXPORTER
#
# BFC_TEST_SECONDS: Prometheus scrapes for so long while jobs run. Exits with 77 where the Debian package prometheus is
# not installed.
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

from checks import LIMIT_S, finish, free_ports, listens, ok, read, run, wait_for

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..')
GRAFANA = os.path.join(ROOT, 'integrations', 'grafana')
DASHBOARD = os.path.join(GRAFANA, 'bfcd-dashboard.json')
RULES = os.path.join(GRAFANA, 'bfcd-rules.yaml')
RULES_TEST = os.path.join(ROOT, 'tests', 'grafana', 'rules-test.yaml')
MIB = 1 << 20


# ---- the files ------------------------------------------------------------------


def panels(dashboard):
    return [p for p in dashboard['panels'] if p['type'] != 'row']


def expressions(dashboard):
    """(where, expression)"""
    for p in panels(dashboard):
        for t in p['targets']:
            yield f'{p["title"]} {t["refId"]}', t['expr']
    for a in dashboard['annotations']['list']:
        if 'expr' in a:
            yield f'annotation {a["name"]}', a['expr']


def questions():
    return re.findall(r'```promql\n(.*?)```', read(os.path.join(GRAFANA, 'README.md')), re.S)


def overlaps(a, b):
    return a['x'] < b['x'] + b['w'] and b['x'] < a['x'] + a['w'] and a['y'] < b['y'] + b['h'] and b['y'] < a['y'] + a['h']


def check_dashboard():
    d = json.loads(read(DASHBOARD))
    places = [p['gridPos'] for p in d['panels']]
    sources = [x['datasource'] for p in panels(d) for x in [p, *p['targets']]]
    used = set(re.findall(r'\$\{?(\w+)', json.dumps([p for p in panels(d)]))) - {'__rate_interval', '__range'}
    ok(d['schemaVersion'] >= 41 and 'id' not in d and d['uid'], 'dashboard: a schema of Grafana 12, and a uid')
    ok(len({p['id'] for p in d['panels']}) == len(d['panels']), 'dashboard: each panel has an id of its own')
    ok(not any(overlaps(a, b) for i, a in enumerate(places) for b in places[:i]) and
       all(p['x'] + p['w'] <= 24 for p in places), 'dashboard: no panel lies on another')
    ok(all(s == {'type': 'prometheus', 'uid': '${datasource}'} for s in sources),
       'dashboard: the data source is the variable')
    ok(used == {v['name'] for v in d['templating']['list']} ==
       {'datasource', 'instance', 'device', 'partition', 'tenant'}, 'dashboard: all variables are used', used)
    ok(all(p['title'] and p['description'] and p['targets'] for p in panels(d)), 'dashboard: panels have a description')


def check_alerts():
    """By text: Prometheus itself reads the rest."""
    rules = read(RULES)
    alerts = re.split(r'^ *- (?=alert:)', rules.split('name: bfcd-alerts')[1], flags=re.M)[1:]
    names = re.findall(r'alert: (\w+)', rules)
    told = read(os.path.join(GRAFANA, 'README.md'))
    for text in alerts:
        name = re.match(r'alert: (\w+)', text).group(1)
        severity = re.search(r'severity: (critical|warning|info)$', text, re.M)
        ok(re.search(r'^ +for: \d', text, re.M) and severity and 'summary: ' in text and
           re.search(r'description: >-.*`bfcctl ', text, re.S), f'{name}: for, severity, summary, a command to look at')
        ok(severity and re.search(rf'^\| {name} \|.*\| {severity.group(1)} \|$', told, re.M), f'{name}: is in the README')
    unit_tests = re.sub(r'\s+', ' ', read(RULES_TEST))
    for name in names:
        expected = set(re.findall(rf'alertname: {name},? eval_time: \w+,? exp_alerts: (\[\]|-)', unit_tests))
        ok(expected == {'[]', '-'}, f'{name}: is tested to fire and not to fire', expected)


def check_static():
    for command in (['check', 'rules', RULES], ['test', 'rules', RULES_TEST]):
        done = run(['promtool', *command])
        ok(done.returncode == 0, f'promtool {" ".join(command[:2])}', done.stdout + done.stderr)
    check_dashboard()
    check_alerts()


# ---- the programs ---------------------------------------------------------------

CONFIG = '''
socket: {{path: {folder}/bfcd.sock}}
admin_socket: {{path: {folder}/admin.sock}}
monitor_socket: {{path: {folder}/monitor.sock}}
devices:
  - {{id: host, size: 512MiB, partitions: [{{name: train, limit: 256MiB}}, {{name: infer, limit: 64MiB}}]}}
tenants:
  - {{name: red, match: {{uid: [{uid}]}}, quotas: [{{partition: train, limit: 96MiB, reserve: 48MiB}}, {{partition: infer}}]}}
  - {{name: blue, match: {{uid: [{uid}]}}, quotas: [{{partition: train, limit: 64MiB}}]}}
  - {{name: green, match: {{uid: [{uid}]}}, quotas: [{{partition: train, limit: 64MiB, reserve: 16MiB}}, {{partition: infer}}]}}
'''
PROMETHEUS = '''
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs: [{{job_name: bfcd, static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}]
'''


class Rig:
    """A daemon, its exporter and a Prometheus that scrapes it every second."""

    def __init__(self, programs, folder, stack):
        self.bfcd, self.bfcctl, self.replay, self.exporter = programs
        self.folder = folder
        self.stack = stack
        self.socket = os.path.join(folder, 'bfcd.sock')
        self.monitor = os.path.join(folder, 'monitor.sock')
        self.write('bfcd.yaml', CONFIG.format(folder=folder, uid=os.getuid()))
        self.start('bfcd', [self.bfcd, '--config', os.path.join(folder, 'bfcd.yaml')], lambda: self.monitor)
        self.exporter_port = self.start('bfc-exporter', [self.exporter, '--socket', self.monitor, '--listen', '127.0.0.1:{}'])
        self.write('prometheus.yml', PROMETHEUS.format(rules=json.dumps(RULES), port=self.exporter_port))
        self.port = self.start('prometheus', ['prometheus', '--config.file', os.path.join(folder, 'prometheus.yml'),
                                              '--storage.tsdb.path', os.path.join(folder, 'data'),
                                              '--web.listen-address', '127.0.0.1:{}'])
        wait_for(self.is_ready, 'Prometheus that is ready')

    def is_ready(self):
        try:
            with urllib.request.urlopen(f'http://127.0.0.1:{self.port}/-/ready', timeout=LIMIT_S):
                return True
        except urllib.error.HTTPError:
            return False

    def write(self, name, text):
        with open(os.path.join(self.folder, name), 'w', encoding='utf-8') as out:
            out.write(text)

    def start(self, name, command, path=None):
        """Another program may take the port before this one does: then with another port."""
        log = os.path.join(self.folder, name + '.log')
        for _ in range(5):
            port, = free_ports(1)
            with open(log, 'w', encoding='utf-8') as out:
                p = subprocess.Popen([word.format(port) for word in command], stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            self.stack.callback(self.kill, p)  # if it does not listen, or does not end by SIGTERM
            wait_for(lambda: p.poll() is not None or listens(path() if path else ('127.0.0.1', port)), f'socket of {name}')
            if p.poll() is None:
                self.stack.callback(self.stop, name, p)
                return port
        sys.exit(f'{name} does not start: {read(log)}')

    @staticmethod
    def kill(process):
        if process.poll() is None:
            process.kill()
            process.wait()

    def stop(self, name, process):
        process.send_signal(signal.SIGTERM)
        status = process.wait(timeout=LIMIT_S)
        ok(status == 0, f'{name} ends by itself', status)

    def get(self, path, **arguments):
        query = urllib.parse.urlencode(arguments, doseq=True)
        try:
            with urllib.request.urlopen(f'http://127.0.0.1:{self.port}/api/v1/{path}?{query}', timeout=LIMIT_S) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as e:
            answer = json.load(e)
        if answer['status'] != 'success':
            raise ValueError(f'{answer["error"]}: {arguments}')
        return answer['data']

    def query(self, expression):
        """[(labels, value)], in the order of the answer."""
        return [(r['metric'], float(r['value'][1])) for r in self.get('query', query=expression)['result']]

    def ctl(self, *command):
        done = run([self.bfcctl, '--socket', self.monitor, '--json', *command])
        if done.returncode != 0:
            sys.exit(f'bfcctl {command} failed: {done.stderr}')
        return json.loads(done.stdout)[command[0]]


# ---- the jobs -------------------------------------------------------------------


class Jobs:
    """Tenants' processes as an operator finds them: some have memory, some were refused, one waits."""

    def __init__(self, rig):
        import bfcd  # from the source tree, by PYTHONPATH

        self.error = None
        clients = {t: bfcd.connect(rig.socket, tenant=t, name=t, cache=False) for t in ('red', 'blue', 'green')}
        self.clients = list(clients.values())
        self.blocks = [clients['red'].malloc(40 * MIB, partition='train'), clients['green'].malloc(10 * MIB, partition='train'),
                       clients['green'].malloc(48 * MIB, partition='infer')]
        self.held = clients['blue'].malloc(40 * MIB)
        self.refuse(bfcd.QuotaExceeded, clients['blue'], 30 * MIB, 'train')
        self.refuse(bfcd.QuotaExceeded, clients['blue'], 31 * MIB, 'train')
        self.refuse(bfcd.OutOfMemory, clients['red'], 32 * MIB, 'infer')
        self.thread = threading.Thread(target=self.wait, args=[clients['blue']], daemon=True)
        self.thread.start()

    def refuse(self, error, client, n_bytes, partition):
        try:
            client.malloc(n_bytes, partition=partition)
        except error:
            return
        sys.exit(f'{n_bytes} bytes were not refused')

    def wait(self, client):
        try:
            client.malloc(32 * MIB, wait=600).free()
        except Exception as e:
            self.error = e

    def end(self):
        """The request that waits is granted."""
        self.held.free()
        self.thread.join(LIMIT_S)
        ok(not self.thread.is_alive() and not self.error, 'the waiting request is granted', self.error)
        for block in self.blocks:
            block.free()
        for client in self.clients:
            client.close()


def replay_jobs(rig, seconds):
    """Jobs that come and go, of all tenants, for so long; at least once each."""
    trace = os.path.join(rig.folder, 'trace.csv')
    with open(trace, 'w', encoding='utf-8') as out:
        subprocess.run([rig.replay, '--generate', 'transformer'], stdout=out, check=True, timeout=LIMIT_S)
    end = time.monotonic() + seconds
    n_jobs = 0
    while n_jobs < 3 or time.monotonic() < end:
        done = run([rig.replay, '--socket', rig.socket, '--tenant', ('red', 'blue', 'green')[n_jobs % 3], '--partition', 'train',
                    '--scale', '0.3', '--json', trace])
        if done.returncode != 0:
            sys.exit(f'bfc-replay failed: {done.stdout}{done.stderr}')
        n_jobs += 1
        time.sleep(0.2 if seconds else 0)
    return n_jobs


# ---- what Prometheus answers -----------------------------------------------------


def by_quota(rows, *keys):
    return {(r['tenant'], r['partition'], k): float(r[k]) for r in rows for k in keys if r[k] > 0}


def answer(result, names):
    """The same of an answer; names: by a label or by the metric."""
    return {(m['tenant'], m['partition'], names(m)): value for m, value in result}


def committed(rows, partition):
    return sum(max(r['bytes_reserved'], r['bytes_guaranteed']) for r in rows if r['partition'] == partition)


def check_questions(rig):
    """Each answer is compared with bfcctl's until both are of the same moment; the jobs do nothing meanwhile."""
    reasons = {'over quota': 'num_over_quota', 'out of memory': 'num_out_of_memory'}
    waits = {'bfcd_tenant_waiting_requests': 'num_waiting', 'bfcd_tenant_waiting_bytes': 'bytes_waiting'}
    parts = {'bfcd:partition_free_bytes': 'free', 'bfcd_partition_guaranteed_bytes': 'guaranteed'}

    def has_now(result, tenants, _):
        values = [value for _, value in result]
        return answer(result, lambda m: 'bytes_in_use') == by_quota(tenants, 'bytes_in_use') and \
            values == sorted(values, reverse=True) and len(values) == 4

    def had_most(result, tenants, _):
        most = max(tenants, key=lambda t: t['lifetime_peak_bytes_in_use'])
        return [(m['tenant'], m['partition'], value) for m, value in result] == \
            [(most['tenant'], most['partition'], most['lifetime_peak_bytes_in_use'])]

    def refused(result, tenants, _):
        return answer(result, lambda m: reasons[m['reason']]) == by_quota(tenants, *reasons.values()) == \
            {('blue', 'train', 'num_over_quota'): 2.0, ('red', 'infer', 'num_out_of_memory'): 1.0}

    def waiting(result, tenants, _):
        return answer(result, lambda m: waits[m['__name__']]) == by_quota(tenants, *waits.values()) == \
            {('blue', 'train', 'num_waiting'): 1.0, ('blue', 'train', 'bytes_waiting'): 32.0 * MIB}

    def free(result, tenants, partitions):
        told = {}
        for p in partitions:
            told[p['partition'], 'free'] = float(p['bytes_limit'] - committed(tenants, p['partition']))
            told[p['partition'], 'guaranteed'] = float(p['bytes_guaranteed'])
        return {(m['partition'], parts[m['__name__']]): value for m, value in result} == told and told['train', 'guaranteed'] == 64 * MIB

    asked = questions()
    ok(len(asked) == 5, 'the README answers five questions', asked)
    for expression, is_equal in zip(asked, (has_now, had_most, refused, waiting, free)):
        last = [None]

        def equal():
            last[0] = rig.query(expression), rig.ctl('tenants'), rig.ctl('partitions')
            return is_equal(*last[0])

        end = time.monotonic() + LIMIT_S
        while not equal() and time.monotonic() < end:
            time.sleep(0.2)
        ok(is_equal(*last[0]), f'bfcctl and Prometheus agree: {is_equal.__name__}', last[0])
        print(f'# {is_equal.__name__}: {[(m.get("tenant"), m["partition"], v) for m, v in last[0][0]]}', flush=True)


def substitute(expression):
    """As Grafana does with All chosen."""
    for name in ('instance', 'device', 'partition', 'tenant'):
        expression = expression.replace(f'${name}', '.*')
    expression = expression.replace('$__rate_interval', '1m').replace('$__range', '3h')
    if '$' in expression:
        sys.exit(f'an unknown variable in {expression}')
    return expression


def evaluate(rig, where, expression, may_be_empty, end):
    try:
        now = time.time()
        rig.get('query_range', query=expression, start=now - 60, end=now, step=5)
        result = rig.query(expression)
        while not result and not may_be_empty and time.monotonic() < end:
            time.sleep(0.2)  # a scrape that took longer than a second has no samples
            result = rig.query(expression)
    except ValueError as e:
        ok(False, where, e)
        return
    ok(result or may_be_empty, where, f'nothing for {expression}')


def check_expressions(rig):
    dashboard = json.loads(read(DASHBOARD))
    end = time.monotonic() + LIMIT_S
    for where, expression in expressions(dashboard):
        evaluate(rig, where, substitute(expression), where.startswith('annotation'), end)
    for v in dashboard['templating']['list']:
        if v['type'] != 'query':
            continue
        metric, label = re.fullmatch(r'label_values\((.*), (\w+)\)', v['query']['query']).groups()
        values = rig.get(f'label/{label}/values', **{'match[]': substitute(metric)})
        ok(values, f'variable {v["name"]}: {values}', metric)
    rules = [r for group in rig.get('rules')['groups'] for r in group['rules']]
    ok(len(rules) == 13, 'Prometheus has loaded the rules', len(rules))
    for r in rules:
        # The rise needs 10 minutes.
        evaluate(rig, f'rule {r["name"]}', r['query'], r['type'] == 'alerting' or r['name'].endswith(':rise10m'), end)


def rules_are_ok(rig):
    rules = [r for group in rig.get('rules')['groups'] for r in group['rules']]
    return bool(rules) and all(r['health'] == 'ok' for r in rules)


def alerts(rig):
    return {a['labels']['alertname'] for a in rig.get('alerts')['alerts']}


def check_metrics(rig):
    for accept in 'text/plain', 'application/openmetrics-text; version=1.0.0':
        request = urllib.request.Request(f'http://127.0.0.1:{rig.exporter_port}/metrics', headers={'Accept': accept})
        with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
            text = reply.read().decode()
        if accept == 'text/plain':
            done = run(['promtool', 'check', 'metrics'], input=text)
            ok(done.returncode == 0 and not done.stdout + done.stderr, 'promtool check metrics', done.stdout + done.stderr)
        ok(text.endswith('# EOF\n') == ('openmetrics' in accept), f'{accept} is served')
    used = set(re.findall(r'\bbfcd_\w+', read(DASHBOARD) + read(RULES) + ''.join(questions())))
    known = set(re.findall(r'^(bfcd_\w+)', text, re.M)) | {'bfcd_tenant_waiting_'}
    ok(not used - known, 'all metrics that are used exist', used - known)


def report(rig, seconds, n_jobs):
    window = f'[{int(seconds) + 2}s]'
    scrapes = rig.query(f'count_over_time(up{window})')[0][1]
    failed = rig.query(f'count_over_time(up{window}) - sum_over_time(up{window})')[0][1]
    mean = rig.query(f'avg_over_time(scrape_duration_seconds{window})')[0][1]
    longest = rig.query(f'max_over_time(scrape_duration_seconds{window})')[0][1]
    samples = rig.query(f'max_over_time(scrape_samples_scraped{window})')[0][1]
    print(f'# {scrapes:.0f} scrapes of {samples:.0f} samples in {seconds:.0f} s beside {n_jobs} jobs, {failed:.0f} not in time; '
          f'a scrape took {mean * 1e3:.1f} ms, {longest * 1e3:.1f} ms at most', flush=True)


def check_live(programs):
    seconds = float(os.environ.get('BFC_TEST_SECONDS', '0'))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix='bfcd-grafana-'))
        rig = Rig(programs, folder, stack)
        wait_for(lambda: rig.query('up{job="bfcd"} == 1'), 'scrape')
        began = time.monotonic()
        n_jobs = replay_jobs(rig, seconds)
        jobs = Jobs(rig)
        wait_for(lambda: rig.query('bfcd_tenant_waiting_requests > 0'), 'sample of the waiting request')
        wait_for(lambda: rules_are_ok(rig), 'evaluation of all rules without an error')
        check_questions(rig)
        # The counters rose between two scrapes.
        wanted = {'BfcdRefusedOverQuota', 'BfcdRefusedOutOfMemory'}
        wait_for(lambda: wanted <= alerts(rig), 'pending alert of the refusals')
        ok(alerts(rig) - {'BfcdDown'} == wanted, 'only the alerts of the refusals are pending', alerts(rig))  # a late scrape
        check_expressions(rig)
        check_metrics(rig)
        report(rig, time.monotonic() - began, n_jobs)
        jobs.end()
        wait_for(lambda: rig.query('bfcd_grant_waited_seconds_count > 0'), 'grant of the waiting request')


def main():
    if not shutil.which('promtool') or not shutil.which('prometheus'):
        print('# skipped: promtool or prometheus is not installed (Debian: prometheus)')
        sys.exit(77)
    if sys.argv[1:] == ['--static']:
        check_static()
    else:
        check_live(sys.argv[1:])
    sys.exit(finish())


main()
