"""The worker starts with every sandbox: what it imports is what every sandbox waits for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ringfence

HEAVY = {"asyncio", "ssl", "inspect", "dataclasses", "logging", "wasmtime", "msgspec", "yaml"}


def test_it_imports_nothing_heavy() -> None:
    place = str(Path(ringfence.__file__).parents[1])
    code = (
        f"import sys; sys.path.insert(0, {place!r}); import ringfence.runtimes.wasm.worker; "
        "import ringfence.runtimes.wasm.calling; print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert not HEAVY & set(done.stdout.split())


def test_process_ids_are_those_of_the_protocol() -> None:
    from ringfence.guest.processes import is_id
    from ringfence.runtimes.wasm.processes import _is_id

    for name in ("", "a", "A-b_c.9", "x" * 64, "x" * 65, "a b", "ü", "a/b", "a\n"):
        assert _is_id(name) == is_id(name)
