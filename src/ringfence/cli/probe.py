"""``ringfence probe``: what the wall really is, measured from outside and attacked from inside.

The host puts up canaries (files, a process, a server, sockets), starts a sandbox with the default policy,
lets ``ringfence.cli.inside`` try to reach them, and then looks at its own side: was anybody there? Every
promise of docs/SECURITY.md is one row; what could not be measured does not count as held.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ringfence.cli.output import note, print_json, printable, table
from ringfence.cli.parsing import Parser, add_json

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ringfence.cli.canaries import Canaries
    from ringfence.model.sandbox import EffectiveBoundary

HELD, VIOLATED, UNKNOWN = "held", "violated", "not measured"
LIMIT = 60.0  # seconds for the attempts inside
LIMIT_EMULATED = 900.0  # a machine boots first, and then takes its time
# What the workload may keep only when it was started as the sandbox's own root.
NAMESPACES = ("mnt", "pid", "net", "ipc", "uts")


@dataclass(slots=True)
class Promise:
    """One row: the name that docs/SECURITY.md has, whether it holds, and what was seen."""

    name: str
    state: str
    inside: str = ""
    outside: str = ""

    def judge(self, ok: bool, text: str) -> None:
        """What the host saw. It can break a promise that the inside calls held, never mend one."""
        self.outside = f"{self.outside}; {text}".removeprefix("; ")
        if not ok:
            self.state = VIOLATED

    def unseen(self, text: str) -> None:
        """The host can't see its side: what the inside calls held does not count alone."""
        self.outside = f"{self.outside}; {text}".removeprefix("; ")
        if self.state == HELD:
            self.state = UNKNOWN


@dataclass(slots=True)
class Findings:
    """Everything about one runtime."""

    boundary: EffectiveBoundary
    promises: list[Promise] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Every promise was measured and holds."""
        return all(promise.state == HELD for promise in self.promises)

    def as_dict(self) -> dict[str, Any]:
        """The document of ``--json``, one runtime."""
        return {
            "runtime": self.boundary.runtime,
            "ok": self.ok,
            "boundary": self.boundary.as_dict(),
            "promises": {
                p.name: {"state": p.state, "inside": p.inside, "outside": p.outside} for p in self.promises
            },
        }


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.description = (
        "Start a sandbox, measure from outside what its wall is made of, and try from inside to get out.\n\n"
        "Prints the effective boundary and every promise of docs/SECURITY.md. Exits 1 if one does not hold\n"
        "or could not be measured."
    )
    parser.epilog = (
        "examples:\n  ringfence probe\n  ringfence probe --runtime bubblewrap\n"
        "  ringfence probe --runtime fake      # no wall: shows that the probe finds what is open\n"
        "  ringfence probe --json | jq '.runtimes[].promises | map_values(.state)'"
    )
    parser.add_argument(
        "--runtime",
        action="append",
        metavar="NAME",
        help="which runtime (may be repeated; default: the one `ringfence run` would choose)",
    )
    parser.add_argument(
        "--template", metavar="NAME", help="for runtimes that can't run on the host's own files"
    )
    parser.add_argument("--user", type=int, default=1000, metavar="UID", help="user inside: 1000 or 0")
    parser.add_argument(
        "--python", metavar="PATH", help="a Python for the attempts inside (default: below /usr/bin)"
    )
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Measure, and print."""
    import asyncio

    found = asyncio.run(_examine(options))
    if options.json:
        print_json({"ok": all(f.ok for f in found), "runtimes": [f.as_dict() for f in found]})
    else:
        for findings in found:
            _print(findings)
    return 0 if all(findings.ok for findings in found) else 1


async def _examine(options: argparse.Namespace) -> list[Findings]:
    from ringfence.node.service import Node

    async with await Node.open(adopt=False) as node:
        return [
            await examine(node, name, options.user, options.python, options.template)
            for name in options.runtime or [None]
        ]


