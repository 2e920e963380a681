"""What the daemon knows now: by bfcctl, whose JSON is stable.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any


class Failure(Exception):
    """A sentence for the user."""


class WrongUse(Failure):
    """The same, of a wrong argument."""


class Bfcctl:
    def __init__(self, program: str, socket: str | None) -> None:
        self.program, self.socket = program, socket
        self.pids: set[int] = set()  # of its calls, which are sessions of the daemon

    def list(self, *words: str) -> Any:
        """The value of `bfcctl --json WORDS`. Failure: with bfcctl's sentence."""
        process = self._start(words)
        out, err = process.communicate()
        self._check(process, err)
        return json.loads(out)[words[0].replace("-", "_")]

    def blocks(self) -> Iterator[dict[str, Any]]:
        """The rows of `bfcctl --json blocks`, each of which is a line of its own: there may be millions."""
        with self._start(("blocks",)) as process:
            assert process.stdout and process.stderr
            for line in process.stdout:
                if line.startswith(b"    {"):
                    yield json.loads(line.rstrip(b",\n"))
            err = process.stderr.read()
        self._check(process, err)

    def _start(self, words: tuple[str, ...]) -> subprocess.Popen[bytes]:
        socket = ["--socket", self.socket] if self.socket else []
        try:
            process = subprocess.Popen(
                [self.program, *socket, "--json", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            raise Failure(f"{self.program} cannot be run: {error.strerror}.") from None
        self.pids.add(process.pid)
        return process

    def _check(self, process: subprocess.Popen[bytes], err: bytes) -> None:
        if process.returncode != 0:
            sentence = err.decode(errors="replace").strip().removeprefix("bfcctl: ")
            raise Failure(sentence or f"{self.program} ended with status {process.returncode}.")
