from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from support.crashing import Run
from support.leaks import Leaks
from support.services import NodeProcess

ROOT = Path(__file__).parents[3]
PATIENCE = 240.0


class Crashes:
    """A node, a store, and orchestrators that die one after the other on them."""

    def __init__(self, leaks: Leaks, store: str = "") -> None:
        assert leaks.home is not None
        assert leaks.tmp is not None
        self.leaks = leaks
        self.home = leaks.home
        self.store = store or str(self.home / "store.db")
        self.node = NodeProcess(self.home)
        self.log = self.home / "crashes.log"
        self._server: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the node and the server."""
        self.node.start()
        self.start_server()

    def start_server(self) -> None:
        """Start the server that forks orchestrators."""
        with open(self.log, "ab") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "support.crashing"],
                cwd=ROOT / "tests",
                env=self.leaks.env | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def begin(self, **parts: Any) -> None:
        """Begin a run; :meth:`result` waits for it."""
        assert self._server is not None
        assert self._server.stdin is not None
        run = Run(store=self.store, socket=str(self.node.socket), **parts)
        self._server.stdin.write(json.dumps(asdict(run)) + "\n")
        self._server.stdin.flush()

    def result(self) -> dict[str, Any]:
        """How it ended: ``killed``, ``code``; if it was not, ``passed``, ``faults`` and ``settled``."""
        assert self._server is not None
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, self.words()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, **parts: Any) -> dict[str, Any]:
        """Both."""
        self.begin(**parts)
        return self.result()

    def words(self) -> str:
        """The end of what was logged."""
        return self.log.read_text(errors="replace")[-4000:]

    def beside(self) -> Crashes:
        """A second server on the same node and store, whose orchestrators live beside the first one's."""
        other = Crashes(self.leaks, self.store)
        other.start_server()
        return other

    def stop(self) -> None:
        """End the server, and the node if it is ours."""
        if self._server is not None:
            assert self._server.stdin is not None
            self._server.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(PATIENCE)
            assert self._server.stdout is not None
            self._server.stdout.close()
            if self._server.poll() is None:
                self._server.kill()
                self._server.wait()
        self.node.stop()


@pytest.fixture(scope="module")
def crashes() -> Iterator[Crashes]:
    """One node and store for a module's tests. At the end nothing at all may be left."""
    with Leaks() as leaks:
        made = Crashes(leaks)
        try:
            made.start()
            yield made
            made.run(work=False, clear=True)
        finally:
            made.stop()


FULL = bool(os.environ.get("RINGFENCE_FAULTS_FULL"))
