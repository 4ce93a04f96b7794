"""The worker starts with every sandbox: what it imports is what every sandbox waits for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ringfence

# Of the standard library, 30 to 50 ms together on a busy machine; see `runtimes.wasm.lean`.
SLOW = {"json", "typing", "re", "enum", "collections", "functools", "contextlib", "signal", "socket"}
HEAVY = {"asyncio", "ssl", "inspect", "dataclasses", "logging", "wasmtime", "msgspec", "yaml"}


def imported(*names: str) -> set[str]:
    """All that is there after these imports, in a Python without site."""
    place = str(Path(ringfence.__file__).parents[1])
    code = f"import sys; sys.path.insert(0, {place!r}); import {', '.join(names)}; print(*sys.modules)"
    argv = [sys.executable, "-I", "-S", "-c", code]
    return set(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split())


def test_it_imports_nothing_heavy() -> None:
    found = imported("ringfence.runtimes.wasm.worker")
    assert "ringfence.runtimes.wasm.serving" in found
    assert not (HEAVY | SLOW) & found
    assert not HEAVY & imported("ringfence.runtimes.wasm.calling")


def test_what_is_lean_does_what_it_is_called_after() -> None:
    place = str(Path(ringfence.__file__).parents[1])
    code = (
        f"import sys; sys.path.insert(0, {place!r})\n"
        "from ringfence.runtimes.wasm.lean import deque, signal, socket, suppress\n"
        "import _socket, os\n"
        "with suppress(OSError, KeyError): raise FileNotFoundError\n"
        "try:\n with suppress(KeyError): raise ValueError\n"
        "except ValueError: print('passed on')\n"
        "server = socket(_socket.AF_INET); server.bind(('127.0.0.1', 0)); server.listen()\n"
        "client = socket(_socket.AF_INET); client.connect(server.getsockname())\n"
        "made, address = server.accept(); made.send(b'x')\n"
        "print(client.recv(1), address == client.getsockname())\n"
        "print(deque([1, 2]).popleft(), int(signal.SIGTERM))\n"
    )
    argv = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["passed on", "b'x' True", "1 15", ""]


def test_process_ids_are_those_of_the_protocol() -> None:
    from ringfence.guest.processes import is_id
    from ringfence.runtimes.wasm.processes import _is_id

    for name in ("", "a", "A-b_c.9", "x" * 64, "x" * 65, "a b", "ü", "a/b", "a\n"):
        assert _is_id(name) == is_id(name)
