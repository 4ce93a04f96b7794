"""Attacks behind a wall: the payload is brought in as a workload would bring it, and runs under limits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import signal
from collections.abc import Iterable

from ringfence.conformance.harness import request_for
from ringfence.guest.processes import Output, ProcessSpec
from ringfence.model.errors import RingfenceError
from ringfence.model.levels import Cause
from ringfence.node.sandboxes import NodeSandbox, RunResult
from ringfence.node.service import Node
from security.attacks import Attack
from security.payloads import command, program, verdict
from security.stage import Stage

BOMBS = {
    Cause.OUT_OF_MEMORY: "contained:out_of_memory",
    Cause.OUTPUT_LIMIT: "contained:output_limit",
    Cause.DEADLINE: "contained:deadline",
    Cause.CPU_TIME: "contained:cpu_time",
    Cause.RUNTIME_CRASH: "runtime-crash",
}
# Walls that take long to start: attacks that leave the sandbox as it was share one, one after the other.
SHARED = ("gvisor/root", "runc/root", "crun/root")
MOST_SEEN = 1 << 20  # bytes of a payload's output that are looked at


def caller() -> str:
    """The kind of caller: ``root``, ``user``, or ``user+ids`` (one who has subordinate ids)."""
    uid = os.geteuid()
    if uid == 0:
        return "root"
    names = {str(uid)}
    with contextlib.suppress(KeyError):
        names.add(pwd.getpwuid(uid).pw_name)
    try:
        with open("/etc/subuid") as file:
            return "user+ids" if any(line.split(":")[0] in names for line in file) else "user"
    except OSError:
        return "user"


def shares(wall: str, attack: Attack) -> bool:
    """Whether this attack is one of many in a sandbox: it needs no limits or mounts, and spares the agent."""
    alone = attack.limits or attack.mounts or attack.deviations or "agent" in attack.judge
    return f"{wall}/{caller()}" in SHARED and not alone


async def in_one_sandbox(node: Node, wall: str, stage: Stage, attacks: Iterable[Attack]) -> list[str]:
    """Attacks one after the other; those that came out otherwise than the table has it."""
    wrong: list[str] = []
    sandbox: NodeSandbox | None = None
    try:
        for attack in attacks:
            sandbox = sandbox or await node.create(request_for(wall))
            outcome, intact = await attack_inside(sandbox, attack, stage)
            expected = attack.expect[f"{wall}/{caller()}"]
            if outcome != expected:
                wrong.append(f"{attack.name}: {outcome}, not {expected}")
            if not intact:
                await sandbox.destroy()
                sandbox = None
    finally:
        if sandbox is not None:
            await sandbox.destroy()
    return wrong


async def bring_in(sandbox: NodeSandbox, payload: str, at: str = "/workspace/payload") -> list[str]:
    """Write the payload inside through a command's input (which every runtime has); how to run it."""
    link = await sandbox.link()
    writer = await link.start(ProcessSpec(("/bin/sh", "-c", f"cat > {at} && chmod 755 {at}"), stdin=True))
    await writer.write(program(payload))
    await writer.close_stdin()
    assert (await writer.wait()).code == 0, "the payload could not be brought in"
    return command(payload, at)


async def run_attack(node: Node, runtime: str, attack: Attack, stage: Stage, *, zero: bool = False) -> str:
    """The outcome of an attack behind a wall of ``runtime``. The sandbox is gone afterwards.

    ``zero``: the attacker is root of the sandbox (``process.user: 0``).
    """
    things = {**stage.things(), "state": str(node.state.path)}
    wishes = dict(attack.limits)
    if zero:
        wishes["user"] = 0
    if attack.mounts:
        mounts = [(source.format(**things), target, True) for source, target in attack.mounts]
        sandbox = await node.create(request_for(runtime, mounts=mounts, **wishes))
    else:
        sandbox = await node.create(request_for(runtime, **wishes))
    try:
        return (await attack_inside(sandbox, attack, stage, zero=zero))[0]
    finally:
        await sandbox.destroy()


async def attack_inside(
    sandbox: NodeSandbox, attack: Attack, stage: Stage, *, zero: bool = False
) -> tuple[str, bool]:
    """The outcome of an attack in a sandbox, and whether that is as good as before."""
    things = {**stage.things(), "state": str(sandbox.journal.folder.parents[1])}
    argv = await bring_in(sandbox, attack.payload)
    argv += [arg.format(**things) for arg in attack.args]
    spec = ProcessSpec(tuple(argv), pty=attack.pty, as_root=zero)
    outcome, result = await _run(sandbox, spec)
    if outcome is None:
        return _ended(result), False
    if "victim" in attack.judge and not stage.victim_lives():
        return "succeeded", False
    if "agent" in attack.judge and outcome in ("succeeded", "sent"):
        return ("no-effect" if await _serves(sandbox) else "succeeded"), False
    return outcome, True


async def _run(sandbox: NodeSandbox, spec: ProcessSpec) -> tuple[str | None, RunResult]:
    seen = bytearray()

    def take(output: Output) -> None:
        seen.extend(output.data)
        del seen[:-MOST_SEEN]

    result = await sandbox.run(spec, take)
    return verdict(bytes(seen).replace(b"\r\n", b"\n")), result


def _ended(result: RunResult) -> str:
    """The outcome of a payload that said nothing: what the host knows."""
    end = result.end
    if end.cause in BOMBS:
        return BOMBS[end.cause]
    if end.cause is Cause.SIGNALED and end.exit_code is not None:
        return f"killed:{signal.Signals(end.exit_code - 128).name}"
    return f"exit:{end.exit_code}"


async def _serves(sandbox: NodeSandbox) -> bool:
    """Does the agent still take links and run commands?"""
    try:
        async with asyncio.timeout(60):
            link = await sandbox.new_link()
            process = await link.start(ProcessSpec(("true",)))
            served = (await process.wait()).code == 0
            await link.close()
            return served
    except (RingfenceError, TimeoutError):
        return False
