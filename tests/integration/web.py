# A daemon, bfc-exporter and Chromium, for the test of the page and for its screenshots.
#
# SPDX-License-Identifier: Apache-2.0
import mmap
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request

from checks import LIMIT_S, free_ports, listens, wait_for

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def missing():
    """What the browser needs and this machine lacks; '': nothing."""
    try:
        import selenium.webdriver  # noqa: F401
    except ImportError:
        return 'python3-selenium'
    return ', '.join(p for p, name in (('chromium', 'chromium'), ('chromium-driver', 'chromedriver'))
                     if not shutil.which(name))


class Site:
    """A daemon with this config and an exporter, in a folder of their own. The exporter's clock can be moved."""

    def __init__(self, build, config):
        self.build = pathlib.Path(build)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix='bfcd-web-', dir='/tmp'))
        self.socket = self.folder / 'bfcd.sock'
        self.daemon = self.exporter = None
        (self.folder / 'clock').write_bytes(bytes(mmap.PAGESIZE))
        # The Python package, for clients in this process.
        os.environ['BFC_LIBRARY'] = str(self.build / 'client/libbfcclient.so.0')
        sys.path.insert(0, str(ROOT / 'python'))
        try:
            (self.folder / 'bfcd.yaml').write_text(f'socket: {{path: {self.socket}}}\n'
                                                   f'admin_socket: {{path: {self.folder}/admin.sock}}\n' + config)
            self.start_daemon()
            self.start_exporter()
        except BaseException:
            self.stop()
            raise

    def start_daemon(self):
        with open(self.folder / 'bfcd.log', 'a', encoding='utf-8') as log:
            self.daemon = subprocess.Popen(
                [self.build / 'daemon/bfcd', '--config', self.folder / 'bfcd.yaml'],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_for(lambda: listens(str(self.socket)) or self.daemon.poll() is not None, 'daemon')
        if self.daemon.poll() is not None:
            raise RuntimeError((self.folder / 'bfcd.log').read_text())

    def start_exporter(self):
        """On a free port, which another process may take before the exporter does."""
        def start():
            port, = free_ports(1)
            self.url = f'http://127.0.0.1:{port}/'
            self.exporter = subprocess.Popen(
                [self.build / 'tests/integration/bfc_exporter_moved_clock', '--listen', f'127.0.0.1:{port}',
                 '--socket', self.folder / 'monitor.sock'], env=os.environ | {'BFC_TEST_CLOCK': self.folder / 'clock'},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            wait_for(lambda: self.status('') or self.exporter.poll() is not None, 'exporter')
            return self.exporter.poll() is None

        wait_for(start, 'port')

    def pass_time(self, ms):
        """For the exporter: tests/integration/moved_clock.h."""
        with open(self.folder / 'clock', 'r+b') as f, mmap.mmap(f.fileno(), 0) as page:
            page[:8] = struct.pack('=Q', struct.unpack('=Q', page[:8])[0] + ms)

    def admin(self, *words):
        subprocess.run([self.build / 'ctl/bfcctl', '--socket', self.folder / 'admin.sock', *words], check=True,
                       stdout=subprocess.DEVNULL, timeout=LIMIT_S)

    def status(self, path):
        """Of GET; 0: there is no exporter."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=LIMIT_S) as reply:
                return reply.status
        except urllib.error.HTTPError as e:
            return e.code
        except OSError:
            return 0

    @staticmethod
    def end(process):
        if process and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise

    def stop(self):
        try:
            self.end(self.exporter)
        finally:
            try:
                self.end(self.daemon)
            finally:
                shutil.rmtree(self.folder)


class Browser:
    def __init__(self, folder):
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which('chromium')
        for argument in ('--headless=new', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage',
                         '--no-first-run', '--hide-scrollbars', '--disable-background-networking', '--disable-component-update',
                         '--disable-sync', '--force-color-profile=srgb', f'--user-data-dir={folder}/chromium'):
            options.add_argument(argument)
        options.set_capability('goog:loggingPrefs', {'browser': 'ALL'})
        self.driver = webdriver.Chrome(service=Service(shutil.which('chromedriver')), options=options)
        self.driver.set_script_timeout(LIMIT_S)
        self.driver.set_page_load_timeout(LIMIT_S)

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def open(self, url):
        self.driver.get(url)
        self.has('state.rendered > 0')

    def has(self, condition, *arguments):
        """Waits until an expression is true, and returns its value. The page asks at once, not at its next second."""
        self.run('poll()')
        return wait_for(lambda: self.run(f'return {condition}', *arguments), condition)

    def text(self, selector):
        return self.run('return document.querySelector(arguments[0]).innerText', selector)

    def look(self, width, height, scheme='light', scale=1):
        self.driver.execute_cdp_cmd('Emulation.setDeviceMetricsOverride', {
            'width': width, 'height': height, 'deviceScaleFactor': scale, 'mobile': width < 500})
        self.driver.execute_cdp_cmd('Emulation.setEmulatedMedia', {
            'features': [{'name': 'prefers-color-scheme', 'value': scheme}]})

    def stop(self):
        self.driver.quit()
