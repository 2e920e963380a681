#!/usr/bin/env python3
# The page of bfc-exporter in Chromium, beside a real daemon: what it shows of clients, also of hostile ones, and what it
# says without a daemon.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: check-page.py BUILD-FOLDER     TAP on standard output; skipped without chromium and python3-selenium
import os
import subprocess
import sys
import time

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
# Those that are text on a background, in both colour schemes: at least 4.5 to 1 (WCAG 2.1, AA).
PAIRS = (('text', 'back'), ('text', 'card'), ('text', 'new'), ('quiet', 'back'), ('quiet', 'card'), ('quiet', 'new'),
         ('link', 'back'), ('link', 'card'), ('alarm', 'back'), ('alarm', 'card'), ('alarm-text', 'alarm'))


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
    ok(cells(b, 'tenants', 'Tenant') == ['blue', 'red', 'red'], 'tenants', b.text('#tenants'))
    ok(sorted(cells(b, 'tenants', 'In use')) == ['0 B', '0 B', '8.0 MiB'], 'bytes in use', b.text('#tenants'))
    ok(b.run('return [...document.querySelectorAll("th")].every((th) => ["col", "row"].includes(th.scope))'),
       'each header has a scope')
    ok(b.run('return performance.getEntriesByType("resource").every((e) => e.name.startsWith(location.origin))'),
       'nothing is loaded from elsewhere')
    client.free()
    ok(b.has('[...document.querySelectorAll(`#tenants [data-title="In use"]`)].every((c) => c.textContent === "0 B")'),
       'a change appears')


def check_hostile(site, b):
    names = cells(b, 'sessions', 'Name')
    commands = cells(b, 'sessions', 'Command')
    ok(HOSTILE in names, 'the name of a session is text', names)
    ok(any(HOSTILE in c for c in commands), 'a command line is text', commands)
    ok(any('\\u202e' in c for c in commands), 'what reverses text is escaped', commands)
    ok(HOSTILE in cells(b, 'kept', 'Name'), 'the name of a block is text', cells(b, 'kept', 'Name'))
    ok(b.run('return document.querySelectorAll("main img:not(#map-image img)").length === 0 && !window.pwned'),
       'and no element')


# The marks of a new refusal stay for some seconds only, so the page itself notes them.
NOTE_MARKS = '''
new MutationObserver(() => {
    const li = document.querySelector("#refusals li.new");
    const cell = document.querySelector('#tenants td.new');
    if (li && cell && !window.marked)
        window.marked = [li.innerText, cell.innerText];
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
    b.driver.find_element('id', 'filter').send_keys(Keys.BACKSPACE * len('CHILD'))
    b.has('document.querySelectorAll("#sessions tbody tr").length === arguments[0]', len(up))
    ok(cells(b, 'sessions', 'Name') == down, 'and found again', cells(b, 'sessions', 'Name'))


def check_hidden(b):
    """Pauses while another tab is in front."""
    set_hidden = ('Object.defineProperty(document, "hidden", {value: arguments[0], configurable: true});'
                  'document.dispatchEvent(new Event("visibilitychange"))')
    b.run(set_hidden, True)
    b.has('!state.busy')
    b.run('performance.clearResourceTimings()')
    time.sleep(2.5)
    polls = 'performance.getEntriesByType("resource").filter((e) => e.name.includes("/api/")).length'
    ok(b.run(f'return {polls}') == 0, 'a hidden page asks for nothing', b.run(f'return {polls}'))
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
        ok(b.run('return document.documentElement.scrollWidth <= 360 && '
                 '[...document.querySelectorAll(".scroll")].every((e) => e.scrollWidth <= e.clientWidth)'),
           f'360 pixels are enough, {scheme}',
           b.run('return [...document.querySelectorAll("*")].filter((e) => e.getBoundingClientRect().right > 360)'
                 '.map((e) => e.tagName + "." + e.className).slice(0, 9)'))
    ok(backgrounds[0] != backgrounds[1], 'the scheme is followed', backgrounds)
    b.look(1280, 800)


def check_map(site, b):
    """Of an exporter that has maps, or that has none."""
    there = site.status('api/map.svg?partition=train') == 200
    b.has('!map.loading && map.due > 0')
    ok(b.run('return document.querySelector("#map").hidden') is not there, f'the map is {"" if there else "not "}shown')
    if there:
        ok(b.run('const i = document.querySelector("#map-image img"); return i.naturalWidth > 0 && i.alt !== ""'),
           'the map is an image')


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
    shown = 'document.querySelector("#banner")'
    ok(b.run(f'return {shown}.hidden'), 'no banner while all is well')
    site.end(site.daemon)
    b.has(f'!{shown}.hidden')
    said = b.text('#banner')
    ok('Cannot reach bfcd' in said and 'old' in said, 'the daemon ends: a banner with the age', said)
    ok(len(cells(b, 'tenants', 'Tenant')) == 3, 'the last data stays', b.text('#tenants'))
    site.start_daemon()
    ok(b.has(f'{shown}.hidden'), 'it is back: no banner')
    site.end(site.exporter)
    b.has(f'!{shown}.hidden')
    ok('bfc-exporter cannot be reached' in b.text('#banner'), 'the exporter ends', b.text('#banner'))


def check(site, b):
    import bfcd

    with bfcd.connect(site.socket, tenant='red', name=HOSTILE, cache=False) as red, \
            bfcd.connect(site.socket, tenant='blue', name='calm') as blue:
        block = red.malloc(8 * MIB)
        with subprocess.Popen([sys.executable, '-c', CHILD, site.socket, HOSTILE + '\u202e'], text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              env=os.environ | {'PYTHONPATH': str(web.ROOT / 'python')}) as child:
            child.stdout.readline()
            check_lists(site, b, block)
            shared = red.malloc(MIB)
            red.publish(shared, HOSTILE, keep=600)
            b.has('document.querySelectorAll("#kept tbody tr").length === 1 && '
                  'document.querySelectorAll("#sessions tbody tr").length === 3')
            check_hostile(site, b)
            check_refusal(b, bfcd, blue)
            check_controls(b)
            check_look(b)
            check_hidden(b)
            check_map(site, b)
            check_console(b)
            check_policy(b)
            child.stdin.close()
    check_away(site, b)


def main():
    lacks = web.missing()
    if lacks:
        print(f'1..0 # SKIP without {lacks}')
        return
    site = web.Site(sys.argv[1], CONFIG)
    try:
        browser = web.Browser(site.folder)
        try:
            check(site, browser)
        finally:
            browser.stop()
    finally:
        site.stop()
    finish()


main()