async def examine(
    node: Any, runtime: str | None, user: int, python: str | None = None, template: str | None = None
) -> Findings:
    """Measure one runtime. ``template`` is used only where the host's files can't be.

    Raises:
        NotFound, RuntimeUnavailable, StartFailed: no sandbox could be started with it.
    """
    from ringfence.cli.canaries import Canaries
    from ringfence.model.levels import Level
    from ringfence.model.policy import Isolation, Limits, Policy, Process
    from ringfence.model.sandbox import SandboxRequest

    # Who names a runtime wants to know about that one, emulated or not.
    isolation = Isolation(
        runtime=runtime, minimum=Level.L1 if runtime else Level.L2, allow_emulated=runtime is not None
    )
    own = runtime is not None and not (await node.runtime(runtime)).capabilities().host_template
    python = python or ("/usr/bin/python3" if own else _python())
    policy = Policy().with_wall(isolation=isolation, process=Process(user=user))
    policy = policy.with_door(limits=Limits(timeout=LIMIT_EMULATED if own else LIMIT))
    with Canaries(root=user == 0) as canaries:
        # The token is in our own environment: a sandbox that inherits it has leaked it.
        request = SandboxRequest(policy=policy)
        sandbox = await node.create(replace(request, template=template) if own and template else request)
        try:
            boundary, answers = await _try_inside(sandbox, canaries, await _attempts(node, runtime, python))
        finally:
            await sandbox.destroy()
        findings = Findings(boundary, _promises(answers))
        _judge(findings, canaries, user)
        _judge_end(findings, sandbox)
    return findings


async def _attempts(node: Any, runtime: str | None, python: str) -> tuple[str, ...]:
    """The command that makes the attempts: what a program can try, or what WebAssembly can."""
    import inspect

    if runtime is not None and not (await node.runtime(runtime)).capabilities().programs:
        from ringfence.cli import inside_wasm

        return ("python3", "-I", "-S", "-c", inspect.getsource(inside_wasm))
    from ringfence.cli import inside

    return (python, "-I", "-S", "-c", inspect.getsource(inside))


async def _try_inside(
    sandbox: Any, canaries: Canaries, command: tuple[str, ...]
) -> tuple[EffectiveBoundary, dict[str, Any]]:
    """The wall as it stands while the attempts run, and their own words: none if they could not be made."""
    import json

    from ringfence.guest.processes import ProcessSpec

    streams: dict[int, bytearray] = {1: bytearray(), 2: bytearray()}
    spec = ProcessSpec(command)
    walls: list[EffectiveBoundary] = []

    async def told() -> AsyncIterator[bytes]:
        # The command is there and waits for its input: now its own user and capabilities can be read.
        walls.append(await sandbox.boundary())
        yield json.dumps(canaries.described() | {"own_kernel": _own_kernel(walls[0])}).encode()

    result = await sandbox.run(
        spec, on_output=lambda output: streams[output.stream].extend(output.data), stdin=told()
    )
    boundary = walls[0] if walls else await sandbox.boundary()
    try:
        answers = json.loads(bytes(streams[1]))
    except ValueError:
        answers = None
    if isinstance(answers, dict):
        return boundary, answers
    words = bytes(streams[2]).decode(errors="replace").strip().splitlines() or [result.end.cause.value]
    note(f"the attempts inside ended early: {printable(words[-1])}")
    return boundary, {}


def _promises(answers: dict[str, Any]) -> list[Promise]:
    from ringfence.cli import inside

    found = []
    for name in inside.ATTEMPTS:
        answer = answers.get(name)
        # Hostile in principle: anything but a list of a boolean and a text is no answer.
        if isinstance(answer, list) and len(answer) == 2 and isinstance(answer[0], bool):
            found.append(Promise(name, HELD if answer[0] else VIOLATED, printable(str(answer[1]))[:500]))
        else:
            detail = str(answer[1]) if isinstance(answer, list) and len(answer) == 2 else "no answer"
            found.append(Promise(name, UNKNOWN, printable(detail)[:500]))
    return found


