"""Compiles one module, in a process of its own: ``python -I -S -c … CONFIG``. Reads WebAssembly on standard
input, writes machine code to standard output.

A module is hostile input to the compiler: it runs without any right but to compute, with bounded memory and
time, and a compiler that was taken over can spoil the cache entry of its own module only, which is as good as
the module itself.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from ringfence.runtimes.wasm.engine import Engine, EngineError

MEMORY = 6 << 30  # bytes of address space: CPython takes 2
SECONDS = 300  # of processor time; CPython takes 30


def main() -> None:
    """Entry of the compiling process."""
    config: dict[str, Any] = json.loads(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # a pipe is no file
    code = sys.stdin.buffer.read()
    engine = Engine(config["library"], fuel=config["fuel"])
    try:
        made = engine.serialize(engine.compile(code))
    except EngineError as error:
        sys.stderr.write(str(error)[:4000])
        raise SystemExit(1) from None
    sys.stdout.buffer.write(made)
