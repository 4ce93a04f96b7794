"""Connections that break in the middle cost no byte and double none."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ringfence import AsyncSandbox, AsyncService
from ringfence.model.errors import LinkLost
from ringfence.sdk.failures import ServiceUnreachable
from support.cutting import Relay, relay
from support.sdk_halves import SMALL
from support.serving import Serving

LINES = b"".join(b"%08d\n" % number for number in range(200_000))
GO = "while [ ! -e go ]; do sleep 0.05; done"  # a command that waits for the test, however slow that is


@pytest.fixture
async def cutting(service: Serving) -> AsyncIterator[Relay]:
    async with relay(service.url) as made:
        yield made


@pytest.fixture
async def box(service: Serving, cutting: Relay) -> AsyncIterator[AsyncSandbox]:
    """A sandbox reached over connections that the test can cut."""
    async with AsyncService(cutting.url, service.key) as through:
        box = await AsyncSandbox.create(**SMALL, service=through)
        yield box
        cutting.refusing, cutting.cuts = False, 0
        await box.kill()


async def test_output_goes_on_where_it_was(box: AsyncSandbox, cutting: Relay) -> None:
    cutting.after, cutting.cuts = 150_000, 6
    process = await box.start("seq -f %08.0f 0 199999")
    seen, at = bytearray(), 0
    async for piece in process:
        assert piece.offset == at
        at += len(piece.data)
        seen += piece.data
    result = await process.wait()
    assert cutting.done == 6  # the control: it was cut, every time
    assert seen == LINES
    assert (result.lost, result.exit_code) == (0, 0)


async def test_a_whole_run_is_not_begun_twice(box: AsyncSandbox, cutting: Relay) -> None:
    running = asyncio.ensure_future(box.run(f"echo begun >> log; {GO}; echo done"))
    while b"begun" not in (await box.run("cat log 2>/dev/null; :")).stdout_bytes:
        await asyncio.sleep(0.02)
    assert cutting.cut() > 0
    await box.files.write("go", "")
    assert (await running).stdout == "done\n"
    assert (await box.run("cat log")).stdout == "begun\n"


async def test_input_goes_on_where_it_was(box: AsyncSandbox, cutting: Relay) -> None:
    data = os.urandom(3 * 1024 * 1024)
    process = await box.start("sha256sum", stdin=True)
    for at in range(0, len(data), 500_000):
        await process.write(data[at : at + 500_000])
        cutting.cut()
    await process.close_stdin()
    assert (await process.wait()).stdout.split()[0] == hashlib.sha256(data).hexdigest()


async def test_code_goes_on_where_it_was(box: AsyncSandbox, cutting: Relay) -> None:
    said: list[str] = []

    def cut_at_ten(text: str) -> None:
        said.append(text)
        if "10\n" in text:
            cutting.cut()

    code = "import time\nfor n in range(40): print(n, flush=True); time.sleep(0.01)\nn"
    result = await box.run_code(code, on_stdout=cut_at_ten)
    assert "".join(said) == "".join(f"{number}\n" for number in range(40))
    assert result.text == "39"


async def test_downloads_go_on_where_they_were(box: AsyncSandbox, cutting: Relay, tmp_path: Path) -> None:
    data = os.urandom(4 * 1024 * 1024)
    await box.files.write("big", data)
    cutting.after, cutting.cuts = 600_000, 4
    assert await box.files.download("big", tmp_path / "big") == len(data)
    assert cutting.done == 4
    assert (tmp_path / "big").read_bytes() == data


async def test_a_download_that_is_damaged_on_the_way_is_none(
    box: AsyncSandbox, cutting: Relay, tmp_path: Path
) -> None:
    await box.files.write("big", b"marked " * 200_000)
    cutting.spoil = (b"marked", b"spoilt")
    with pytest.raises(LinkLost, match="digest"):
        await box.files.download("big", tmp_path / "big")
    assert cutting.spoil is None and list(tmp_path.iterdir()) == []
    assert await box.files.download("big", tmp_path / "big") == 1_400_000  # the control
    assert (tmp_path / "big").read_bytes() == b"marked " * 200_000


async def test_a_file_that_grows_meanwhile_can_be_downloaded(box: AsyncSandbox, tmp_path: Path) -> None:
    growing = await box.start("while echo more; do :; done > log", stdin=False)
    async with asyncio.timeout(60):
        while not await box.files.exists("log") or not (await box.files.stat("log")).size:
            await asyncio.sleep(0.02)
    size = await box.files.download("log", tmp_path / "log")
    await growing.kill()
    assert (tmp_path / "log").read_bytes() == (b"more\n" * size)[:size]


async def test_uploads_are_sent_again(box: AsyncSandbox, cutting: Relay, tmp_path: Path) -> None:
    place = tmp_path / "big"
    place.write_bytes(os.urandom(8 * 1024 * 1024))
    uploading = asyncio.ensure_future(box.files.upload(place, "big"))
    await asyncio.sleep(0)
    cutting.cut()
    await uploading
    assert await box.files.digest("big") == hashlib.sha256(place.read_bytes()).hexdigest()


async def test_a_create_that_is_repeated_makes_one(service: Serving, cutting: Relay) -> None:
    async with AsyncService(cutting.url, service.key) as through:
        creating = asyncio.ensure_future(
            _created(through, labels={"once": "yes"}),
        )
        while not creating.done():
            cutting.cut()
            await asyncio.sleep(0.05)
            if cutting.done > 40:
                break
            cutting.done += 1
        box = await creating
        found = [info.id async for info in AsyncSandbox.list(labels={"once": "yes"}, service=through)]
        assert found == [box.id]
        await box.kill()


async def _created(service: AsyncService, **options: object) -> AsyncSandbox:
    return await AsyncSandbox.create(**SMALL, **options, service=service)  # type: ignore[arg-type]


async def test_a_service_that_stays_away_is_an_error_and_no_end(service: Serving, cutting: Relay) -> None:
    from ringfence.sdk.settings import Settings

    async with AsyncService(settings=Settings(cutting.url, service.key, retry_for=2.0)) as through:
        box = await AsyncSandbox.create(**SMALL, service=through)
        process = await box.start(f"echo here; {GO}; echo there")
        async for piece in process:
            assert piece.data == b"here\n"
            break
        cutting.refusing = True
        cutting.cut()
        with pytest.raises(ServiceUnreachable, match="does not answer"):
            await process.wait()
        cutting.refusing = False
        await box.files.write("go", "")
        assert (await process.wait()).stdout == "there\n"
        await box.kill()


async def test_an_api_that_is_killed_is_found_again(box: AsyncSandbox, service: Serving) -> None:
    import signal

    process = await box.start("for n in $(seq 1 60); do echo $n; sleep 0.05; done")
    seen = b""
    async for piece in process:
        seen += piece.data
        if seen == b"1\n2\n3\n":
            for pid in service.children()["api"]:
                os.kill(pid, signal.SIGKILL)
    assert seen.split() == [b"%d" % number for number in range(1, 61)]
    assert (await process.wait()).exit_code == 0
