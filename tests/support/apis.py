"""Several API processes on one store and one node."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from support.serving import Serving


@contextlib.contextmanager
def another(first: Serving, *options: str) -> Iterator[Serving]:
    """A second API, with an egress proxy of its own, on the first one's store and node."""
    made = Serving("--node", str(first.node_socket), *options, store=first.store)
    made.key = first.key
    try:
        yield made.start()
    finally:
        made.remove()


def kill(service: Serving) -> None:
    """SIGKILL all of its API: nobody starts it again."""
    assert service.process is not None
    pids = service.children()["api"]
    service.process.send_signal(signal.SIGKILL)
    service.process.wait(60)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it went with it
            os.kill(pid, signal.SIGKILL)
