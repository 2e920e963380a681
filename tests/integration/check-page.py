#!/usr/bin/env python3
# The page of bfc-exporter in Chromium, beside a real daemon: what it shows of clients, also of hostile ones, and what it
# says without a daemon.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: check-page.py BUILD-FOLDER few|many     TAP on standard output; skipped without chromium and python3-selenium
# many: 200 tenants, in the nightly run.
import contextlib
import os
import subprocess
import sys

import web
from checks import finish, ok

MIB = 1 << 20
HOSTILE = '<img src=x onerror="window.pwned=1">'
CONFIG = f'''
devices:
  - id: host
    size: 256MiB
    partitions: [{{name: train, limit: 128MiB}}, {{name: infer, limit: 64MiB}}]
tenants:
  - name: red
    match: {{uid: [{os.getuid()}]}}
    quotas: [{{partition: train, limit: 64MiB, reserve: 32MiB}}, {{partition: infer}}]
  - name: blue
    match: {{uid: [{os.getuid()}]}}
    quotas: [{{partition: train, limit: 16MiB}}]
'''
# A client whose command line is hostile, too. It ends with its standard input.
CHILD = '''
import sys
import bfcd
c = bfcd.connect(sys.argv[1], tenant="red", name="child")
print("ready", flush=True)
sys.stdin.read()
'''
# One whose second request waits, until it is killed.
WAITER = '''
import sys
import bfcd
c = bfcd.connect(sys.argv[1], tenant=sys.argv[2], partition="train", name="waiter")
block = c.malloc(12 << 20)
print("ready", flush=True)
c.malloc(8 << 20, wait=600)
'''
LONG = ' '.join(f'--option-{i}=/data/a/long/path' for i in range(20))
N_TENANTS, N_QUOTAS, N_SESSIONS, N_LEASES, N_WAITERS = 200, 423, 60, 30, 3
QUOTAS = [(f'tenant-{i % N_TENANTS:03}', ('train', 'infer', 'batch')[i // N_TENANTS]) for i in range(N_QUOTAS)]
MANY = f'''
devices:
  - id: host
    size: 512MiB
    partitions: [{{name: train, limit: 256MiB}}, {{name: infer, limit: 64MiB}}, {{name: batch, limit: 64MiB}}]
tenants:
''' + ''.join(f'''
  - name: tenant-{i:03}
    match: {{uid: [{os.getuid()}]}}
    quotas: [{', '.join(f'{{partition: {p}, limit: 16MiB}}' for t, p in QUOTAS if t == f'tenant-{i:03}')}]
''' for i in range(N_TENANTS))
# Many sessions, the later ones with more memory.
CROWD = '''
import sys
import bfcd
clients = [bfcd.connect(sys.argv[1], tenant=f"tenant-{i:03}", partition="train", name=f"worker-{i:03}-" + "x" * 40)
           for i in range(100, 100 + int(sys.argv[2]))]
kept = [c.malloc((1 + i // 20) << 20) for i, c in enumerate(clients)]
print("ready", flush=True)
sys.stdin.read()
'''
# Those that are text on a background, in both colour schemes: at least 4.5 to 1 (WCAG 2.1, AA).
PAIRS = (('text', 'back'), ('text', 'card'), ('text', 'new'), ('quiet', 'back'), ('quiet', 'card'), ('quiet', 'new'),
         ('link', 'back'), ('link', 'card'), ('alarm', 'back'), ('alarm', 'card'), ('alarm-text', 'alarm'))


@contextlib.contextmanager
def job(code, *words):
    """A client in a process of its own, which is killed at the end."""
    with subprocess.Popen([sys.executable, '-c', code, *map(str, words)], text=True, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, env=os.environ | {'PYTHONPATH': str(web.ROOT / 'python')}) as child:
        try:
            ok(child.stdout.readline() == 'ready\n', 'a client runs')
            yield child
        finally:
            child.kill()


def cells(browser, table, title):
    """The texts of a column."""
    return browser.run('return [...document.querySelectorAll(`#${arguments[0]} tbody [data-title="${arguments[1]}"]`)]'
                       '.map((cell) => cell.textContent)', table, title)


def check_lists(site, b, client):
    b.open(site.url)
    ok(b.text('h1') == 'bfcd', 'the page opens', b.text('body'))
    ok(b.run('return [...document.querySelectorAll(".card h3")].map((h) => h.textContent)') ==
       ['train on host', 'infer on host'], 'partitions', b.text('#partitions'))
    # 8 MiB in a block; extents are larger.
    ok('8.0 MiB' in b.text('.card') and '128.0 MiB' in b.text('.card'), 'bytes of a partition', b.text('.card'))
    ok(cells(b, 'tenants', 'Tenant') == ['red', 'blue', 'red'], 'tenants, sorted by use', b.text('#tenants'))
    ok(sorted(cells(b, 'tenants', 'In use')) == ['0 B', '0 B', '8.0 MiB'], 'bytes in use', b.text('#tenants'))
    ok(b.run('return [...document.querySelectorAll("th")].every((th) => ["col", "row"].includes(th.scope))'),
       'each header has a scope')
    ok(b.run('return performance.getEntriesByType("resource").every((e) => e.name.startsWith(location.origin))'),
       'nothing is loaded from elsewhere')
    check_curves(site, b)
    client.free()
    ok(b.has('[...document.querySelectorAll(`#tenants [data-title="In use"]`)].every((c) => c.textContent === "0 B")'),
       'a change appears')


# The curve of the first tenant, and of the first partition.
CURVES = '''hour.due = 0, ["#tenants tbody tr", ".card"].map((selector) => {
    const part = document.querySelector(selector);
    return part.querySelector(".curve title").textContent + ["used", "reserved"].map(
        (name) => (part.querySelector("path." + name).getAttribute("d") || "").replace(/[-.0-9 ]+/g, ""));
})'''


def check_curves(site, b):
    site.pass_time(10000)
    has = f'({CURVES}).every((text) => /at most 8.0 MiB in use, .* reservedMH.*,MVH.*Z$/.test(text))'
    b.has(has)
    ok(b.run('return document.querySelector(".card p").textContent').startswith('Last hour: at most 8.0 MiB in use'),
       'the last hour is a curve, and words')


def said(b):
    """What the sections say by the id of their title."""
    return b.run('return Object.fromEntries([...document.querySelectorAll("section")].map('
                 '(s) => [s.getAttribute("aria-labelledby").slice(2), s.querySelector(".said").innerText]))')


def check_waiting(site, b):
    """Leases and waiting requests, of which there are none at first."""
    ok(said(b)['leases'] == 'There is no lease.' and said(b)['waiting'] == 'No request is waiting.', 'none waits', said(b))
    site.admin('lease', 'create', 'night-job', '--tenant', 'red', '--partition', 'train', '--limit', '16MiB',
               '--cgroup', '/bfcd-test-of-the-page')
    with job(WAITER, site.socket, 'blue'):
        b.has('document.querySelectorAll("#waiting tbody tr, #leases tbody tr").length === 2')
        ok(cells(b, 'waiting', 'Tenant') == ['blue'] and cells(b, 'waiting', 'Requested') == ['8.0 MiB'],
           'a waiting request', b.text('#waiting'))
        ok(cells(b, 'leases', 'Lease') == ['night-job'] and cells(b, 'leases', 'Limit') == ['16.0 MiB'], 'a lease',
           b.text('#leases'))
        ok(b.has('document.querySelector("#tenants").textContent.includes("1 for 8.0 MiB")'), 'its tenant waits')
        check_layout(b)
    site.admin('lease', 'end', 'night-job')
    ok(b.has('["waiting", "leases"].every((id) => document.getElementById(id).hidden)'), 'they end')


# The cells of a row share a line, below their titles; on a narrow screen a row is a card. No text leaves its cell.
LAYOUT = '''
const isNarrow = innerWidth < 641, wrong = [], rows = [...document.querySelectorAll("table:not([hidden]) tr")];
rows.forEach((row) => row.style.contentVisibility = "visible");  // else what is out of view has no size
for (const row of rows) {
    const name = row.closest("table").id, frame = row.getBoundingClientRect();
    const heads = [...row.closest("table").querySelector("thead tr").children].map((c) => c.getBoundingClientRect());
    const rects = [...row.children].map((c) => c.getBoundingClientRect());
    const isHead = row.parentNode.tagName === "THEAD";

    rects.forEach((r, i) => {
        const cell = row.children[i], say = (what) => wrong.push(`${name}: ${cell.dataset.title || cell.textContent}: ${what}`);
        if (r.right > frame.right + 1 || r.left < frame.left - 1 || r.bottom > frame.bottom + 1)
            say("is outside of its row");
        if (cell.scrollWidth > cell.clientWidth + 1)
            say("is wider than its cell");
        if (!isNarrow && !isHead && Math.abs(r.top - rects[0].top) > 1)
            say("is not on the line of its row");
        if (!isNarrow && (Math.abs(r.left - heads[i].left) > 1 || Math.abs(r.right - heads[i].right) > 1))
            say("is not below its title");
        if (rects.some((o, k) => k < i && o.left < r.right - 1 && r.left < o.right - 1 && o.top < r.bottom - 1 &&
                                 r.top < o.bottom - 1))
            say("overlaps another cell");
    });
    if (!isNarrow && frame.height > 64)
        wrong.push(`${name}: a row is ${frame.height} pixels high`);
}
if (document.documentElement.scrollWidth > innerWidth)
    wrong.push(`the page is ${document.documentElement.scrollWidth} pixels wide`);
for (const box of document.querySelectorAll(".scroll")) {
    if (box.scrollWidth > box.clientWidth)
        wrong.push(`${box.firstChild.id} is ${box.scrollWidth - box.clientWidth} pixels wider than the page`);
}
rows.forEach((row) => row.style.contentVisibility = "");
return wrong.slice(0, 9);
'''


def check_layout(b):
    for width in 1280, 1920, 360:
        b.look(width, 800)
        wrong = b.run(LAYOUT)
        ok(not wrong, f'{width} pixels: each row is one line, or a card', '\n'.join(wrong))
    b.look(1280, 800)


def check_parked(b, client):
    is_shown = '[...document.querySelectorAll(`#tenants [data-title="Parked"]`)].some((c) => c.textContent === arguments[0])'
    block = client.malloc(4 * MIB, parkable=True)
    ok(b.run(f'return !({is_shown})', '4.0 MiB'), 'nothing is parked')
    block.park(to='infer')
    ok(b.has(is_shown, '4.0 MiB'), 'the bytes of parked blocks', b.text('#tenants'))
    check_layout(b)
    block.free()
    ok(b.has(f'!({is_shown})', '4.0 MiB'), 'a block that is freed is not parked')


def check_hostile(site, b):
    names = cells(b, 'sessions', 'Name')
    commands = cells(b, 'sessions', 'Command')
    ok(HOSTILE in names, 'the name of a session is text', names)
    ok(any(HOSTILE in c for c in commands), 'a command line is text', commands)
    ok(any('\\u202e' in c for c in commands), 'what reverses text is escaped', commands)
    kept = b.run('return document.querySelector("#kept").textContent')
    ok(HOSTILE not in kept, 'the name of a block is not shown', kept)
    ok(b.run('return document.querySelectorAll("main img:not(#map-image img)").length === 0 && !window.pwned'),
       'and no element')


# The marks of a new refusal stay for some seconds only, so the page itself notes them.
NOTE_MARKS = '''
new MutationObserver(() => {
    const li = document.querySelector("#refusals li.new");
    const cell = document.querySelector('#tenants td.new');
    if (li && cell && !window.marked)
        window.marked = [li.textContent, cell.textContent];
}).observe(document.querySelector("main"), {subtree: true, childList: true, attributes: true});
'''


def check_refusal(b, bfcd, blue):
    b.run(NOTE_MARKS)
    ok(b.text('#refusals') == '', 'no refusal yet', b.text('#refusals'))
    try:
        blue.malloc(32 * MIB)
    except bfcd.QuotaExceeded:
        pass
    said, count = b.has('window.marked')
    ok('New' in said and 'tenant blue in partition train: 1 request refused, 1 over the limit (EDQUOT); ' in said and
       'of 16.0 MiB reserved' in said, 'a refusal appears', said)
    ok(count == '1 (+1 new)', 'the count is marked', count)
    ok('1 request refused' in b.run('return document.querySelector("#spoken").textContent'),
       'a screen reader is told')
    b.open(b.driver.current_url)
    said = b.text('#refusals')
    ok('1 request refused before this page was opened' in said and 'New' not in said, 'an older refusal is not new', said)


def check_controls(b):
    from selenium.webdriver.common.keys import Keys

    def click(title):
        b.run('[...document.querySelectorAll("#sessions thead button")]'
              '.find((button) => button.textContent === arguments[0]).click()', title)

    click('Name')
    up = cells(b, 'sessions', 'Name')
    click('Name')
    down = cells(b, 'sessions', 'Name')
    ok(up == sorted(up) and down == sorted(up, reverse=True) and up != down, 'sessions are sorted', [up, down])
    ok(b.run('return [...document.querySelectorAll("#sessions thead th")].map((th) => th.ariaSort)')
       .count('descending') == 1, 'the order is announced')
    b.driver.find_element('id', 'filter').send_keys('CHILD')
    ok(cells(b, 'sessions', 'Name') == ['child'], 'sessions are filtered', cells(b, 'sessions', 'Name'))
    ok(said(b)['tenants'] == 'No row matches the filter.', 'and all tables', said(b))
    b.driver.find_element('id', 'filter').send_keys(Keys.BACKSPACE * len('CHILD') + 'train RED')
    ok(cells(b, 'tenants', 'Tenant') == ['red'] and cells(b, 'tenants', 'Partition') == ['train'], 'by words in any order',
       b.text('#tenants'))
    b.driver.find_element('id', 'filter').send_keys(Keys.BACKSPACE * len('train RED'))
    b.has('document.querySelectorAll("#sessions tbody tr").length === arguments[0]', len(up))
    ok(cells(b, 'sessions', 'Name') == down, 'and found again', cells(b, 'sessions', 'Name'))


def check_hidden(b):
    """Pauses while another tab is in front."""
    set_hidden = ('Object.defineProperty(document, "hidden", {value: arguments[0], configurable: true});'
                  'document.dispatchEvent(new Event("visibilitychange"))')
    b.run(set_hidden, True)
    b.has('!state.busy')
    b.run('performance.clearResourceTimings(); poll()')  # as its timer does
    polls = 'performance.getEntriesByType("resource").filter((e) => e.name.includes("/api/")).length'
    ok(b.run(f'return !state.busy && {polls} === 0'), 'a hidden page asks for nothing', b.run(f'return {polls}'))
    b.run(set_hidden, False)
    ok(b.has(f'{polls} > 0'), 'a visible one does')


def contrast(a, b):
    def luminance(colour):
        parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def check_look(b):
    for scheme in ('light', 'dark'):
        b.look(1280, 800, scheme)
        low = []
        for front, back in PAIRS:
            colours = b.run('const s = getComputedStyle(document.documentElement);'
                            'return arguments[0].map((name) => s.getPropertyValue("--" + name).trim())', [front, back])
            if contrast(*colours) < 4.5:
                low.append((front, back, contrast(*colours)))
        ok(not low, f'contrast, {scheme}', low)
    backgrounds = []
    for scheme in ('light', 'dark'):
        b.look(360, 800, scheme)
        backgrounds.append(b.run('return getComputedStyle(document.body).backgroundColor'))
    ok(backgrounds[0] != backgrounds[1], 'the scheme is followed', backgrounds)
    b.look(1280, 800)


def check_map(b):
    """It is drawn as wide as there is room, so that its letters are never small."""
    for width in 1280, 360:
        b.look(width, 800)
        shown = b.has('((i) => i && i.naturalWidth === map.width() + 40 && [i.naturalWidth, i.width, i.alt])'
                      '(document.querySelector("#map-image img"))')
        ok(shown[0] == shown[1] and shown[0] in ((1040,) if width == 1280 else range(280, 361)) and 'train' in shown[2],
           f'the map at {width} pixels', shown)
    b.look(1280, 800)


def check_console(b):
    said = [e['message'] for e in b.driver.get_log('browser') if 'api/map.svg' not in e['message']]
    ok(not said, 'the browser has nothing to complain about', said)


def check_policy(b):
    """A mistake of the script could make no element of a text."""
    try:
        b.run('document.createElement("p").innerHTML = "<b>x</b>"')
        said = 'nothing'
    except Exception as e:
        said = str(e)
    ok('TrustedHTML' in said, 'the policy forbids markup from text', said)


def check_away(site, b):
    """Without the daemon no sentence says what is not known."""
    shown = 'document.querySelector("#banner")'
    ok(b.run(f'return {shown}.hidden'), 'no banner while all is well')
    site.end(site.daemon)
    b.has(f'!{shown}.hidden')
    banner = b.text('#banner')
    ok('Cannot reach bfcd' in banner and 'old' in banner, 'the daemon ends: a banner with the age', banner)
    ok(len(cells(b, 'tenants', 'Tenant')) == 3, 'the last data stays', b.text('#tenants'))
    ok(said(b)['waiting'] == 'No data.' and b.text('#summary') == 'No data.', 'nothing is said of now', said(b))
    b.driver.get(site.url)
    b.has(f'!{shown}.hidden')
    ok(set(said(b).values()) == {'No data.'} and b.text('#summary') == 'No data.', 'a page without data', said(b))
    site.start_daemon()
    ok(b.has(f'{shown}.hidden'), 'it is back: no banner')
    ok(b.has('document.querySelectorAll("#kept tbody tr").length === 1') and said(b)['waiting'] == 'No request is waiting.',
       'and so is what was kept', said(b))
    site.end(site.exporter)
    b.has(f'!{shown}.hidden')
    ok('bfc-exporter cannot be reached' in b.text('#banner'), 'the exporter ends', b.text('#banner'))


def check_few(site, b):
    import bfcd

    with bfcd.connect(site.socket, tenant='red', name=HOSTILE, cache=False) as red, \
            bfcd.connect(site.socket, tenant='blue', name='calm') as blue:
        block = red.malloc(8 * MIB)
        with job(CHILD, site.socket, HOSTILE + '\u202e', LONG):
            check_lists(site, b, block)
            shared = red.malloc(MIB)
            red.publish(shared, HOSTILE, keep=600)
            b.has('document.querySelectorAll("#kept tbody tr").length === 1 && '
                  'document.querySelectorAll("#sessions tbody tr").length === 3')
            check_hostile(site, b)
            check_parked(b, red)
            check_waiting(site, b)
            check_refusal(b, bfcd, blue)
            check_controls(b)
            check_look(b)
            check_hidden(b)
            check_map(b)
            check_console(b)
            check_policy(b)
    check_away(site, b)


def check_many(site, b):
    """A page of 200 tenants is short, finds each of them, and shows all of them if asked."""
    for i in range(N_LEASES):
        site.admin('lease', 'create', f'lease-{i}', '--tenant', f'tenant-{i:03}', '--partition', 'train', '--limit', '4MiB',
                   '--cgroup', f'/bfcd-test-of-the-page/{i}')
    with contextlib.ExitStack() as jobs:
        jobs.enter_context(job(CROWD, site.socket, N_SESSIONS, LONG))
        for i in range(N_WAITERS):
            jobs.enter_context(job(WAITER, site.socket, f'tenant-{i:03}'))
        site.pass_time(10000)
        b.open(site.url)
        b.has(f'document.querySelectorAll("#waiting tbody tr").length === {N_WAITERS}')
        ok(said(b)['tenants'] == f'20 of {N_QUOTAS} rowsShow {N_QUOTAS}', 'few rows at first', said(b))
        reserved = b.run('return [...document.querySelectorAll("#tenants tbody tr th")].map((th) => th.textContent)')
        ok(set(reserved[:N_WAITERS]) == {'tenant-000', 'tenant-001', 'tenant-002'}, 'those with the most memory', reserved)
        check_layout(b)
        b.run('[...document.querySelectorAll(".said button")].filter((x) => !x.hidden).forEach((x) => x.click())')
        counts = b.run('return ["tenants", "leases", "sessions"].map('
                       '(id) => document.querySelectorAll(`#${id} tbody tr`).length)')
        ok(counts == [N_QUOTAS, N_LEASES, N_SESSIONS + N_WAITERS], 'all rows', counts)
        check_layout(b)
        b.driver.find_element('id', 'filter').send_keys('tenant-137 train')
        ok(cells(b, 'tenants', 'Tenant') == ['tenant-137'], 'one tenant is found', cells(b, 'tenants', 'Tenant'))
        check_layout(b)
        check_map(b)
        check_console(b)


def main():
    lacks = web.missing()
    if lacks:
        print(f'1..0 # SKIP without {lacks}')
        return
    few = sys.argv[2] == 'few'
    site = web.Site(sys.argv[1], CONFIG if few else MANY)
    try:
        browser = web.Browser(site.folder)
        try:
            (check_few if few else check_many)(site, browser)
        finally:
            browser.stop()
    finally:
        site.stop()
    finish()


main()
