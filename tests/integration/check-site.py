#!/usr/bin/env python3
# The site of the documents: man pages are whole. In Chromium no page is wider than a narrow or a wide window, none asks
# another host for anything, and the search finds pages.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: check-site.py FOLDER        what scripts/site has made; TAP on standard output; skipped without a browser
import functools
import html
import http.server
import pathlib
import re
import sys
import tempfile
import threading

import web
from checks import finish, ok

WIDTHS = (360, 1280)
# What is wider than the window, and in no box of its own that scrolls.
TOO_WIDE = '''
const width = arguments[0], found = [];
if (document.documentElement.scrollWidth > width)
        found.push("the page: " + document.documentElement.scrollWidth);
for (const e of document.querySelectorAll(".content *")) {
        const box = e.getBoundingClientRect();
        if (box.width === 0 || box.right <= width + 1)
                continue;
        let at = e;
        while (!at.matches(".content") && !/auto|scroll|hidden/.test(getComputedStyle(at).overflowX))
                at = at.parentElement;
        if (at.matches(".content") || at.getBoundingClientRect().right > width + 1)
                found.push(e.tagName + ": " + e.textContent.trim().slice(0, 40));
}
return found.slice(0, 3);
'''


# What this page has asked another host for, or in vain.
ASKED_WRONGLY = '''
return performance.getEntriesByType("resource").filter((e) => !e.name.startsWith(location.origin) || e.responseStatus >= 400)
        .map((e) => e.name + ": " + e.responseStatus);
'''


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def serve(folder):
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f'http://127.0.0.1:{server.server_port}/'


def check_pages(browser, url, folder):
    pages = sorted(str(page.relative_to(folder)) for page in folder.rglob('*.html'))
    ok(len(pages) > 30, 'the site has pages', pages)
    wide, elsewhere = [], []
    for page in pages:
        for width in WIDTHS:
            browser.look(width, 800)
            browser.driver.get(url + page)
            wide += [f'{page} at {width}: {found}' for found in browser.run(TOO_WIDE, width)]
            elsewhere += [f'{page}: {asked}' for asked in browser.run(ASKED_WRONGLY)]
    ok(not wide, 'no page is wider than its window', '\n'.join(wide))
    ok(not elsewhere, 'no page asks another host, or for what is not there', '\n'.join(elsewhere))


def check_search(browser, url):
    for width in WIDTHS:
        browser.look(width, 800)
        browser.driver.get(url + 'search.html?q=quota')
        web.wait_for(lambda: browser.run('return document.querySelectorAll("#search-results li a").length > 5'), 'results')
        found = browser.run('return [...document.querySelectorAll("#search-results li a")].map(a => a.href)')
        for page in ('docs/operations.html', 'docs/man/bfcd.yaml.5.html'):
            ok(any(page in address for address in found), f'the search for a quota finds {page} at {width}', found)


def letters(text):
    return ''.join(re.findall(r'[A-Za-z0-9]+', text))


def check_manuals(folder):
    """docs/site/scdoc.py reads them. Their markup has neither letters nor digits."""
    for source in sorted((web.ROOT / 'docs/man').glob('*.scd')):
        page = (folder / f'docs/man/{source.stem}.html').read_text(encoding='utf-8')
        shown = re.sub('<[^>]+>', ' ', page[page.index('<article'):page.index('</article>')])
        ok(letters(html.unescape(shown)) == letters(source.read_text(encoding='utf-8')), f'the page of {source.stem} has each word of it')


def main():
    if web.missing():
        print(f'1..0 # skipped: needs {web.missing()}')
        return 0
    folder = pathlib.Path(sys.argv[1]).resolve()
    check_manuals(folder)
    with tempfile.TemporaryDirectory(prefix='bfcd-site-') as own:
        browser = web.Browser(own)
        try:
            url = serve(folder)
            check_pages(browser, url, folder)
            check_search(browser, url)
        finally:
            browser.stop()
    return finish()


sys.exit(main())
