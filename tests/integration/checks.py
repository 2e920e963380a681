# What the test programs in Python share: TAP on standard output, limits that only end what hangs, and files.
#
# SPDX-License-Identifier: Apache-2.0
import os
import socket
import subprocess
import time

LIMIT_S = 240  # for what takes a second on an idle machine
n = 0
n_failed = 0


def ok(condition, name, got=''):
    global n, n_failed
    n += 1
    n_failed += not condition
    print(f'{"ok" if condition else "not ok"} {n} - {name}', flush=True)
    if not condition:
        for line in str(got).splitlines() or ['(nothing)']:
            print(f'# {line}', flush=True)


def finish():
    """All checks were made: prints how many. The exit status."""
    print(f'1..{n}')
    return 1 if n_failed else 0


def run(command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, **options)


def wait_for(condition, what):
    """The condition's first result that is true."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() > deadline:
            raise TimeoutError(f'no {what() if callable(what) else what} within {LIMIT_S} s')
        time.sleep(0.05)


def read(path):
    with open(path, encoding='utf-8') as f:
        return f.read()


def write(path, text, mode=0o644):
    with open(path, 'w', encoding='utf-8') as f:
        f.write(text)
    os.chmod(path, mode)


def free_ports(count):
    held = [socket.create_server(('127.0.0.1', 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in held]
    for s in held:
        s.close()
    return ports


def listens(address):
    """A path, or (host, port)."""
    with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as s:
        return s.connect_ex(address) == 0
