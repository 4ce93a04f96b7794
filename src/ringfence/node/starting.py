"""What a template starts with each of its sandboxes, and how it is known to be up."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING

from ringfence.guest.processes import ProcessSpec
from ringfence.images.contract import TemplateConfig
from ringfence.model.errors import GuestRefused, LinkLost, RingfenceError, StartFailed
from ringfence.model.quantities import format_duration
from ringfence.node.supervising import ended_soon

if TYPE_CHECKING:
    from ringfence.node.sandboxes import NodeProcess, NodeSandbox
    from ringfence.node.service import Node

PATIENCE = 120.0  # seconds for a template to be ready; a sandbox's own deadline may come first
START = "template-start"  # id of the start command among the sandbox's processes
_FIRST, _LONGEST = 0.02, 0.5  # seconds between two looks
_LAST_WORDS = 2000  # bytes of output that an error carries


async def bring_up(node: Node, sandbox: NodeSandbox) -> None:
    """Start what the template starts with its sandboxes, in a wall that is new. It may have nothing to start.

    Raises:
        StartFailed: it does not come up.
    """
    digest = str(sandbox.journal.record.get("template", ""))
    if digest.startswith("sha256:"):
        await start_and_wait(sandbox, node.images.store.resolve(digest).config, sandbox.request.template)


async def hold(sandbox: NodeSandbox) -> None:
    """Let what the template starts, if anything, wait for :func:`release`, also after this node's end."""
    digest = str(sandbox.journal.record.get("template", ""))
    if digest.startswith("sha256:"):
        config = sandbox.node.images.store.resolve(digest).config
        if config.start or config.ready:
            sandbox.mark("held", True)


async def release(node: Node, sandbox: NodeSandbox) -> None:
    """Start what waits. Idempotent.

    Raises:
        StartFailed: it does not come up.
    """
    if sandbox.journal.record.get("held"):
        await bring_up(node, sandbox)
        sandbox.mark("held", None)


async def start_and_wait(sandbox: NodeSandbox, config: TemplateConfig, name: str) -> None:
    """Start the template's start command and wait until its ready command succeeds. Both may be missing.

    The start command runs on by itself, its last output can be read by attaching to ``template-start``.

    Raises:
        StartFailed: either can't be run; start failed before ready succeeded; or ready never did.
    """
    if not config.start and not config.ready:
        return
    started: NodeProcess | None = None
    try:
        if config.start:
            spec = ProcessSpec(config.start, id=START, detached=True, drop=True, merge_stderr=True)
            started = await _launch(sandbox, spec, name, "start")
        if config.ready:
            async with asyncio.timeout(PATIENCE):
                await _until_ready(sandbox, config, name, started)
    except TimeoutError:
        raise _failed(name, "ready", f"did not succeed within {format_duration(PATIENCE)}") from None
    except LinkLost as error:
        await ended_soon(sandbox.ended, sandbox.runtime, sandbox.handle)
        why = sandbox.ended.result().cause.value if sandbox.ended.done() else "its agent does not answer"
        raise _failed(
            name, "ready" if config.ready else "start", f"never succeeded: the sandbox ended ({why})"
        ) from error
    finally:
        if started is not None:
            with contextlib.suppress(RingfenceError):
                await started.close()


async def _until_ready(
    sandbox: NodeSandbox, config: TemplateConfig, name: str, started: NodeProcess | None
) -> None:
    delay = _FIRST
    while True:
        process = await _launch(sandbox, ProcessSpec(config.ready, merge_stderr=True), name, "ready")
        try:
            async for _ in process:
                pass
            if (await process.wait()).status == 0:
                return
        except BaseException:
            with contextlib.suppress(RingfenceError):
                await process.signal(signal.SIGKILL)
            raise
        finally:
            with contextlib.suppress(RingfenceError):
                await process.close()
                await (await sandbox.link()).remove(process.id)  # it keeps the last few hundred only
        if sandbox.ended.done():
            raise LinkLost("the sandbox has ended")
        if started is not None:
            await _check_started(sandbox, name)
        await asyncio.sleep(delay)
        delay = min(delay * 1.5, _LONGEST)


async def _check_started(sandbox: NodeSandbox, name: str) -> None:
    """Fail if the start command has failed: ready would wait in vain."""
    link = await sandbox.link()
    entry = next((each for each in await link.processes() if each.id == START), None)
    if entry is None or entry.state == "running":
        return
    words = bytearray()
    process = await link.attach(START)
    try:
        async for output in process:
            words += output.data
            del words[:-_LAST_WORDS]
        status = (await process.wait()).status
    finally:
        await process.close()
    if status:  # one that ended well may have left a daemon
        text = words.decode("utf-8", "replace").strip()
        raise _failed(name, "start", f"ended with {status}" + (f":\n{text}" if text else ""))


async def _launch(sandbox: NodeSandbox, spec: ProcessSpec, name: str, which: str) -> NodeProcess:
    try:
        return await sandbox.start(spec)
    except GuestRefused as error:
        raise _failed(name, which, f"can't be run: {error.message}") from error


def _failed(name: str, which: str, why: str) -> StartFailed:
    return StartFailed(
        f"template {name}: its {which} command {why}",
        hint=f"`ringfence template show {name}` shows it; build or add the template with another one",
        step=which,
    )
