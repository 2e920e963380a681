#!/usr/bin/env -S python3 -B
# What bfc-replay writes of a trace, read back by other programs' rules: the memory viewer's segments are tiled, and
# its events have the trace's sums; Perfetto's counters end where the trace ends; the plot is XML that refers to
# nothing. A snapshot that Python pickles is read again, and has the same peak.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: check-views.py BFC-REPLAY     TAP on standard output
import json
import os
import pickle
import pickletools
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml

from checks import finish, ok

REPLAY = sys.argv[1]
TAGGED = '''id,lower,upper,size,tag,partition,tenant
0,0,100,1000000,weights,train,red
1,10,50,300000,act <1> & "x",train,red
2,20,60,700000,grad,infer,blue
3,30,9223372036854775807,5000,leak,infer,blue
4,35,40,1,,train,red
'''


def replay(*arguments):
    return subprocess.run([REPLAY, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)


def rounded(size):
    return -(-size // 256) * 256


def buffers(path):
    with open(path, encoding='utf-8') as lines:
        return [tuple(map(int, line.split(',')[1:4])) for line in list(lines)[1:]]


def peak_of(path):
    events = []
    for lower, upper, size in buffers(path):
        events += [(lower, 1, rounded(size)), (upper, 0, -rounded(size))]
    live = peak = 0
    for _, _, size in sorted(events):
        live += size
        peak = max(peak, live)
    return peak


def check_snapshot(path, name):
    out = subprocess.run([REPLAY, '--snapshot', '-', path], stdin=subprocess.DEVNULL, capture_output=True, timeout=600)
    ok(out.returncode == 0 and out.stderr == b'', f'{name}: --snapshot', out.stderr)
    s = pickle.loads(out.stdout)
    # The viewer's JavaScript passes the items between two marks as arguments of a function.
    marks, longest = [], 0
    for code, _, _ in pickletools.genops(out.stdout):
        if code.name == 'MARK':
            marks.append(0)
        elif code.name in ('SETITEMS', 'APPENDS'):
            longest = max(longest, marks.pop())
        if code.name == 'SETITEMS' and marks:
            marks[-1] += 1
    ok(longest <= 1000, f'{name}: the pickle has batches', longest)
    live, peak, requested, ends = {}, 0, set(), [0, 0]
    for segment in s['segments']:
        at = segment['address']
        for block in segment['blocks']:
            ends[0] += block['address'] != at
            at += block['size']
            if block['state'] == 'active_allocated':
                ends[1] += block['size']
        ends[0] += at != segment['address'] + segment['total_size']
    ok(ends[0] == 0, f'{name}: blocks tile the segments')
    ok(all(block['address'] + block['size'] < 2**53 for segment in s['segments'] for block in segment['blocks']),
       f'{name}: addresses are exact in JavaScript')
    wrong = 0
    for event in s['device_traces'][0]:
        if event['action'] == 'alloc':
            wrong += event['addr'] in live
            live[event['addr']] = event['size']
        elif event['action'] == 'free_requested':
            requested.add(event['addr'])
        elif event['action'] == 'free_completed':
            wrong += event['addr'] not in requested
            requested.discard(event['addr'])
            wrong += live.pop(event['addr'], None) != event['size']
        peak = max(peak, sum(live.values()) if len(live) < 64 else peak)
    ok(wrong == 0 and not requested, f'{name}: each free is requested and completed, of what was allocated', wrong)
    ok(sum(live.values()) == ends[1], f'{name}: what is left is in the segments', (live, ends))
    return s


def check_read_back(snapshot, path, name, folder):
    for protocol in range(2, 6):
        copy = os.path.join(folder, f'{protocol}.pickle')
        with open(copy, 'wb') as out:
            pickle.dump(snapshot, out, protocol=protocol)
        out = replay('--plan', '--json', copy)
        plan = json.loads(out.stdout) if out.returncode == 0 else {}
        ok(plan.get('peak_live_bytes') == peak_of(path), f'{name}: protocol {protocol} of pickle is read',
           (plan.get('peak_live_bytes'), peak_of(path), out.stderr))


def check_timeline(path, name):
    out = replay('--timeline', '-', path)
    events = json.loads(out.stdout)['traceEvents']
    counters = [e for e in events if e['ph'] == 'C']
    names = {e['pid']: e['args']['name'] for e in events if e['ph'] == 'M'}
    last, peaks, back = {}, {}, 0
    for e in counters:
        key = e['pid'], e['name']
        back += e['ts'] < last.get(key, (0, 0))[0]
        last[key] = e['ts'], e['args']['bytes']
        peaks[key] = max(peaks.get(key, 0), e['args']['bytes'])
    left = sum(size for _, upper, size in buffers(path) if upper == 2**63 - 1)
    totals = {key: value for key, value in last.items() if ': ' not in key[1]}
    ok(back == 0 and counters, f'{name}: counters go on in time')
    ok(sum(value[1] for value in totals.values()) == left, f'{name}: counters end with what is left', totals)
    ok({key[0] for key in last} == set(names), f'{name}: each track has a name', names)
    return peaks


def check_plot(path, name):
    out = replay('--plot', '-', path)
    root = xml.fromstring(out.stdout)
    text = ' '.join(root.itertext())
    ok(root.tag == '{http://www.w3.org/2000/svg}svg', f'{name}: the plot is SVG')
    ok(out.stdout.count('http') == 1 and 'url(' not in out.stdout and '<script' not in out.stdout and
       'href' not in out.stdout, f'{name}: the plot refers to nothing')
    ok('prefers-color-scheme: dark' in text, f'{name}: the plot has dark colours')
    ok('nan' not in out.stdout and 'inf' not in out.stdout.replace('infer', ''), f'{name}: the plot has numbers only')
    return text


SEVERAL = '''id,lower,upper,size,partition,tag
1,1,0000000000000000009,30000000,train,weights
2,2,0000000000000000008,3000000,serve,
3,3,0000000000000000007,5000000,serve,kv
'''
CONFIG = '''devices:
  - id: host
    size: 1GiB
    partitions: [{name: train, limit: 512MiB}, {name: serve, limit: 256MiB}]
tenants:
  - name: red
    match: {uid: [1]}
    quotas: [{partition: train, limit: 64MiB}, {partition: serve, limit: 4MiB}]
'''


def plan_of(*arguments):
    out = replay('--plan', '--json', *arguments)
    return json.loads(out.stdout) if out.returncode == 0 else out.stderr


def check_partitions(folder):
    several, config, one = (os.path.join(folder, name) for name in ('several.csv', 'bfcd.yaml', 'one.csv'))
    for path, text in (several, SEVERAL), (config, CONFIG), (one, SEVERAL.replace('train', 'serve')):
        with open(path, 'w', encoding='utf-8') as out:
            out.write(text)
    error = plan_of(several)
    ok('several partitions; choose one of them by --partition: train serve' in error, 'a plan is of one partition', error)
    error = plan_of('--partition', 'other', several)
    ok('and not other; choose one' in error, 'a plan is of a partition that the trace has', error)
    plan = plan_of('--partition', 'serve', several)
    ok(plan['peak_live_bytes'] == 8000000, 'a plan of one partition of several', plan)
    plan = plan_of('--partition', 'serve', '--partition-config', config, several)
    ok(plan['quota'] == {'partition': 'serve', 'tenant': 'red', 'limit_bytes': 4 << 20, 'fits': False} and
       plan['peak_live_bytes'] == 8000000, 'the same of a config', plan)
    plan = plan_of('--partition-config', config, one)
    ok(plan['quota']['partition'] == 'serve' and plan['peak_live_bytes'] == 38000000,
       "the trace's only partition is planned in the config", plan)
    with open(config, 'w', encoding='utf-8') as out:
        out.write(CONFIG.replace('serve', 'infer'))
    plan = plan_of('--partition-config', config, one)
    ok(plan['quota']['partition'] == 'train', "the first where the config lacks the trace's", plan)
    ok(plan_of('--partition', 'infer', '--partition-config', config, one)['quota']['partition'] == 'infer',
       'a trace of one partition is planned for any')


def main():
    with tempfile.TemporaryDirectory() as folder:
        tagged = os.path.join(folder, 'tagged.csv')
        with open(tagged, 'w', encoding='utf-8') as out:
            out.write(TAGGED)
        check_read_back(check_snapshot(tagged, 'tagged'), tagged, 'tagged', folder)
        peaks = check_timeline(tagged, 'tagged')
        ok({name: peak for (_, name), peak in peaks.items()} ==
           {'red/train': 1300001, 'red/train: weights': 1000000, 'red/train: act <1> & "x"': 300000,
            'blue/infer': 705000, 'blue/infer: grad': 700000, 'blue/infer: leak': 5000}, 'tagged: peaks of the tracks', peaks)
        text = check_plot(tagged, 'tagged')
        ok('act <1> & "x": 293.0 KiB in 1 block' in text and 'weights: 976.6 KiB' in text, 'tagged: bars by tag', text)
        for generator in 'transformer', 'random':
            path = os.path.join(folder, f'{generator}.csv')
            with open(path, 'w', encoding='utf-8') as out:
                out.write(replay('--generate', generator).stdout)
            check_read_back(check_snapshot(path, generator), path, generator, folder)
            check_timeline(path, generator)
            check_plot(path, generator)
        check_partitions(folder)
        bad = os.path.join(folder, 'bad.pickle')
        with open(bad, 'wb') as out:
            pickle.dump({'segments': [os.path.join]}, out)
        out = replay('--plan', bad)
        ok(out.returncode == 2 and 'it names posixpath.join' in out.stderr, 'a pickle that names a function is refused', out.stderr)
        out = replay('--snapshot', os.path.join(folder, 'none', 'x'), tagged)
        ok(out.returncode == 1 and 'No such file' in out.stderr, 'a file that cannot be written is an error', out.stderr)
    finish()


main()
