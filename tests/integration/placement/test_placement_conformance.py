"""The shipped suite on the placements of this repository."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest

from ringfence.conformance.suites.placements import PlacementSuite
from ringfence.placement.contract import Placement
from ringfence.placement.fake import FakePlacement, Fault, Faults, Faulty
from ringfence.placement.local import LocalPlacement


class TestLocal(PlacementSuite):
    volumes = os.geteuid() == 0

    @pytest.fixture
    async def placement(self, node: object) -> AsyncIterator[Placement]:
        made = LocalPlacement(node.socket)  # type: ignore[attr-defined]
        yield made
        assert await made.list() == []  # every test has destroyed what it started
        await made.close()


class TestFake(PlacementSuite):
    links = False

    @pytest.fixture
    async def placement(self) -> AsyncIterator[Placement]:
        made = FakePlacement()
        yield made
        assert await made.list() == []
        await made.close()


class TestFaultyIsTransparent(PlacementSuite):
    """Faults that never strike change nothing."""

    links = False

    @pytest.fixture
    async def placement(self) -> AsyncIterator[Placement]:
        made = Faulty(FakePlacement(), Faults([Fault("*", "refuse", times=0)]))
        yield made
        assert await made.list() == []
        await made.close()
