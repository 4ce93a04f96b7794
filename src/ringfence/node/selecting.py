"""Which runtime a policy gets: the minimum it asks for, then the fastest that has what it needs.

The run path probes nothing: candidates come fastest first, the first is simply started, and only if this
host can't start it at all the next one is tried (and the sandbox says so in its notes). ``doctor`` and
``probe`` are there to look at all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ringfence.model.errors import RuntimeUnavailable, Unsupported
from ringfence.model.levels import Boundary
from ringfence.model.sandbox import SandboxRequest
from ringfence.runtimes.contract import Capabilities, Runtime

# Fastest first, as measured (SPECIFICATION). Others follow in the order of the registry.
FIRST = ("jail", "bubblewrap")  # built in, always there
BY_SPEED = ("nsjail", "crun", "runc", "gvisor", "firecracker", "qemu-microvm", "qemu")
ENGINES = frozenset({"docker", "podman"})  # have images of their own
BY_NAME_ONLY = frozenset({"fake", "inline", "wasm"})  # never chosen, only asked for


@dataclass(frozen=True, slots=True)
class Rejected:
    """A runtime that was not taken, and why."""

    name: str
    reason: str


def candidates(
    request: SandboxRequest,
    names: Callable[[], list[str]],
    load: Callable[[str], Runtime],
    *,
    root: bool,
    rejected: list[Rejected],
) -> Iterator[Runtime]:
    """Runtimes that fit the request, best first, loaded one by one. Why others don't goes to ``rejected``.

    Raises:
        NotFound: the policy names a runtime that nobody knows; the hint lists those that are known.
        Unsupported: the named runtime lacks what the policy needs.
        RuntimeUnavailable: the named runtime is below the level that the policy asks for, or can't be loaded.
    """
    isolation = request.policy.wall.isolation
    if isolation.runtime is not None:
        runtime = load(isolation.runtime)
        reason = _level(request, runtime)
        if reason:
            raise RuntimeUnavailable(
                f"runtime {runtime.name} is not strong enough: {reason}",
                hint="ask for a lower level, or leave the runtime to Ringfence",
            )
        lack = lacks(request, runtime.capabilities(), root=root, name=runtime.name)
        if lack:
            raise Unsupported(
                f"runtime {runtime.name} can't do this: {lack[1]}",
                hint="choose another runtime, or change the policy",
                capability=lack[0],
            )
        yield runtime
        return
    for name in _ordered(isolation.prefer, names):
        try:
            runtime = load(name)
        except (RuntimeUnavailable, ImportError) as error:
            rejected.append(Rejected(name, str(error)))
            continue
        reason = _level(request, runtime)
        if not reason:
            lack = lacks(request, runtime.capabilities(), root=root, name=runtime.name)
            reason = lack[1] if lack else ""
        if reason:
            rejected.append(Rejected(name, reason))
            continue
        yield runtime


def _ordered(prefer: tuple[str, ...], names: Callable[[], list[str]]) -> Iterator[str]:
    """Names to try, one by one: looking for those of other packages costs time, and is seldom needed."""
    seen: set[str] = set()
    for name in (*prefer, *FIRST):
        if name not in seen:
            seen.add(name)
            yield name
    known = [n for n in names() if n not in seen and n not in BY_NAME_ONLY]
    yield from sorted(known, key=lambda n: BY_SPEED.index(n) if n in BY_SPEED else len(BY_SPEED))


def none_left(request: SandboxRequest, rejected: list[Rejected]) -> RuntimeUnavailable:
    """The error when every candidate was turned down."""
    reasons = "; ".join(f"{r.name}: {r.reason}" for r in rejected) or "none is installed"
    level = request.policy.wall.isolation.minimum.value
    return RuntimeUnavailable(
        f"no runtime on this host meets the policy (isolation {level} or more): {reasons}",
        hint="see `ringfence doctor` for what each runtime needs",
        reasons={r.name: r.reason for r in rejected},
    )


def _level(request: SandboxRequest, runtime: Runtime) -> str:
    isolation = request.policy.wall.isolation
    if runtime.name in BY_NAME_ONLY and isolation.runtime == runtime.name:
        return ""  # asked for by its name: the boundary tells what it is
    if runtime.level.rank < isolation.minimum.rank:
        return f"it is {runtime.level.value} and the policy asks for {isolation.minimum.value}"
    if runtime.boundary is Boundary.EMULATED and not isolation.allow_emulated:
        return "it runs under emulation here, which the policy does not allow (isolation.allowEmulated)"
    return ""


def lacks(
    request: SandboxRequest, has: Capabilities, *, root: bool, name: str = ""
) -> tuple[str, str] | None:
    """(capability, sentence) of the first thing the request needs that the driver has not."""
    policy = request.policy
    if not root and not has.rootless:
        return "rootless", "it needs root"
    if policy.wall.process.user == 0 and not has.user_zero:
        return "user_zero", "it can't make the workload root of its own user namespace (process.user: 0)"
    if policy.wall.filesystem.mounts and not has.mounts:
        return "mounts", "it can't show host folders inside"
    if request.keep and not has.recover:
        return "recover", "its sandboxes can't outlive the process that starts them"
    if policy.wall.resources.gpus and not has.gpu:
        from ringfence.runtimes.gpu import why_not

        return "gpu", why_not(name)
    if request.template == "host":
        if not has.host_template:
            return "host_template", "it can't show the host's programs: it needs a template of its own files"
    elif not has.programs:
        return "template", "it runs modules, not the programs of a template"
    elif request.template.startswith("docker:") and name not in ENGINES:
        return "template", "it is no container engine, which alone has images of its own"
    if policy.door.network.mode not in has.network:
        return "network", f"it has no network mode {policy.door.network.mode!r}"
    return None
