"""Contexts on every wall that this machine can start: the same kernels, whatever is around them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from ringfence.conformance import templates
from ringfence.conformance.harness import request_for
from ringfence.guest.contexts import Contexts
from ringfence.model.errors import HostLimit, RuntimeUnavailable, Unsupported
from ringfence.model.policy import MIB
from ringfence.node.sandboxes import NodeSandbox
from ringfence.node.service import Node
from support.leaks import Leaks

RUNTIMES = ("bubblewrap", "nsjail", "runc", "gvisor", "qemu-microvm")


async def _started(node: Node, name: str) -> NodeSandbox:
    try:
        runtime = await node.runtime(name)
        if not runtime.capabilities().host_template:
            await asyncio.to_thread(templates.ensure, node.state.path)
        return await node.create(request_for(name, memory=512 * MIB, disk=64 * MIB, timeout=1200))
    except RuntimeUnavailable as error:
        pytest.skip(f"{name} is not usable here: {error.message}")
    except (HostLimit, Unsupported) as error:
        if os.geteuid() == 0:
            raise
        pytest.skip(f"{name} is not for this user: {error.message}")


@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_contexts_on(runtime: str, no_leaks: Leaks) -> None:
    node = await Node.open(Path(no_leaks.home))
    try:
        sandbox = await _started(node, runtime)
        async with await sandbox.new_link() as link:
            contexts = Contexts(link)
            await contexts.create(id="a", timeout=200)
            assert (await contexts.run("a", "x = 20\nprint('out')\nx * 2")).stdout == "out\n"
            assert (await contexts.run("a", "x + 22")).text == "42"
            if not runtime.startswith("qemu"):  # emulated ones may be too slow for a copy, and start cold
                copied = await contexts.run("a", "import gc\ngc.get_freeze_count() > 0")
                assert copied.text == "True", "it did not begin as a copy of the zygote"
            call = await contexts.execute("a", "print('go', flush=True)\nwhile True: pass")
            await call.__anext__()
            await call.interrupt()
            stopped = await call.collect()
            assert stopped.error is not None and stopped.error.name == "KeyboardInterrupt"
            assert (await contexts.run("a", "x += 1\nx", fresh=True)).text == "21"
            assert (await contexts.run("a", "x")).text == "20"
            await contexts.create("bash", id="b", timeout=200)
            assert (await contexts.run("b", "y=1; echo $y; false")).exit_code == 1
            assert (await contexts.run("b", "echo $y")).stdout == "1\n"
            assert [each.id for each in await contexts.list()] == ["a", "b"]
    finally:
        await node.close()


async def test_webassembly_says_that_it_can_not(no_leaks: Leaks) -> None:
    node = await Node.open(Path(no_leaks.home))
    try:
        try:
            sandbox = await node.create(request_for("wasm", memory=256 * MIB, disk=32 * MIB, timeout=300))
        except RuntimeUnavailable as error:
            pytest.skip(f"wasm is not usable here: {error.message}")
        async with await sandbox.new_link() as link:
            contexts = Contexts(link)
            for language in ("python", "javascript", "bash"):
                with pytest.raises(Unsupported):
                    await contexts.create(language, timeout=120)
            assert await contexts.list() == []
    finally:
        await node.close()
