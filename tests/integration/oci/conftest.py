"""The bench of the launching tests, for the runtimes whose program builds the wall."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "launching"))

import wall_bench

from ringfence.runtimes.crun import CrunRuntime
from ringfence.runtimes.nsjail import NsjailRuntime
from ringfence.runtimes.runc import RuncRuntime

FOREIGN = {"runc": RuncRuntime, "crun": CrunRuntime, "nsjail": NsjailRuntime}
wall_bench.RUNTIMES |= FOREIGN


@pytest.fixture(params=list(FOREIGN))
async def foreign(request: pytest.FixtureRequest) -> AsyncIterator[wall_bench.Bench]:
    """A bench with each of them, as root."""
    async with wall_bench.bench(request.param) as made:
        if made.runtime.program is None:
            pytest.skip(f"{made.runtime.program_name} is not installed: {made.runtime.remedy}")
        yield made


@pytest.fixture(params=["runc", "crun"])
async def oci(request: pytest.FixtureRequest) -> AsyncIterator[wall_bench.Bench]:
    """A bench with each OCI runtime, as root."""
    async with wall_bench.bench(request.param) as made:
        if made.runtime.program is None:
            pytest.skip(f"{made.runtime.program_name} is not installed: {made.runtime.remedy}")
        yield made
