"""Rules that change meanwhile, floods, and questions: one sandbox beside the others, against real servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence.egress.door import DoorSpec, ProjectLimits
from ringfence.egress.names import Address
from ringfence.egress.policy import Decision
from support.doors import LOCAL, LocalDoor, Names, Origin, TestAuthority, local_door


@pytest.fixture(autouse=True)
def _resolves(names: Names) -> None:
    names.add("api.example.test", "127.0.0.1")


def rule(origin: Origin, **more: Any) -> dict[str, Any]:
    return {"host": "api.example.test", "ports": [origin.port], "addresses": LOCAL} | more


async def until(condition: Any) -> Any:
    async with asyncio.timeout(60):
        while not (found := condition()):
            await asyncio.sleep(0.01)
    return found


async def test_patterns_and_targets_that_take_for_ever_stop_nobody(
    folder: Path, names: Names, plain: Origin
) -> None:
    network = {"allow": [rule(plain)], "record": "headers", "redact": ["(a|aa)+$", "CUST-\\d+"]}
    async with local_door(folder, network, names) as door:
        url = f"http://api.example.test:{plain.port}"
        for target in ("/CUST-7", "/" + "a" * 100 + "!", "/x" + "?key" * 7000):
            assert " 200 " in (await door.curl(url + target))[1]
        await door.idle()
        first, second, third = door.engine.records.log("sb-test").read()
    assert first["url"].endswith("/[redacted]") and second["url"] == "[redacted]"
    assert first["sandbox"] == third["sandbox"] == "sb-test"


async def test_what_another_project_calls_a_secret_is_none_here(
    folder: Path, names: Names, plain: Origin
) -> None:
    async with local_door(folder, {"allow": [rule(plain)]}, names, project="ours") as door:
        theirs = await LocalDoor(
            door.engine, DoorSpec("sb-theirs", project="theirs", network=dict(door.door.spec.network))
        ).start()
        words = ["api.example.test", "sb-theirs", "allowed"]
        door.engine.redactors.of("theirs").learn(words)
        try:
            for each in (door, theirs):
                assert " 200 " in (await each.curl(f"http://api.example.test:{plain.port}/"))[1]
                await each.idle()
            ours, other = door.log()
            assert ours["host"] == "api.example.test"
            assert (other["host"], other["sandbox"], other["decision"]) == (
                "[redacted]",
                "sb-theirs",
                "allowed",
            )
        finally:
            await put_away(theirs)


async def put_away(door: LocalDoor) -> None:
    """End a second door of an engine, which stays."""
    await door.door.close()
    for task in list(door._tasks):
        task.cancel()
    await asyncio.gather(*door._tasks, return_exceptions=True)
    for listener in door._listeners:
        listener.close()


async def test_whose_connections_fail_takes_a_destination_from_nobody_else(
    folder: Path, names: Names, plain: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringfence.egress.upstream._REST", (600.0, 600.0))
    url = f"http://api.example.test:{plain.port}/"
    async with local_door(folder, {"allow": [rule(plain)]}, names, project="ours") as door:
        # A policy with little patience: for it nothing ever answers.
        monkeypatch.setattr(door.engine.upstreams, "_connect", never(door.engine.upstreams._connect, 0.001))
        network = dict(door.door.spec.network) | {"connectTimeout": "1s"}
        theirs = await LocalDoor(door.engine, DoorSpec("sb-2", project="theirs", network=network)).start()
        try:
            theirs.door.network = replace(theirs.door.network, connect_timeout=0.001)
            for _ in range(5):
                assert " 504 " in (await theirs.curl(url))[1]
            assert "circuit_open" in (await theirs.curl(url))[1]
            assert " 200 " in (await door.curl(url))[1]
        finally:
            await put_away(theirs)


def never(connect: Any, least: float) -> Any:
    """Connecting takes longer than ``least`` seconds, as it does to a host that is far away."""

    async def slow(*arguments: Any) -> Any:
        await asyncio.sleep(least * 50)
        return await connect(*arguments)

    return slow


class Gate(Names):
    """A resolver that waits."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()

    async def resolve(self, name: str) -> list[Address]:
        self.asked.append(name)
        await self.open.wait()
        return await super().resolve(name)


@pytest.mark.parametrize("stays", [True, False])
async def test_rules_that_change_while_a_name_is_asked_for(folder: Path, plain: Origin, stays: bool) -> None:
    gate = Gate()
    gate.add("api.example.test", "127.0.0.1")
    async with local_door(folder, {"allow": [rule(plain)]}, gate) as door:
        request = asyncio.ensure_future(door.curl(f"http://api.example.test:{plain.port}/"))
        await until(lambda: gate.asked)
        other = {"host": "other.example.test"}
        door.door.update({"mode": "egress", "allow": [other, rule(plain)] if stays else [other]})
        gate.open.set()
        _, out, _ = await request
        assert (" 200 " in out, len(plain.requests)) == ((True, 1) if stays else (False, 0))


