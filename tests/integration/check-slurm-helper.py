#!/usr/bin/env -S python3 -B
# integrations/slurm/bfcd-slurm without Slurm: what it believes of programs that run for a user, what it prints for the
# plugin, which is root, and what it kills. The programs that it starts are scripts of this test.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: check-slurm-helper.py      exits with 77 without root
import contextlib
import importlib.machinery
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import tempfile

from checks import finish, ok, read, wait_for, write

HELPER = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..', 'integrations', 'slurm', 'bfcd-slurm')
UID = GID = 65534

# What a process of the user could do to it.
WHOAMI = '''#!/usr/bin/python3
import ctypes, json, os
print(json.dumps([os.getresuid(), os.getresgid(), os.getgroups(), ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)]))
'''


def load(folder):
    loader = importlib.machinery.SourceFileLoader('bfcd_slurm', HELPER)
    helper = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(helper)
    helper.hierarchy = lambda: (f'{folder}/cgroup', '/slurmd')
    return helper


def whoami(tenant):
    return json.dumps({'whoami': {'tenant': tenant}})


class SeenJson:
    """For the helper's json."""
    seen = None

    @staticmethod
    def loads(text):
        SeenJson.seen = json.loads(text)
        return {'whoami': {'tenant': 'players'}}


class Rig:
    def __init__(self, folder):
        self.folder = folder
        self.gres = 'gres:bfcd:train:64'
        os.chmod(folder, 0o755)
        os.makedirs(f'{folder}/cgroup/slurmd')

    def begin(self, answer):
        """What `begin` prints, and its exit status, where `whoami` answers this."""
        def answer_of(command, **_):
            text = (answer if 'whoami' in command else '{"rows": []}' if 'list' in command else
                    f'{"7":16}{self.gres}' if command[0] == 'squeue' else '')
            failed = text.startswith('error ')
            return subprocess.CompletedProcess(command, failed, '' if failed else text, text)

        helper, out = load(self.folder), io.StringIO()
        helper.run = answer_of
        with contextlib.redirect_stdout(out):
            try:
                status = helper.main(['begin', '7', str(UID), str(GID), '', f'state={self.folder}/jobs'])
            except Exception as e:  # as Python would end it
                status = repr(e)
        return out.getvalue(), status


def check_values(rig):
    """A value that the plugin would read as more than it is."""
    folder = f'{rig.folder}/cgroup/slurmd/bfcd-job-7'
    lines, status = rig.begin(whoami('players'))
    ok(status == 0 and lines.splitlines() == [f'cgroup {folder}', 'env BFC_PARTITION=train', 'env BFC_TENANT=players'],
       'begin prints the control group and two variables', f'{status} {lines}')
    for answer in (whoami('a\ncgroup /etc'), whoami('a\ncgroup /etc\n'), whoami('a b'), whoami('a\x00b'), whoami('é'), whoami(''),
                   whoami('a' * 64), whoami(None), whoami(['a']), whoami({'a': 1}), whoami(7), '[]', '7', '', 'null', '{}',
                   '{"whoami": []}', '{"whoami": "tenant"}', whoami('x') + 'y', 'error first\nsecond\x1b[0m\x85'):
        lines, status = rig.begin(answer)
        ok(status == 1 and lines.startswith('error ') and len(lines.splitlines()) == 1 and lines.endswith('\n')
           and lines[:-1].isprintable(), f'of {answer[:40]!r} comes an error, in one line', f'{status} {lines}')
    rig.gres = 'gres:bfcd:' + 'a' * 64 + ':64'
    lines, status = rig.begin(whoami('players'))
    ok(status == 1 and 'is not the name of a partition' in lines, 'so it does of a partition', f'{status} {lines}')


def check_identity(rig):
    helper = load(rig.folder)
    write(f'{rig.folder}/whoami', WHOAMI, 0o755)
    helper.json = SeenJson
    options = {**helper.DEFAULTS, 'bfcctl': f'{rig.folder}/whoami'}
    helper.tenant_of(options, UID, GID, '')
    uids, gids, groups, is_dumpable = SeenJson.seen
    ok(uids[1] == UID and gids[1] == GID and 0 not in groups, 'bfcd sees the user', (uids, gids, groups))
    ok(uids[0] == 0 and is_dumpable == 0, 'processes of the user cannot trace what tells the tenant', (uids, is_dumpable))


def check_kill(rig):
    """A number in the list that is another process's when it is killed."""
    helper = load(rig.folder)
    group = f'{rig.folder}/cgroup/slurmd/job'
    os.makedirs(group, exist_ok=True)
    with subprocess.Popen(['sleep', '600']) as other, subprocess.Popen(['sleep', '600']) as own:
        write(f'{group}/cgroup.procs', f'{own.pid}\n')
        real, helper.KILL_TIMEOUT_S = helper.read_pids, 0.2
        looks = iter([[str(own.pid), str(other.pid)]])
        helper.read_pids = lambda where: next(looks, None) or real(where)  # the other one has left it by the second look
        try:
            helper.kill_group(group)
        except helper.Failure:
            pass  # this list is a file, which never becomes empty
        ok(wait_for(lambda: own.poll() == -signal.SIGKILL, 'its end'), 'a process of the group is killed')
        ok(other.poll() is None, 'one that has its number only is not')
        other.kill()
    with open(f'{group}/cgroup.kill', 'w', encoding='utf-8'):
        pass
    try:
        helper.kill_group(group)
    except helper.Failure as e:
        ok('do not die' in str(e), 'what does not die is a failure', e)
    ok(read(f'{group}/cgroup.kill').startswith('1'), 'the kernel kills the group where it can')


def main():
    if os.geteuid() != 0:
        print('# skipped: needs root')
        return 77
    with tempfile.TemporaryDirectory(prefix='bfc-slurm-', dir='/tmp') as folder:
        rig = Rig(folder)
        check_values(rig)
        check_identity(rig)
        check_kill(rig)
    return finish()


if __name__ == '__main__':
    sys.exit(main())
