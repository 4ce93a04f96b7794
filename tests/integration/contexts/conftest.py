"""A sandbox of the test's own with contexts in it."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ringfence.guest.contexts import Contexts
from ringfence.guest.link import GuestLink
from ringfence.model.policy import MIB
from ringfence.node.sandboxes import NodeSandbox
from ringfence.node.service import Node
from ringfence.node.state import StateRoot
from ringfence.node.templates import HostTemplate
from support.leaks import Leaks
from support.nodes import ask


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The host template, made once: it takes a second."""
    state = StateRoot.open(tmp_path_factory.mktemp("template") / "state")
    HostTemplate(state).skeleton(1000)
    state.close()
    return state.templates


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest that stands still for seconds after an interrupt is not ended for it."""
    monkeypatch.setattr("ringfence.guest.contexts.calls.PATIENCE", 60.0)


@pytest.fixture
async def sandbox(no_leaks: Leaks, template: Path) -> AsyncIterator[NodeSandbox]:
    """A running jail."""
    subprocess.run(["cp", "-al", str(template), f"{no_leaks.home}/templates"], check=True)
    node = await Node.open()
    try:
        yield await node.create(ask(memory=1024 * MIB, timeout=600))
    finally:
        await node.close()


@pytest.fixture
async def link(sandbox: NodeSandbox) -> AsyncIterator[GuestLink]:
    """A link of the test's own."""
    async with await sandbox.new_link() as link:
        yield link


@pytest.fixture
def contexts(link: GuestLink) -> Contexts:
    """Its contexts."""
    return Contexts(link)
