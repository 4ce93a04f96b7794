"""Faults: what the node makes of a driver that misbehaves. Only the fake can be told to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ringfence.conformance.harness import Kit, RuntimeSuite, nothing_left, request_for
from ringfence.conformance.plugin import only
from ringfence.guest.processes import Output, ProcessSpec
from ringfence.model.errors import HostLimit, LinkLost, ProtocolViolation, RingfenceError, StartFailed
from ringfence.model.levels import Cause
from ringfence.node.service import Node

FAULTS = "RINGFENCE_FAKE_FAULTS"


@only("fake")
class FaultSuite(RuntimeSuite):
    """Scripted faults, seen through the node: the right error, and nothing left behind."""

    @asynccontextmanager
    async def _faulty(
        self, state: Path, monkeypatch: pytest.MonkeyPatch, **faults: object
    ) -> AsyncIterator[Kit]:
        """A node whose fake has these faults."""
        monkeypatch.setenv(FAULTS, json.dumps(faults))
        node = await Node.open(state)
        made = Kit(state, node, await node.runtime("fake"))
        try:
            yield made
        finally:
            await made.close()
            await node.close()
            await nothing_left(state, {*made.ids, node.state.owner})

    @pytest.mark.parametrize("step", ["listen", "spawn", "handle"])
    async def test_a_start_that_fails_leaves_nothing_and_the_next_works(
        self, ringfence_runtime: str, ringfence_state: Path, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        before = os.listdir(ringfence_state / "sandboxes") if (ringfence_state / "sandboxes").exists() else []
        async with self._faulty(ringfence_state, monkeypatch, start_error=step, start_works=1) as kit:
            await kit.sandbox()
            with pytest.raises(StartFailed) as caught:
                await kit.sandbox()
            assert caught.value.details["step"] == step
        assert sorted(os.listdir(ringfence_state / "sandboxes")) == sorted(before)

    async def test_a_slow_start_that_nobody_waits_for(
        self, ringfence_runtime: str, ringfence_state: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with self._faulty(ringfence_state, monkeypatch, start_delay=30) as kit:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await kit.node.create(request_for("fake"))
            assert kit.node.sandboxes() == []

    async def test_a_wall_that_dies_by_itself(
        self, ringfence_runtime: str, ringfence_state: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with self._faulty(ringfence_state, monkeypatch, die_after=0.3) as kit:
            sandbox = await kit.sandbox()
            result = await sandbox.run(ProcessSpec(("sleep", "60")))
            assert result.end.cause is Cause.RUNTIME_CRASH
            assert not result.end.reported
            with pytest.raises(LinkLost):
                await sandbox.new_link()

    async def test_links_that_break_lose_no_output(
        self, ringfence_runtime: str, ringfence_state: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with self._faulty(ringfence_state, monkeypatch, cut_after=150_000) as kit:
            sandbox = await kit.sandbox()
            seen = bytearray()

            def take(piece: Output) -> None:
                assert piece.offset == len(seen)
                seen.extend(piece.data)

            result = await sandbox.run(ProcessSpec(("/bin/sh", "-c", "seq 1 60000")), take)
            assert result.end.cause is Cause.EXITED
            assert bytes(seen) == b"".join(b"%d\n" % n for n in range(1, 60001))

    async def test_an_agent_that_can_not_be_reached(
        self, ringfence_runtime: str, ringfence_state: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with self._faulty(ringfence_state, monkeypatch, refuse_connect=1) as kit:
            sandbox = await kit.sandbox()
            with pytest.raises(LinkLost):
                await sandbox.new_link()
            link = await sandbox.new_link()  # and then it can
            await link.ping()
            await link.close()

    async def test_somebody_else_answers(
        self, ringfence_runtime: str, ringfence_state: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with self._faulty(ringfence_state, monkeypatch, garbage=True) as kit:
            sandbox = await kit.sandbox()
            with pytest.raises((ProtocolViolation, LinkLost)):
                await sandbox.new_link()

    async def test_a_destroy_that_fails_is_tried_again(
        self, ringfence_runtime: str, ringfence_state: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(FAULTS, json.dumps({"destroy_error": 1}))
        node = await Node.open(ringfence_state)
        sandbox = await node.create(request_for("fake"))
        with pytest.raises(HostLimit):
            await sandbox.destroy()
        with contextlib.suppress(RingfenceError):  # it says again what it could not do
            await node.close()
        monkeypatch.delenv(FAULTS)
        after = await Node.open(ringfence_state)  # whoever opens next finishes it
        await after.close()
        await nothing_left(ringfence_state, {sandbox.id})
