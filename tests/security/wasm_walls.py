"""Attacks from inside WebAssembly: the payload is brought in as a file, and runs in a sandbox of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ringfence.conformance.harness import request_for
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import RingfenceError
from ringfence.node.sandboxes import NodeSandbox
from ringfence.node.service import Node
from security.payloads import program
from security.stage import Stage
from security.tables.wasm import Granted, WasmAttack
from security.walls import _ended, _run
from support.modules import wasm

_FOLDER = Path(__file__).parent / "payloads"


def payload_of(attack: WasmAttack, module: str | bytes) -> tuple[str, bytes, tuple[str, ...]]:
    """Where it lies inside, its bytes, and the command that runs it."""
    if attack.payload.endswith(".py"):
        return "/workspace/attack.py", program(attack.payload), ("python3", "-I", "-S", "attack.py")
    if attack.payload.endswith(".js"):
        return "/workspace/attack.js", (_FOLDER / attack.payload).read_bytes(), ("qjs", "attack.js")
    code = wasm(module) if isinstance(module, str) else module
    return "/workspace/attack.wasm", code, ("attack.wasm",)


class Shared:
    """A sandbox for attacks that need none of their own: the next finds it working, or the last broke it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._sandbox: NodeSandbox | None = None

    async def get(self) -> NodeSandbox:
        """The one that lives, or a new one."""
        if self._sandbox is None or self._sandbox.ended.done():
            await self.close()
            self._sandbox = await self.node.create(request_for("wasm"))
        return self._sandbox

    async def close(self) -> None:
        """End it."""
        if self._sandbox is not None:
            await self._sandbox.destroy()
            self._sandbox = None


async def run_wasm_attack(
    shared: Shared, attack: WasmAttack, stage: Stage, grant: Granted | None = None
) -> tuple[str, bool]:
    """The outcome, and whether the sandbox went on to serve. ``grant``: the control, with what it gives."""
    node = shared.node
    things = {**stage.things(), "state": str(node.state.path)}
    limits = attack.limits if grant is None else {**attack.limits, **grant.limits}
    given = () if grant is None else grant.mounts
    mounts = [(str(Path(source.format(**things)).resolve()), target, True) for source, target in given]
    if "/shown" in " ".join(attack.args) and not mounts:
        mounts = [(str(stage.folder), "/shown", True)]
    common = attack.shares and not mounts and not limits
    module = attack.module if grant is None or not grant.module else grant.module
    at, code, argv = payload_of(attack, module)
    sandbox = await (shared.get() if common else node.create(request_for("wasm", mounts=mounts, **limits)))
    try:
        try:
            link = await sandbox.link()
            await link.files.write(at, code)
        except RingfenceError:  # on a machine that stood still its time may be over before it has begun
            if common or "timeout" not in limits:
                raise
            await sandbox.destroy()
            limits = {**limits, "timeout": 30.0}
            sandbox = await node.create(request_for("wasm", mounts=mounts, **limits))
            link = await sandbox.link()
            await link.files.write(at, code)
        args = attack.args if grant is None or grant.args is None else grant.args
        words = tuple(arg.format(**things) for arg in args)
        env = _formatted(attack.env if grant is None else {**attack.env, **grant.env}, things)
        outcome, result = await _run(sandbox, ProcessSpec((*argv, *words), env=env))
        outcome = outcome or _ended(result)
        if outcome == "exit:0":
            outcome = "succeeded"  # of a module
        if "victim" in attack.judge and not stage.victim_lives():
            outcome = "succeeded"
        return outcome, await _serves(sandbox)
    finally:
        if not common:
            await sandbox.destroy()


def _formatted(env: Mapping[str, str], things: Mapping[str, str]) -> dict[str, str]:
    return {name: value.format(**things) for name, value in env.items()}


async def _serves(sandbox: NodeSandbox) -> bool:
    """Does the worker still take links and answer? That it still runs commands the next attack shows."""
    if sandbox.ended.done():
        return False
    try:
        link = await sandbox.new_link()
        await link.processes()
        await link.close()
    except RingfenceError:
        return False
    return True
