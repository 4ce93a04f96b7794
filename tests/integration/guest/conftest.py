"""One real agent a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from ringfence.guest.link import GuestLink
from support.agents import BareAgent, bare_agent


@pytest.fixture
def agent() -> Iterator[BareAgent]:
    with bare_agent() as running:
        yield running


@pytest.fixture
async def link(agent: BareAgent) -> AsyncIterator[GuestLink]:
    async with await agent.link() as opened:
        yield opened
