"""``ringfence node`` as a process of its own, for tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

READY = 60.0  # seconds that a node may take to start on a busy machine


class NodeProcess:
    """``ringfence node`` on a state folder."""

    def __init__(self, home: Path, service: str = "test", *options: str) -> None:
        self.home = home
        self.service = service
        self.options = options
        self.socket = home / "services" / service / "node.sock"
        self.process: subprocess.Popen[str] | None = None
        self.said = ""

    def start(self, env: dict[str, str] | None = None) -> str:
        """Start it and wait for the line that says it is ready."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ringfence", "node", "--service", self.service, *self.options],
            env=os.environ | {"RINGFENCE_HOME": str(self.home)} | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        timer = threading.Timer(READY, self.process.kill)
        timer.start()
        self.said = self.process.stdout.readline()
        timer.cancel()
        assert self.said.startswith("ready"), self.stop(signal.SIGKILL)
        return self.said

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """End it; exit status and what it wrote to stderr."""
        assert self.process is not None
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=READY)
        status = self.process.returncode
        self.process = None
        return status, errors

    def destroy_all(self) -> None:
        """End it, whatever it does, and every sandbox that it has left."""
        if self.process is not None:
            self.stop(signal.SIGKILL)
        script = (
            "import asyncio, sys\n"
            "from ringfence.placement.hosting import Hosting\n"
            "async def main():\n"
            "    hosting = await Hosting.open(sys.argv[1], sys.argv[2], lambda *a: None)\n"
            "    for each in hosting.all():\n"
            "        await hosting.destroy(each.id, 0.0)\n"
            "    for name in hosting.volumes.volumes.names():\n"
            "        await hosting.volumes.remove(name)\n"
            "    await hosting.close()\n"
            "asyncio.run(main())\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, str(self.home), self.service], capture_output=True, timeout=READY
        )
        assert done.returncode == 0, done.stderr.decode()