async def test_an_update_takes_the_inference_away(
    folder: Path, names: Names, secure: Origin, authority: TestAuthority
) -> None:
    secure.response = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nbegun"  # and it stays at that
    inference = {"upstream": f"https://api.example.test:{secure.port}/v1", "addresses": LOCAL}
    async with local_door(folder, {"inference": inference}, names, authority.file) as door:
        request = asyncio.ensure_future(
            door.raw(b"GET http://inference/x HTTP/1.1\r\nHost: inference\r\n\r\n")
        )
        await until(lambda: any(flow.received for flow in door.door.flows))
        assert door.door.update({"mode": "egress", "inference": inference}) == 0
        assert door.door.update({"mode": "egress"}) == 1
        assert (await request).endswith(b"begun")
        await door.idle()
        assert door.log()[-1]["decision"] == "denied"


async def test_limits_reach_what_is_open(folder: Path, names: Names) -> None:
    gone = asyncio.Event()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(100):
                writer.write(data)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        gone.set()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    rules = [{"host": "127.0.0.1", "ports": [port], "protocol": "tcp"}]
    async with server, local_door(folder, {"allow": rules}, names, project="p") as door:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.ports["http"])
        writer.write(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"a")
        async with asyncio.timeout(60):
            assert await reader.readexactly(1) == b"a"
        assert not door.engine._buckets
        door.door.limit(None, ProjectLimits(bandwidth=80_000_000))
        writer.write(b"bcd")
        async with asyncio.timeout(60):
            assert await reader.readexactly(3) == b"bcd"
        assert set(door.engine._buckets) == {("project/p", "out"), ("project/p", "in")}
        bucket = door.engine._buckets["project/p", "out"]
        door.door.limit(None, ProjectLimits(bandwidth=8_000_000))
        assert door.engine.bucket_out(door.door) is bucket and bucket.rate == 1_000_000
        writer.close()
        async with asyncio.timeout(60):
            await gone.wait()


async def test_a_yes_is_to_what_was_asked(
    folder: Path, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who says yes to a connection for HTTP and TLS has not said it to bytes of another protocol."""
    async with local_door(folder, {"onUnknown": "ask", "askTimeout": "60s"}, names) as door:
        host, no = door.door.host("api.example.test"), Decision(False, "no_rule", None, "no", unknown=True)
        questions = door.engine.questions
        asks = [
            asyncio.ensure_future(questions.ask(door.door, host, 443, protocol, "", "", no))
            for protocol in (None, "tcp", None)
        ]
        await until(lambda: len(questions.pending()) == 2)
        first, second = questions.pending()
        assert "protocol" not in first and second["protocol"] == "tcp"
        questions.answer(first["id"], True)
        questions.answer(second["id"], False)
        plain, raw, again = await asyncio.gather(*asks)
        assert plain.allowed and again.allowed and not raw.allowed
        assert plain.rule is not None and plain.rule.protocol is None


async def test_long_paths_fill_neither_questions_nor_the_log(
    folder: Path, names: Names, plain: Origin
) -> None:
    path = "/" + "x" * 30_000
    asking = {"allow": [rule(plain, methods=["GET"])], "onUnknown": "ask", "askTimeout": "60s"}
    async with local_door(folder, asking, names) as door:
        url = f"http://api.example.test:{plain.port}{path}"
        assert " 200 " in (await door.curl(url))[1]
        request = asyncio.ensure_future(door.curl("-X", "PUT", url))
        (question,) = await until(door.engine.questions.pending)
        assert len(json.dumps(question)) < 3000 and question["path"] == path[:2000]
        door.engine.questions.answer(question["id"], False)
        assert " 403 " in (await request)[1]
        await door.idle()
        passed, refused = door.log()
        for line in (passed, refused):
            assert (line["path"], line["path_cut"]) == (path[:2000], len(path))


async def test_a_flood_of_what_may_leaves_the_log_to_others(
    folder: Path, names: Names, plain: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringfence.egress.log._BYTES", (2000.0, 0.0))
    async with local_door(folder, {"allow": [rule(plain)]}, names) as door:
        where = f"api.example.test:{plain.port}"
        request = f"GET http://{where}/ HTTP/1.1\r\nHost: {where}\r\n\r\n"
        got = await door.raw(request.encode() * 50, eof=True)
        assert got.count(b"HTTP/1.1 200") == 50
        await door.idle()
        written = len(door.log())
        assert 1 <= written < 20
        door.engine.closed(door.door, forget=False)
        last = door.log()[-1]
        assert last["left_out"] == 50 - written and last["left_out_bytes"][0] > 0
        used = door.engine.meter.used("sandbox/sb-test")
        assert used[0] == 50  # what is not written down is counted all the same


async def test_the_whole_of_a_request_has_its_time(folder: Path, names: Names) -> None:
    begun = ended = 0

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal begun, ended
        begun += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            if b"/whole" in head:
                writer.write(b"x" * 1_000_000)
            else:
                while not writer.is_closing():  # never idle, never done
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.05)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        ended += 1

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    rules = [{"host": "api.example.test", "ports": [port], "addresses": LOCAL}]
    async with server, local_door(folder, {"allow": rules, "totalTimeout": "90s"}, names) as door:
        url = f"http://api.example.test:{port}"
        assert (await door.curl(f"{url}/whole"))[0] == 0  # the control
        door.door.network = replace(door.door.network, total_timeout=1.0)
        code, out, _ = await door.curl(f"{url}/drip")
        assert code == 18 or " 504 " in out  # curl: it broke off, on a busy machine before it began
        await door.idle()
        whole, dripped = door.log()
        assert "error" not in whole and dripped["error"] == "timeout"
    await until(lambda: begun == ended)
