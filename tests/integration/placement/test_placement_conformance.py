"""The shipped suite on the placements of this repository."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from ringfence.conformance.suites.placements import SMALL, PlacementSuite
from ringfence.model.policy import Isolation
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


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("runsc") is None, reason="gVisor is not here, or not for this user"
)
class TestLocalGvisor(TestLocal):
    """Another wall behind the same calls: a kernel of its own, snapshots with memory."""

    wall = replace(SMALL, isolation=Isolation(runtime="gvisor"))


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
