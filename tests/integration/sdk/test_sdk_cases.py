"""One table of cases for both halves of the SDK, against a real service with real sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from ringfence.model.errors import (
    Conflict,
    DeadlineExceeded,
    GuestRefused,
    InvalidRequest,
    NotFound,
    PolicyError,
    WrongState,
)
from ringfence.sdk import CommandFailed, Policy
from support.sdk_halves import SMALL, Half

MIB = 1024 * 1024


async def commands(sdk: Half) -> None:
    async with sdk.Sandbox.create(**SMALL, env={"WHO": "world"}) as box:
        result = await box.run("echo hello $WHO; echo oops >&2; exit 3")
        assert (result.exit_code, result.cause, result.stdout, result.stderr) == (
            3,
            "exited",
            "hello world\n",
            "oops\n",
        )
        assert not result.ok
        with pytest.raises(CommandFailed, match="oops") as failed:
            result.check()
        assert failed.value.details["exit_code"] == 3
        with pytest.raises(CommandFailed):
            await box.run("false", check=True)
        assert (await box.run(["printf", "%s|", "a b", "$WHO"])).stdout == "a b|$WHO|"
        assert (await box.run("pwd; echo $X", cwd="/tmp", env={"X": "y"})).stdout == "/tmp\ny\n"
        assert (await box.run("cat", stdin="zäh")).stdout == "zäh"
        raw = bytes(range(256))
        assert (await box.run("cat", stdin=raw)).stdout_bytes == raw
        assert (await box.run("cat")).stdout == ""  # without input there is none to wait for
        killed = await box.run("sleep 600 & wait", timeout=0.3)
        assert (killed.cause, killed.timed_out) == ("deadline", True)
        with pytest.raises(GuestRefused) as refused:
            await box.run(["/no/such/program"])
        assert refused.value.errno == errno.ENOENT
        with pytest.raises(InvalidRequest):
            await box.run([])


async def output_as_it_comes(sdk: Half) -> None:
    async with sdk.Sandbox.create(**SMALL) as box:
        out: list[bytes] = []
        err: list[bytes] = []
        result = await box.run("echo 1; echo 2 >&2; echo 3", on_stdout=out.append, on_stderr=err.append)
        assert (b"".join(out), b"".join(err)) == (b"1\n3\n", b"2\n")
        assert (result.stdout, result.stderr) == ("1\n3\n", "2\n")

        def fail(_: bytes) -> None:
            raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            await box.run("echo x", on_stdout=fail)
        assert (await box.run("echo alive")).stdout == "alive\n"


async def large_streams(sdk: Half) -> None:
    async with sdk.Sandbox.create(**SMALL | {"memory": "256MiB"}) as box:
        seen = hashlib.sha256()
        wanted = hashlib.sha256(b"".join(b"%08d\n" % n for n in range(700_000)))
        result = await box.run("seq -f %08.0f 0 699999", on_stdout=seen.update)
        assert (seen.hexdigest(), result.lost, result.exit_code) == (wanted.hexdigest(), 0, 0)
        data = os.urandom(2 * MIB)
        echoed = bytearray()
        await box.run("cat", stdin=data, on_stdout=echoed.extend)
        assert echoed == data


async def processes(sdk: Half) -> None:
    async with sdk.Sandbox.create(**SMALL) as box:
        process = await box.start("while read line; do echo got $line; done; exit 5", stdin=True)
        await process.write("one\n")
        await process.write(b"two\n")
        await process.close_stdin()
        await process.close_stdin()
        pieces = [piece async for piece in process]
        assert b"".join(piece.data for piece in pieces) == b"got one\ngot two\n"
        assert {piece.stream for piece in pieces} == {"stdout"}
        assert pieces[0].offset == 0
        assert (await process.wait()).exit_code == 5
        assert process.ended
        with pytest.raises(WrongState):
            await process.write("more")

        sleeper = await box.start("echo ready; sleep 600", id="sleeper")
        async for piece in sleeper:
            assert piece.text == "ready\n"
            break
        with pytest.raises(DeadlineExceeded):
            await sleeper.wait(timeout=0.1)
        known = {info.id: info for info in await box.processes()}
        assert known["sleeper"].state == "running"
        await sleeper.signal("TERM")
        ended = await sleeper.wait()
        assert (ended.exit_code, ended.cause) == (143, "killed")

        tree = await box.start("sleep 600 & sleep 600 & wait")
        await tree.kill()
        assert (await tree.wait()).cause == "killed"
        await tree.kill()  # no error: it has ended
        again = await box.attach("sleeper")
        assert [piece.data async for piece in again] == [b"ready\n"]
        later = await box.attach("sleeper", stdout=3)
        assert [(piece.offset, piece.data) async for piece in later] == [(3, b"dy\n")]
        with pytest.raises(GuestRefused):
            await box.attach("nobody")
        await again.remove()
        with pytest.raises(GuestRefused):
            await box.attach("sleeper")


async def terminals(sdk: Half) -> None:
    async with sdk.Sandbox.create(**SMALL) as box:
        process = await box.start("stty size; read x; stty size", pty=True, rows=33, columns=99)
        async for piece in process:
            assert piece.text.split() == ["33", "99"]
            break
        await process.resize(44, 88)
        await process.write("\n")
        rest = "".join([piece.text async for piece in process])
        assert rest.split() == ["44", "88"]


async def files(sdk: Half, tmp_path: Path) -> None:
    async with sdk.Sandbox.create(**SMALL, files={"a/seed.txt": "seed", "raw": b"\xff\x00"}) as box:
        found = box.files
        assert await found.read("a/seed.txt") == b"seed"
        assert await found.read("raw") == b"\xff\x00"
        info = await found.write("x/y/z.txt", "0123456789", mode=0o600)
        assert info.size == 10
        assert await found.read("x/y/z.txt", offset=2, length=3) == b"234"
        assert await found.read("x/y/z.txt", offset=8) == b"89"
        assert await found.read("x/y/z.txt", length=0) == b""
        await found.write("x/y/z.txt", b"ab", append=True)
        assert await found.read_text("x/y/z.txt") == "0123456789ab"
        with pytest.raises(GuestRefused) as taken:
            await found.write("x/y/z.txt", "", exclusive=True)
        assert taken.value.errno == errno.EEXIST
        told = await found.stat("x/y/z.txt")
        assert (told.type, told.size, told.mode, told.uid) == ("file", 12, 0o600, 1000)
        await found.mkdir("m/n")
        await found.move("x/y/z.txt", "m/n/moved")
        assert [each.path for each in await found.list("m", depth=2)] == ["n", "n/moved"]
        assert not await found.exists("x/y/z.txt")
        assert await found.exists("m/n/moved")
        await found.remove("m", recursive=True)
        await found.remove("m", recursive=True, missing_ok=True)
        with pytest.raises(GuestRefused) as gone:
            await found.read("m")
        assert gone.value.errno == errno.ENOENT

        big = tmp_path / "big"
        big.write_bytes(os.urandom(3 * MIB + 17))
        assert (await found.upload(big, "big")).size == 3 * MIB + 17
        assert await found.digest("big") == hashlib.sha256(big.read_bytes()).hexdigest()
        assert await found.download("big", tmp_path / "back") == 3 * MIB + 17
        assert (tmp_path / "back").read_bytes() == big.read_bytes()
        with pytest.raises(GuestRefused):
            await found.download("nothing", tmp_path / "nothing")
        assert sorted(each.name for each in tmp_path.iterdir()) == ["back", "big"]
        pieces = [piece async for piece in found.stream("big")]
        assert b"".join(pieces) == big.read_bytes()


async def folders(sdk: Half, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "file").write_text("content")
    (source / "tool").write_text("#!/bin/sh\necho ran\n")
    (source / "tool").chmod(0o755)
    (source / "link").symlink_to("tool")
    async with sdk.Sandbox.create(**SMALL) as box:
        assert await box.files.upload_folder(source, "here") >= 4
        assert (await box.run("here/link")).stdout == "ran\n"
        # What a hostile sandbox would want to come out as: a link that leads out, and a file through it.
        await box.run("ln -s /etc here/way-out; ln -s ../../../../etc/passwd here/deep/steal", check=True)
        assert await box.files.download_folder("here", tmp_path / "back") >= 2
        back = tmp_path / "back"
        assert (back / "deep" / "file").read_text() == "content"
        assert os.access(back / "tool", os.X_OK)
        assert not (back / "way-out").is_symlink()
        assert not (back / "deep" / "steal").is_symlink()
        with pytest.raises(InvalidRequest, match="there already"):
            await box.files.download_folder("here", back)
        with pytest.raises(InvalidRequest):
            await box.files.upload_folder(source / "tool", "there")


async def watching(sdk: Half) -> None:
    async with sdk.Sandbox.create(**SMALL) as box:
        events = box.files.watch(".")
        seen = []
        async for event in events:
            seen.append((event.kind, event.path))
            if event.kind == "watching":
                await box.files.write("fresh", "1")
            elif event.path == "fresh":
                break
        assert seen[0] == ("watching", "")
        await events.aclose()


async def signed_addresses(sdk: Half) -> None:
    import urllib.request

    async with sdk.Sandbox.create(**SMALL, files={"f": "by address"}) as box:
        address = await box.files.sign("f", seconds=60)

        def get(url: str) -> bytes:
            with urllib.request.urlopen(url) as answer:
                return bytes(answer.read())

        assert await asyncio.to_thread(get, address) == b"by address"


async def code(sdk: Half) -> None:
    async with sdk.Sandbox.create(**SMALL | {"memory": "256MiB"}) as box:
        assert (await box.run_code("x = 6\nprint('said')")).stdout == "said\n"
        assert (await box.run_code("x * 7")).text == "42"
        failed = await box.run_code("1/0")
        assert failed.error is not None
        assert (failed.ok, failed.error.name, failed.status) == (False, "ZeroDivisionError", "error")
        with pytest.raises(CommandFailed, match="ZeroDivisionError"):
            await box.run_code("1/0", check=True)
        said: list[str] = []
        shown: list[Any] = []
        await box.run_code("for i in range(3): print(i)\ni", on_stdout=said.append, on_result=shown.append)
        assert "".join(said) == "0\n1\n2\n"
        assert [each.text for each in shown] == ["2"]
        assert (await box.run_code("echo $((6 * 7))", language="bash")).stdout == "42\n"
        async with await box.contexts.create("python", cwd="/tmp", env={"A": "b"}) as other:
            assert (await other.run("import os; os.getcwd(), os.environ['A']")).text == "('/tmp', 'b')"
            assert (await other.run("'x' in dir()")).text == "False"  # each has variables of its own
            assert other.id in {info.id for info in await box.contexts.list()}
            await other.restart()
        assert other.id not in {info.id for info in await box.contexts.list()}
        await box.run_code("import time")  # before: an interrupt of an import may be printed and lost
        late = await box.run_code("time.sleep(600)", timeout=0.3)
        assert late.status == "timeout"
        assert (await box.run_code("x")).text == "6"  # and lives on
        with pytest.raises(InvalidRequest):
            await box.run_code("x", language="cobol")


async def ports(sdk: Half) -> None:
    async with sdk.Sandbox.create(**SMALL, files={"www/index.html": "<p>inside"}) as box:
        with pytest.raises(DeadlineExceeded):
            await box.wait_for_port(8000, timeout=0.3)
        server = await box.start("python3 -m http.server 8000 --directory www")
        await box.wait_for_port(8000)
        answer = await box.fetch(8000, "/index.html")
        assert (answer.status, answer.text) == (200, "<p>inside")
        assert (await box.fetch(8000, "/missing")).status == 404
        port = await box.port(8000, seconds=60)
        assert port.url.startswith(f"http://8000-{box.id}.")
        assert (await box.url(8000)) == port.url
        assert port.token in port.browser
        async with await box.tunnel(8000) as tunnel:
            reader, writer = await asyncio.open_connection(tunnel.host, tunnel.port)
            writer.write(b"GET /index.html HTTP/1.0\r\n\r\n")
            got = await reader.read()
            writer.close()
            await writer.wait_closed()
            assert got.endswith(b"<p>inside")
        async with await box.tunnel(9) as nowhere:
            reader, writer = await asyncio.open_connection(nowhere.host, nowhere.port)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
            assert isinstance(nowhere.failure, GuestRefused)
        with pytest.raises(InvalidRequest):
            await box.tunnel(70_000)
        await server.kill()


async def a_life(sdk: Half) -> None:
    async with sdk.Sandbox.create(**SMALL, name="first", labels={"case": sdk.name}) as box:
        assert box.state == "running"
        assert (await box.boundary())["runtime"] == "jail"
        infos = [
            info
            async for info in sdk.Sandbox.list(labels={"case": sdk.name, "name": "first"}, states=["running"])
        ]
        assert [info.id for info in infos] == [box.id]
        same = await sdk.Sandbox.connect(box.id)
        await same.files.write("kept", "1")
        await same.close()  # lets go; the sandbox lives
        assert await box.files.exists("kept")
        assert (await box.update(labels={"case": "other"})).labels == {"case": "other"}
        before = (await box.refresh()).deadline
        assert (await box.extend(3000)).deadline > before
        assert [(each.kind, each.path) for each in await box.changes()] == [("added", "/workspace/kept")]
        assert (await box.pause()).state == "paused"
        assert (await box.resume()).state == "running"
        saved = await box.snapshot(f"saved-{sdk.name}")
        assert saved.kind == "disk"
        async with sdk.Sandbox.create(snapshot=saved.id, **SMALL) as copy:
            assert await copy.files.read("kept") == b"1"
        forks = await box.fork(2)
        assert len({fork.id for fork in forks} | {box.id}) == 3
        for fork in forks:
            assert await fork.files.exists("kept")
            await fork.kill()
        assert (await box.reset()).id == box.id
        assert not await box.files.exists("kept")
        names = [entry.name async for entry in box.logs()]
        assert names[:2] == ["sandbox.created", "sandbox.running"]
        assert (await box.metrics())["usage"]["wall_seconds"] > 0
        await box.kill()
        await (await sdk.Snapshot.get(saved.id)).delete()
        with pytest.raises(NotFound):
            await sdk.Snapshot.get(saved.id)
    ended = await sdk.Sandbox.connect(box.id)
    assert ended.info.final
    assert (await ended.wait("stopped")).cause == "killed"
    with pytest.raises(WrongState):
        await ended.wait("running", timeout=5)
    await ended.kill()  # from any state
    with pytest.raises(NotFound):
        await sdk.Sandbox.connect("sb-00000000000000000000")


async def starts_that_are_not_waited_for(sdk: Half) -> None:
    box = await sdk.Sandbox.create(**SMALL, wait=False)
    assert (await box.wait(timeout=60)).state == "running"
    events = [entry.name async for entry in box.logs()]
    assert "sandbox.running" in events
    await box.kill()


async def creates_once(sdk: Half) -> None:
    key = f"once-{sdk.name}-{os.getpid()}"
    one = await sdk.Sandbox.create(**SMALL, idempotency_key=key)
    two = await sdk.Sandbox.create(**SMALL, idempotency_key=key)
    assert one.id == two.id
    with pytest.raises(Conflict):
        await sdk.Sandbox.create(**SMALL, idempotency_key=key, labels={"an": "other"})
    await one.kill()
    await two.close()


async def policies(sdk: Half) -> None:
    policy = Policy(process={"maxProcesses": 32}, resources={"memory": "128MiB", "disk": "32MiB"})
    async with sdk.Sandbox.create(policy=policy, runtime="jail", timeout=60) as box:
        assert (await box.run("ulimit -a >/dev/null; echo ok")).stdout == "ok\n"
        assert box.info.raw["policy"]["process"]["maxProcesses"] == 32
    with pytest.raises(PolicyError):
        Policy(resources={"memory": "nonsense"})
    with pytest.raises(InvalidRequest):
        await sdk.Sandbox.create(policy={"isolation": {"minimum": "L9"}})
    with pytest.raises(NotFound):
        await sdk.Sandbox.create(**SMALL, template="no-such-template")


async def other_objects(sdk: Half) -> None:
    name = f"pool-{sdk.name}"
    pool = await sdk.Pool.create(name, min=1, max=1, runtime="jail", memory="128MiB", disk="32MiB")
    assert pool.name == name
    async with sdk.Sandbox.create(pool=name) as box:
        assert (await box.run("echo pooled")).stdout == "pooled\n"
        assert box.info.pool == pool.id
    assert (await pool.queue()).waiting == 0
    assert name in [each.name async for each in sdk.Pool.list()]
    await pool.delete()
    with pytest.raises(NotFound):
        await sdk.Pool.get(name)
    assert "host" in [each.name async for each in sdk.Template.list()]
    assert (await sdk.Template.get("host")).name == "host"


async def the_service_itself(sdk: Half) -> None:
    service = sdk.Service()
    try:
        assert (await service.whoami())["project"] == "default"
        made = await service.create_key("for a test", scopes=["read"], seconds=600)
        assert made["secret"].startswith("rf_")
        assert made["id"] in [key["id"] for key in await service.keys()]
        turned = await service.rotate_key(made["id"])
        assert turned["secret"] != made["secret"]
        await service.revoke_key(turned["id"])
        assert (await service.quota())["project"] == "default"
        assert "jail" in [runtime["name"] for runtime in await service.runtimes()]
    finally:
        await service.close()


CASES = [
    commands,
    output_as_it_comes,
    large_streams,
    processes,
    terminals,
    watching,
    signed_addresses,
    code,
    ports,
    a_life,
    starts_that_are_not_waited_for,
    creates_once,
    policies,
    other_objects,
    the_service_itself,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_case(case: Any, sdk: Half) -> None:
    await case(sdk)


@pytest.mark.parametrize("case", [files, folders], ids=lambda case: case.__name__)
async def test_case_with_files(case: Any, sdk: Half, tmp_path: Path) -> None:
    await case(sdk, tmp_path)
