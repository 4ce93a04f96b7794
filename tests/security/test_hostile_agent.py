"""A guest agent that lies, in a real wall: the host loses that sandbox's link, and nothing else."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest

from ringfence.conformance.harness import request_for
from ringfence.guest.link import GuestLink
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import DeadlineExceeded, GuestError, RingfenceError
from ringfence.node.service import Node
from security.payloads import FOLDER, program

WALL = "jail"  # the lies go over the link: any wall will do
SOURCE = (FOLDER / "evil_agent.c").read_text()
LIES = sorted(set(re.findall(r'is\("([a-z-]+)"\)', SOURCE)) - {"absurd-limits"})
PATIENCE = 60  # seconds for a whole conversation
SILENCE = 2  # seconds of one that no host could tell from a slow, honest one: it is cut short
GREETING = 1  # seconds for HELLO; a lie is as good late as never
GROWTH = 64 << 20  # bytes of our own memory that a lie may cost


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def evil_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evil") / "agent"
    path.write_bytes(program("evil_agent.c"))
    path.chmod(0o755)
    return path


async def ask(node: Node, lie: str, greeting: float = GREETING) -> str:
    """Use a sandbox whose agent tells this lie; what the host made of it."""
    sandbox = None
    try:
        sandbox = await node.create(request_for(WALL, env={"EVIL": lie}))
        link = await GuestLink.open(await sandbox.runtime.connect(sandbox.handle), timeout=greeting)
        try:
            process = await link.start(ProcessSpec(("true",)))
            if lie != "over-credit":  # who takes output gives credit; this one waits for a reader that sleeps
                async for _ in process:
                    pass
            return f"exit:{(await process.wait()).status}"
        finally:
            await link.close()
    except GuestError as error:
        for text in (error.message, str(error.details)):
            assert "\x1b" not in text, "an escape sequence of the guest's reaches the terminal"
            assert len(text) < 2000
        return type(error).__name__
    except DeadlineExceeded:
        return "DeadlineExceeded"
    except RingfenceError as error:
        return type(error).__name__
    finally:
        if sandbox is not None:
            await sandbox.destroy()


# Lies that no host can see through: an agent that says nothing wrong but does nothing, or an exit code.
HARMLESS = {"never", "credit-flood", "events", "escapes", "close-early", "exit-lie"}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_costs_the_link_only(
    lie: str, node: Node, attack_state: Path, evil_program: Path
) -> None:
    honest = await node.create(request_for(WALL))
    liars = await Node.open(attack_state)
    try:
        (await liars.context()).agent = str(evil_program)
        before = resident()
        try:
            outcome = await asyncio.wait_for(ask(liars, lie), SILENCE if lie in HARMLESS else PATIENCE)
        except TimeoutError:
            outcome = "nothing"
        assert resident() - before < GROWTH
        if lie not in HARMLESS:
            assert outcome in (
                "LinkLost",
                "ProtocolViolation",
                "GuestRefused",
                "DeadlineExceeded",
                "StartFailed",
            )
        # The process that talked to the liar goes on, and so does everybody else's sandbox.
        link = await honest.link()
        process = await link.start(ProcessSpec(("echo", "on")))
        assert [piece.data async for piece in process] == [b"on\n"]
    finally:
        await liars.close()


async def test_the_control_is_an_agent_that_tells_the_truth(node: Node) -> None:
    assert await ask(node, "none", PATIENCE) == "exit:0"
