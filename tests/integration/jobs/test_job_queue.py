"""Who is next, and what waits without an attempt: an orchestrator on a node of the test's own."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence.control.jobs import CANCELLED, FINAL, KIND, RUNNING, Job, JobSpec
from ringfence.control.jobs_running import _TakenOver
from ringfence.control.principals import Principal
from ringfence.control.quotas import Quotas
from ringfence.control.service import Control
from ringfence.model.errors import NotFound, QuotaExceeded, Unsupported
from ringfence.store.contract import Put, Row
from support.postgres import postgres
from support.services import ALICE, MALLORY, NodeProcess, clear, control_on, node_process, small

__all__ = ["postgres"]


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    home = Path(tempfile.mkdtemp(prefix="rf-job-"))
    try:
        with node_process(home) as running:
            yield running
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
async def control(node: NodeProcess, tmp_path: Path) -> AsyncIterator[Control]:
    async with control_on(node, str(tmp_path / "store.db"), files=tmp_path / "jobs") as running:
        yield running
    await clear(node)


def spec(*argv: str, **more: Any) -> JobSpec:
    return JobSpec(argv or ("true",), policy=small(), **more)


async def ended(control: Control, principal: Principal, job: Job) -> Job:
    async with asyncio.timeout(120):
        while True:
            found = await control.jobs.get(principal, job.id)
            if found.state in FINAL:
                return found
            await asyncio.sleep(0.05)


async def test_projects_take_turns_and_priority_counts_in_a_project(control: Control) -> None:
    control.runner.at_once = 0  # until all have come
    flood = [await control.jobs.submit(ALICE, spec()) for _ in range(4)]
    urgent = await control.jobs.submit(ALICE, spec(priority=5))
    other = [await control.jobs.submit(MALLORY, spec()) for _ in range(2)]
    control.runner.at_once = 1
    control.jobs.urge()
    done = [await ended(control, ALICE, job) for job in (*flood, urgent)]
    done += [await ended(control, MALLORY, job) for job in other]
    assert all(job.state == "succeeded" for job in done)
    order = [job.id for job in sorted(done, key=lambda job: job.attempts[0]["started_at"])]
    assert order[0] == urgent.id  # before the older ones of its project
    assert {order[1], order[3]} == {job.id for job in other}  # in turn, though they came last
    assert order[4:] == [job.id for job in flood[1:]]  # then by age


async def test_what_finds_no_room_waits_and_costs_no_attempt(control: Control) -> None:
    quotas = Quotas(control.store)
    await quotas.set("default", {"alive": 1})
    control.core.admission = quotas
    held = await control.jobs.submit(ALICE, spec("sh", "-c", "until [ -e go ]; do sleep 0.05; done"))
    async with asyncio.timeout(120):
        while not (await quotas.usage("default")).alive:  # it has the place
            await asyncio.sleep(0.05)
        waiting = await control.jobs.submit(ALICE, spec())
        while not [e for e in await control.store.events(subject=waiting.id) if e.name == "job.waiting"]:
            await asyncio.sleep(0.05)
    found = await control.jobs.get(ALICE, waiting.id)
    assert found.state in ("queued", "running") and len(found.attempts) <= 1
    await control.jobs.cancel(ALICE, held.id)
    await ended(control, ALICE, held)
    found = await ended(control, ALICE, waiting)
    assert found.state == "succeeded" and len(found.attempts) == 1
    await quotas.close()


async def test_outputs_that_find_no_room_fail_the_job(control: Control) -> None:
    quotas = Quotas(control.store)
    control.core.admission = quotas
    await quotas.set("default", {"storage": 33 * 1024 * 1024})  # its sandbox's disk, and little more
    job = await control.jobs.submit(
        ALICE, spec("sh", "-c", "head -c 5000000 /dev/zero > out", outputs=("out",))
    )
    found = await ended(control, ALICE, job)
    assert found.state == "failed"
    told = found.as_dict()
    assert (
        told["cause"] == "outputs" and told["artifacts"] == [] and told["error"]["code"] == "quota_exceeded"
    )
    await quotas.set("default", {"storage": 10**9})
    kept = await ended(control, ALICE, await control.jobs.retry(ALICE, job.id))
    assert kept.state == "succeeded" and kept.as_dict()["artifacts"][0]["size"] == 5_000_000
    before = (await quotas.usage("default")).storage
    await control.jobs.remove(ALICE, job.id)
    assert before - (await quotas.usage("default")).storage >= 5_000_000
    await quotas.close()


async def test_what_waits_is_counted_with_what_it_brings(control: Control) -> None:
    control.runner.at_once = 0
    quotas = Quotas(control.store)
    control.core.admission = quotas
    await quotas.set("default", {"storage": 5_000_000})
    brought = {"data": bytes(2_000_000)}
    waiting = [await control.jobs.submit(ALICE, spec(files=brought)) for _ in range(2)]
    with pytest.raises(QuotaExceeded):
        await control.jobs.submit(ALICE, spec(files=brought))
    assert control.jobs.files is not None
    assert sorted(control.jobs.files.jobs()) == sorted(job.id for job in waiting), "nothing of it is left"
    for job in waiting:
        await control.jobs.cancel(ALICE, job.id)
        await control.jobs.remove(ALICE, job.id)
    assert (await quotas.usage("default")).storage == 0
    await quotas.close()


async def test_it_is_forgotten_when_its_time_is_over(control: Control, tmp_path: Path) -> None:
    job = await control.jobs.submit(ALICE, spec("echo", "x", ttl=0.2, files={"f": b"data"}))
    async with asyncio.timeout(120):
        while True:
            try:
                await control.jobs.get(ALICE, job.id)
            except NotFound:
                break
            await asyncio.sleep(0.05)
        while list((tmp_path / "jobs").glob("job-*")):
            await asyncio.sleep(0.05)


async def test_without_a_folder_there_are_no_jobs(node: NodeProcess, tmp_path: Path) -> None:
    async with control_on(node, str(tmp_path / "store.db")) as control:
        with pytest.raises(Unsupported):
            await control.jobs.submit(ALICE, spec())


async def test_two_processes_on_postgresql_share_the_queue(
    node: NodeProcess, tmp_path: Path, postgres: Any
) -> None:
    """Each job runs once, whoever takes it; one process ends in the middle and the other goes on."""
    url = postgres.fresh()
    folder = tmp_path / "jobs"
    slow = ("sh", "-c", "echo start; sleep 0.3; echo end")
    async with control_on(node, url, owner="api-1", files=folder) as one:
        async with control_on(node, url, owner="api-2", files=folder) as two:
            jobs = [await control.jobs.submit(ALICE, spec(*slow)) for control in (one, two) for _ in range(5)]
            one.runner.at_once = two.runner.at_once = 3
            async with asyncio.timeout(120):
                while not (await one.jobs.get(ALICE, jobs[0].id)).attempts:
                    await asyncio.sleep(0.02)
        for job in jobs:
            found = await ended(one, ALICE, job)
            assert found.state == "succeeded" and len(found.attempts) == 1, found.as_dict()
            text = b"".join([piece async for piece in one.jobs.logs(ALICE, job.id)])
            assert text == b"start\nend\n"
    await clear(node)


async def test_one_that_was_thought_dead_lets_go(node: NodeProcess, tmp_path: Path) -> None:
    """Its heartbeat came too late: another takes the job, and its log has everything once."""
    url, folder = str(tmp_path / "store.db"), tmp_path / "jobs"
    command = ("sh", "-c", "echo start; until [ -e go ]; do sleep 0.05; done; echo end")
    async with (
        control_on(node, url, owner="api-1", files=folder) as one,
        control_on(node, url, owner="api-2", files=folder) as two,
    ):
        two.runner.at_once = 0
        job = await one.jobs.submit(ALICE, spec(*command))
        async with asyncio.timeout(120):
            while b"start" not in b"".join([piece async for piece in one.jobs.logs(ALICE, job.id)]):
                await asyncio.sleep(0.05)
            row = (await one.jobs.get(ALICE, job.id)).row
            await two.runner._take(row, adopt=True)
            while job.id in one.runner._running:
                await asyncio.sleep(0.05)
        link = await two.link(ALICE, row.document["attempts"][0]["sandbox"])
        await link.files.write("go", b"")
        found = await ended(two, ALICE, job)
        assert found.state == "succeeded" and len(found.attempts) == 1, found.as_dict()
        assert b"".join([piece async for piece in two.jobs.logs(ALICE, job.id)]) == b"start\nend\n"
    await clear(node)


async def taken(control: Control, **document: Any) -> Row:
    """A job in the middle of its first attempt, which nobody makes."""
    store, jobs = control.core.store, control.jobs
    control.runner.at_once = 0
    job = await jobs.submit(ALICE, spec())
    row = await store.get(KIND, job.id)
    attempt = {"number": 1, "started_at": control.core.now(), "sandbox": ""}
    more = {"attempts": [attempt], "left": int(row.document["left"]) - 1, "actor": control.core.token()}
    found = {**row.document, **more, **document}
    (mine,) = await control.core.commit(Put(replace(row, state=RUNNING, due=None, document=found)))
    return mine


async def test_one_that_is_cancelled_before_it_goes_back_to_the_queue_is_cancelled(control: Control) -> None:
    row = await taken(control, cancel=True)
    await control.runner._wait(row, 2.0)
    found = await control.jobs.get(ALICE, row.id)
    assert (found.state, found.attempts) == (CANCELLED, [])


async def test_who_was_thought_dead_puts_nothing_back_into_the_queue(control: Control) -> None:
    row = await taken(control)
    theirs = {**row.document, "actor": control.core.token()}
    await control.core.commit(Put(replace(row, document=theirs)))
    with pytest.raises(_TakenOver):
        await control.runner._wait(row, 2.0)
    assert (await control.core.store.get(KIND, row.id)).document == theirs


async def test_a_retry_waits_until_the_attempt_before_is_cleared_away(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    clear, destroy = asyncio.Event(), control.runner._destroy

    async def slowly(*arguments: Any) -> None:
        await clear.wait()
        await destroy(*arguments)

    monkeypatch.setattr(control.runner, "_destroy", slowly)
    job = await control.jobs.submit(ALICE, spec("false"))
    assert (await ended(control, ALICE, job)).state == "failed"
    await control.jobs.retry(ALICE, job.id)
    await asyncio.sleep(1.5)
    assert (await control.jobs.get(ALICE, job.id)).state == "queued"
    clear.set()
    found = await ended(control, ALICE, job)
    assert (found.state, len(found.attempts)) == ("failed", 2)
    names = [event.name for event in await control.core.store.events(limit=1000)]
    assert "job.adopted" not in names


async def test_who_follows_misses_no_attempts_last_words(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringfence.control.jobs._FOLLOW", 3.0)  # an attempt ends and the next begins in one
    script = "echo one; sleep 0.5; echo two; exit 3"
    job = await control.jobs.submit(ALICE, spec("sh", "-c", script, retries=1, backoff=0.0))
    async with asyncio.timeout(90):
        said = b"".join([piece async for piece in control.jobs.logs(ALICE, job.id, follow=True)])
    assert said == b"one\ntwo\n" * 2