def _judge(findings: Findings, canaries: Canaries, user: int) -> None:
    """The host's own view: its canaries, and what it read of the living wall."""
    from ringfence.model.levels import Boundary

    rows = {promise.name: promise for promise in findings.promises}
    wall = findings.boundary
    rows["host-loopback"].judge(
        not canaries.connections("tcp"), f"connections: {canaries.connections('tcp')}"
    )
    met = canaries.connections("abstract") + canaries.connections("socket")
    rows["host-sockets"].judge(not met, f"connections: {met}")
    alive = canaries.process_alive()
    rows["signal-host"].judge(alive, "the canary process lives" if alive else "the canary process was killed")
    rows["no-new-privileges"].judge(
        wall.no_new_privs, f"no_new_privs: {'yes' if wall.no_new_privs else 'no'}"
    )
    if wall.seccomp == "unknown":
        rows["seccomp"].unseen("seccomp: unknown")
    else:
        rows["seccomp"].judge(wall.seccomp == "filter", f"seccomp: {wall.seccomp}")
    held = ", ".join(wall.capabilities)
    rows["capabilities"].judge(not wall.capabilities or (user == 0 and wall.user_namespace), held or "none")
    rows["identity"].judge(wall.host_uid != 0, f"host uid {wall.host_uid}")
    if wall.boundary in (Boundary.HARDWARE, Boundary.EMULATED):
        return  # a machine of its own: it has no namespace of the host's to share
    missing = [name for name in NAMESPACES if name not in wall.namespaces]
    rows["namespaces"].judge(
        not missing, f"shared with the host: {', '.join(missing) or 'none that matters'}"
    )
    rows["interfaces"].judge("net" in wall.namespaces, f"own network: {'net' in wall.namespaces}")
    rows["host-processes"].judge("pid" in wall.namespaces, f"own processes: {'pid' in wall.namespaces}")


def _own_kernel(wall: EffectiveBoundary) -> bool:
    """Whether another kernel than the host's answers the sandbox's system calls."""
    from ringfence.model.levels import Boundary

    return wall.boundary in (Boundary.USERSPACE_KERNEL, Boundary.HARDWARE, Boundary.EMULATED)


def _judge_end(findings: Findings, sandbox: Any) -> None:
    """What docs/SECURITY.md says holds without an option: limits, and that nothing is left."""
    limits = findings.boundary.limits
    wanted = ("memory", "pids", "disk", "output", "deadline")
    missing = [name for name in wanted if limits.get(name, "none") == "none"]
    text = ", ".join(f"{name} {how}" for name, how in limits.items())
    findings.promises.append(Promise("limits", VIOLATED if missing else HELD, "", text))
    left = []
    if os.path.exists(f"/proc/{sandbox.handle.pid}/root"):
        from ringfence.runtimes.launching.processes import ProcessRef

        if ProcessRef(sandbox.handle.pid, sandbox.handle.birth, sandbox.handle.boot_id).alive():
            left.append(f"process {sandbox.handle.pid}")
    if os.path.exists(sandbox.handle.folder):
        left.append(sandbox.handle.folder)
    findings.promises.append(
        Promise(
            "clean-up", VIOLATED if left else HELD, "", "left: " + ", ".join(left) if left else "nothing left"
        )
    )


def _python() -> str:
    """A Python that the host template shows: below /usr, and no shim of a version manager."""
    import shutil

    version = f"python3.{sys.version_info[1]}"
    for candidate in (os.path.realpath(sys.executable), f"/usr/bin/{version}", shutil.which("python3") or ""):
        with contextlib.suppress(OSError):
            path = os.path.realpath(candidate)
            if path.startswith("/usr/bin/") and os.access(path, os.X_OK):
                return path
    from ringfence.model.errors import HostLimit

    raise HostLimit(
        "the attempts inside need a Python below /usr/bin, which sandboxes can see",
        hint="apt-get install python3, or name one with --python",
    )


def _print(findings: Findings) -> None:
    wall = findings.boundary
    rows = [
        ("runtime", wall.runtime),
        ("level", wall.level.value),
        ("boundary", wall.boundary.value),
        ("kernel", wall.kernel),
        ("own namespaces", " ".join(wall.namespaces) or "none"),
        ("user on the host", wall.host_uid),
        ("capabilities", ", ".join(wall.capabilities) or "none"),
        ("no_new_privs", "yes" if wall.no_new_privs else "no"),
        ("seccomp", wall.seccomp),
        ("landlock", wall.landlock),
        ("security module", wall.lsm),
        ("network", wall.network),
        *((f"limit: {name}", how) for name, how in wall.limits.items()),
        *(("note", printable(text)) for text in wall.notes),
    ]
    table(("effective boundary", "measured"), rows)
    seen_rows = []
    for promise in findings.promises:
        seen = "; ".join(filter(None, [promise.inside, promise.outside]))
        seen_rows.append((promise.name, promise.state, seen))
    table(("promise", "state", "seen"), seen_rows)
    count = sum(promise.state == HELD for promise in findings.promises)
    print(f"{wall.runtime}: {count} of {len(findings.promises)} promises hold")
