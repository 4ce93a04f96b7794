"""Which runtimes there are, and how one is loaded. Drivers of other packages come by entry point."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringfence.model.errors import InvalidRequest, NotFound, RuntimeUnavailable, Unsupported
from ringfence.runtimes.guarding import Guarded, guard

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from ringfence.runtimes.context import RuntimeContext

GROUP = "ringfence.runtimes"
# Module and class, imported only when asked for: a command line that uses one runtime loads one.
BUILT_IN = {
    "jail": ("ringfence.runtimes.jail", "JailRuntime"),
    "bubblewrap": ("ringfence.runtimes.bubblewrap", "BubblewrapRuntime"),
    "nsjail": ("ringfence.runtimes.nsjail", "NsjailRuntime"),
    "runc": ("ringfence.runtimes.runc", "RuncRuntime"),
    "crun": ("ringfence.runtimes.crun", "CrunRuntime"),
    "gvisor": ("ringfence.runtimes.gvisor", "GvisorRuntime"),
    "qemu-microvm": ("ringfence.runtimes.qemu", "MicrovmRuntime"),
    "qemu": ("ringfence.runtimes.qemu", "FullRuntime"),
    "firecracker": ("ringfence.runtimes.firecracker.driver", "FirecrackerRuntime"),
    "wasm": ("ringfence.runtimes.wasm.driver", "WasmRuntime"),
    "docker": ("ringfence.runtimes.engines.docker", "DockerRuntime"),
    "podman": ("ringfence.runtimes.engines.podman", "PodmanRuntime"),
    "fake": ("ringfence.runtimes.fake", "FakeRuntime"),
}
# Container engines: ENGINE:RUNTIME is one of their OCI runtimes.
ENGINES = ("docker", "podman")
# Walls that nothing chooses by itself: they must be asked for by name.
BY_NAME_ONLY = frozenset({"wasm", "fake"})
# Known names that no driver has, and where to find what they mean.
NOT_WALLS = {
    "inline": (
        "inline runs a callable of your own program, not a command, and has no wall",
        "call ringfence.runtimes.inline.run from Python, or choose a runtime with a wall",
    )
}


def names() -> list[str]:
    """Every runtime known: built-in ones first, then those of other packages in alphabetical order."""
    return [*BUILT_IN, *sorted(_entry_points())]


def load(name: str, context: RuntimeContext) -> Guarded:
    """The driver of that name, behind the guarding wrapper.

    A class from another package is called with the context, as the built-in ones are. It can't take the
    name of a built-in one.

    Raises:
        NotFound: no runtime has that name.
        Unsupported: the name is known and means no wall (``inline``).
        RuntimeUnavailable: its package is broken.
    """
    if name in BUILT_IN:
        module, attribute = BUILT_IN[name]
        from importlib import import_module

        return guard(getattr(import_module(module), attribute)(context))
    engine, _, oci = name.partition(":")
    if oci and engine in ENGINES:
        from importlib import import_module

        module, attribute = BUILT_IN[engine]
        return guard(getattr(import_module(module), attribute)(context, oci))
    if name in NOT_WALLS:
        text, hint = NOT_WALLS[name]
        raise Unsupported(text, hint=hint, runtime=name)
    entry = _entry_points().get(name)
    if entry is None:
        known = ", ".join(names())
        raise NotFound(f"no runtime is called {name!r}", hint=f"use one of {known}", runtime=name)
    try:
        driver = entry.load()(context)
    except Exception as error:
        raise RuntimeUnavailable(
            f"the runtime {name} could not be loaded: {type(error).__name__}: {error}",
            hint=f"repair or remove the package that brings it ({entry.value})",
            runtime=name,
        ) from error
    if getattr(driver, "name", None) != name:
        raise InvalidRequest(
            f"the entry point {name} names a driver that calls itself {getattr(driver, 'name', None)!r}",
            hint="the two names must be the same, since handles carry it",
        )
    return guard(driver)


def _entry_points() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points

    return {
        entry.name: entry
        for entry in entry_points(group=GROUP)
        if entry.name not in BUILT_IN and entry.name not in NOT_WALLS
    }
