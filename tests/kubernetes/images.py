# Images of containers, made without an engine: archives as docker save writes them, of one layer.
#
# SPDX-License-Identifier: Apache-2.0
import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
import tempfile

PAUSE = '''#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
static void end(int n) { (void)n; _exit(0); }
static void reap(int n) { (void)n; while (waitpid(-1, 0, WNOHANG) > 0) ; }
int main(void) { signal(SIGTERM, end); signal(SIGINT, end); signal(SIGCHLD, reap); for (;;) pause(); }
'''


def make(path, name, files, config, folders=()):
    """files: the file here, by its path in the image. folders: those for everyone."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode='w') as tar:
        for folder in folders:
            info = tarfile.TarInfo(folder.lstrip('/'))
            info.type, info.mode = tarfile.DIRTYPE, 0o1777
            tar.addfile(info)
        for target, source in files.items():
            info = tar.gettarinfo(os.path.realpath(source), target.lstrip('/'))
            info.mode, info.uid, info.gid, info.uname, info.gname = 0o755, 0, 0, '', ''
            with open(source, 'rb') as f:
                tar.addfile(info, f)
    layer = layer.getvalue()
    config = {'architecture': 'amd64', 'os': 'linux', 'config': config,
              'rootfs': {'type': 'layers', 'diff_ids': ['sha256:' + hashlib.sha256(layer).hexdigest()]}}
    parts = {'manifest.json': json.dumps([{'Config': 'config.json', 'RepoTags': [name], 'Layers': ['layer.tar']}]).encode(),
             'config.json': json.dumps(config).encode(), 'layer.tar': layer}
    with tarfile.open(path, 'w') as tar:
        for part, text in parts.items():
            info = tarfile.TarInfo(part)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    return path


def with_libraries(*programs):
    """The files that these programs need, each at its own path. A static program needs none."""
    files = {}
    for program in programs:
        text = subprocess.run(['ldd', program], capture_output=True, text=True, check=False).stdout
        for library in re.findall(r'(?:=> )?(/\S+) \(0x', text):
            files[library if 'libbfcclient' not in library else '/usr/lib/libbfcclient.so.0'] = library
    return files


def pause(path):
    """The sandbox of each pod."""
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, 'pause')
        subprocess.run(['cc', '-O1', '-static', '-x', 'c', '-o', program, '-'], input=PAUSE, text=True, check=True)
        return make(path, 'localhost/pause:1', {'/pause': program}, {'Entrypoint': ['/pause']})


def job(path, build):
    """tests/integration/container_client.c, bfcctl, and a shell."""
    files = {'/bin/job': build.client, '/bin/bfcctl': build.bfcctl, **with_libraries(build.client, build.bfcctl, '/bin/busybox'),
             **{f'/bin/{name}': '/bin/busybox' for name in ('sh', 'touch', 'cat', 'grep')}}
    return make(path, 'localhost/job:1', files, {'Env': ['PATH=/bin', 'LD_LIBRARY_PATH=/usr/lib']}, ['/tmp'])
