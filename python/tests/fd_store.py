# A service manager's store of file descriptors, for tests that restart the daemon: what systemd does with NOTIFY_SOCKET.
#
# SPDX-License-Identifier: Apache-2.0
import array
import os
import socket
import subprocess
import threading

MAX_FDS = 4096


class FdStore:
    def __init__(self, path):
        self.path = str(path)
        self._fds = []  # (name, fd)
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self):
        while True:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(4 * 253))
            except OSError:
                return
            fds = array.array("i")
            for _, _, content in ancillary:
                fds.frombytes(content[: len(content) - len(content) % 4])
            self._take(dict(line.split("=", 1) for line in data.decode().splitlines() if "=" in line), list(fds))

    def _take(self, message, fds):
        name = message.get("FDNAME", "stored")
        with self._lock:
            if message.get("FDSTOREREMOVE") == "1":
                for entry in [e for e in self._fds if e[0] == name]:
                    self._fds.remove(entry)
                    os.close(entry[1])
            elif message.get("FDSTORE") == "1":
                self._fds += [(name, fd) for fd in fds]
                return
        for fd in fds:  # of a barrier
            os.close(fd)

    def start(self, command, **kwargs):
        """Starts the daemon with what is stored, the newest first."""
        with self._lock:
            entries = list(reversed(self._fds))
        names = ":".join(name for name, _ in entries)
        environment = os.environ | {"NOTIFY_SOCKET": self.path, "BFCD_FDSTORE": str(MAX_FDS)}
        if entries:
            environment |= {"LISTEN_FDS": str(len(entries)), "LISTEN_FDNAMES": names}

        def place():
            # First above all places, so that none is overwritten before it is used.
            high = [os.dup2(fd, 1000 + i) for i, (_, fd) in enumerate(entries)]
            for i, fd in enumerate(high):
                os.dup2(fd, 3 + i)
                os.close(fd)

        return subprocess.Popen(
            ["sh", "-c", 'LISTEN_PID=$$ exec "$0" "$@"', *command], env=environment, preexec_fn=place, close_fds=False, **kwargs
        )

    def close(self):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            for _, fd in self._fds:
                os.close(fd)
            self._fds.clear()
