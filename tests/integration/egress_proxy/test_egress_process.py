"""The proxy as a process: unprivileged, restarted, visited; a real agent at the other end of the link."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence import _native
from ringfence.cli.main import main as cli
from ringfence.egress.client import Doors, DoorSpec, egress_user
from ringfence.egress.visiting import visits
from ringfence.guest.doors import HTTP_PORT
from ringfence.guest.link import GuestLink
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import NotFound, PolicyError
from support.doors import Origin

pytestmark = pytest.mark.skipif(not os.access(_native.agent(), os.X_OK), reason="the agent is not built")


class NetlessAgent:
    """A real agent in network and process namespaces of its own, with nothing but loopback."""

    def __init__(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="rf-egress-agent-"))
        listener = socket.socket(socket.AF_UNIX)
        self.path = self.base / "guest.sock"
        listener.bind(str(self.path))
        listener.listen(64)
        namespaces = ["--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        if os.geteuid() != 0:
            namespaces += ["--user", "--map-current-user", "--keep-caps"]
        number = listener.fileno()
        command = [_native.agent(), f"listen={number}", f"uid={os.geteuid()}", f"gid={os.getegid()}",
                   f"workdir={self.base}", f"home={self.base}", "oom=1000"]  # fmt: skip
        self.process = subprocess.Popen(
            ["unshare", *namespaces, "--", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command],
            pass_fds=(number,),
            env={
                "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "HOME": str(self.base),
            },
        )
        listener.close()

    async def dial(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(str(self.path))
        sock.setblocking(False)
        return sock

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        subprocess.run(["rm", "-rf", self.base], check=True)


@pytest.fixture(scope="module")
def agent() -> Iterator[NetlessAgent]:
    if subprocess.run(
        ["unshare", "--net", "true"] if os.geteuid() == 0 else ["unshare", "-rn", "true"]
    ).returncode:
        pytest.skip("no network namespaces here")
    made = NetlessAgent()
    yield made
    made.close()


@pytest.fixture
async def doors(tmp_path: Path) -> AsyncIterator[Doors]:
    async with await Doors.start(tmp_path / "egress") as made:
        yield made


async def inside(agent: NetlessAgent, *arguments: str) -> str:
    """Output of a curl inside."""
    async with await GuestLink.open(await agent.dial()) as link:
        process = await link.start(
            ProcessSpec(("curl", "-sS", "-i", "-m", "90", "-x", f"http://127.0.0.1:{HTTP_PORT}", *arguments))
        )
        out = b""
        async for piece in process:
            out += piece.data
        await process.wait()
        return out.decode("latin-1")


async def event(doors: Doors, name: str, listening: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    async with asyncio.timeout(60):
        async for found in listening:
            if found["event"] == name:
                return found
    raise AssertionError(name)


def network(port: int, **more: Any) -> dict[str, Any]:
    return {"mode": "egress", "allow": [{"host": "127.0.0.1", "ports": [port]}], **more}


async def test_a_request_from_inside_a_sandbox(
    agent: NetlessAgent, doors: Doors, plain: Origin, tmp_path: Path
) -> None:
    await doors.open(DoorSpec("sb-1", task="t", network=network(plain.port)), agent.dial)
    out = await inside(agent, f"http://127.0.0.1:{plain.port}/x")
    assert " 200 " in out
    assert " 403 " in await inside(agent, "http://10.0.0.1/")
    ended = await doors.update("sb-1", {"mode": "egress", "allow": []})
    assert ended == 0
    assert " 403 " in await inside(agent, f"http://127.0.0.1:{plain.port}/x")
    with pytest.raises(PolicyError):
        await doors.update("sb-1", {"mode": "egress", "allow": [{"host": "*"}]})
    with pytest.raises(NotFound):
        await doors.update("sb-2", {"mode": "egress"})
    await doors.close("sb-1")
    lines = [
        json.loads(text) for text in (tmp_path / "egress" / "connections.jsonl").read_text().splitlines()
    ]
    # One is written down when it has ended, which nobody waits for before the next.
    lines.sort(key=lambda line: line["decision"])
    assert [line["decision"] for line in lines] == ["allowed", "denied", "denied"]
    assert lines[0]["reported"]["port"] > 0
    assert lines[0]["reported"]["program"] == "curl"
    assert lines[0]["reported"]["pid"] > 1


async def test_the_process_has_no_rights(doors: Doors, tmp_path: Path) -> None:
    pid = (await doors.status())["pid"]
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    assert status["NoNewPrivs"] == "1"
    if os.geteuid() == 0:
        assert set(status["Uid"].split()) == set(status["Gid"].split()) and "0" not in status["Uid"].split()
        assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
        assert (tmp_path / "egress").stat().st_uid == int(status["Uid"].split()[0])
    assert (tmp_path / "egress").stat().st_mode & 0o777 == 0o700
    # What its memory holds is nobody's: not even another process of its user may look.
    assert Path(f"/proc/{pid}/mem").stat().st_uid == 0 or os.geteuid() != 0


async def test_killed_proxy_shuts_the_door_and_comes_back(
    agent: NetlessAgent, doors: Doors, plain: Origin
) -> None:
    await doors.open(
        DoorSpec("sb-1", project="p", network=network(plain.port, budget={"maxRequests": 5})), agent.dial
    )
    authority = await doors.ca("sb-1")
    url = f"http://127.0.0.1:{plain.port}/"
    assert " 200 " in await inside(agent, url)
    async with asyncio.timeout(60):  # what is counted is on disk within a second
        while not any("project/p" in path.read_text() for path in doors._folder.glob("usage/*.json")):
            await asyncio.sleep(0.01)
    listening = doors.events()
    waiting = asyncio.ensure_future(event(doors, "egress.reopened", listening))
    await asyncio.sleep(0)
    os.kill((await doors.status())["pid"], signal.SIGKILL)
    assert (await waiting)["sandbox"] == "sb-1"
    assert " 200 " in await inside(agent, url)
    assert await doors.ca("sb-1") == authority
    assert (await doors.usage("project/p"))["requests"] == 2
    await listening.aclose()  # type: ignore[attr-defined]


async def test_door_follows_a_link_that_ends(agent: NetlessAgent, doors: Doors, plain: Origin) -> None:
    dialled: list[socket.socket] = []

    async def dial() -> socket.socket:
        sock = await agent.dial()
        dialled.append(sock.dup())
        return sock

    await doors.open(DoorSpec("sb-1", network=network(plain.port)), dial)
    listening = doors.events()
    waiting = asyncio.ensure_future(event(doors, "egress.reopened", listening))
    await asyncio.sleep(0)
    dialled[0].shutdown(socket.SHUT_RDWR)
    await waiting
    assert " 200 " in await inside(agent, f"http://127.0.0.1:{plain.port}/")
    for sock in dialled:
        sock.close()
    await listening.aclose()  # type: ignore[attr-defined]


async def test_no_budget_begins_anew_with_a_link_or_a_process(
    agent: NetlessAgent, doors: Doors, plain: Origin
) -> None:
    """Code inside may end its agent's link whenever it likes, and learn when the proxy was restarted."""
    dialled: list[socket.socket] = []

    async def dial() -> socket.socket:
        for old in dialled:  # or it would live on for us
            old.close()
        sock = await agent.dial()
        dialled[:] = [sock.dup()]
        return sock

    async def written(count: int) -> None:
        """What was counted is on disk, and so read anew."""
        async with asyncio.timeout(60):
            while True:
                found = 0
                for path in doors._folder.glob("usage/*"):
                    with contextlib.suppress(OSError, ValueError):
                        found += int(json.loads(path.read_text()).get("sandbox/sb-1", [0])[0])
                if found == count:
                    return
                await asyncio.sleep(0.02)

    spec = DoorSpec("sb-1", network=network(plain.port, budget={"maxRequests": 4}))
    url = f"http://127.0.0.1:{plain.port}/"
    await doors.open(spec, dial)
    assert [" 200 " in await inside(agent, url) for _ in range(2)] == [True, True]
    await written(2)
    for count, how in ((3, "link"), (4, "process")):
        listening = doors.events()
        waiting = asyncio.ensure_future(event(doors, "egress.reopened", listening))
        await asyncio.sleep(0)
        if how == "link":
            dialled[0].shutdown(socket.SHUT_RDWR)
        else:
            dialled.pop().close()
            os.kill((await doors.status())["pid"], signal.SIGKILL)
        await waiting
        await listening.aclose()  # type: ignore[attr-defined]
        assert " 200 " in await inside(agent, url), how
        await written(count)
    assert "budget_requests" in await inside(agent, url)
    dialled.pop().close()
    await doors.close("sb-1", keep=True)  # another process goes on with it
    await doors.open(spec, dial)
    assert "budget_requests" in await inside(agent, url)
    dialled.pop().close()
    await doors.close("sb-1")  # it is no more
    await doors.open(spec, dial)
    assert " 200 " in await inside(agent, url)
    dialled.pop().close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's proxy is another user")
async def test_secrets_below_a_folder_that_the_proxy_may_not_enter(
    agent: NetlessAgent, plain: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(0o700)
    folder = closed / "state" / "egress"
    monkeypatch.setenv("RINGFENCE_HOME", str(folder.parent))

    async def put(value: str) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO(value))
        assert await asyncio.to_thread(cli, ["egress", "secret", "set", "key"]) == 0

    await put("value-one")
    async with await Doors.start(folder) as doors:
        pid = (await doors.status())["pid"]
        assert Path(f"/proc/{pid}").stat().st_uid in (0, egress_user())  # not dumpable: then it shows root
        status = Path(f"/proc/{pid}/status").read_text()
        assert f"Uid:\t{egress_user()}\t" in status
        rule = {"host": "127.0.0.1", "ports": [plain.port], "protocol": "http", "addresses": ["127.0.0.1/32"]}
        rules = {"mode": "egress", "allow": [rule | {"inject": {"bearer": "{{secret:key}}"}}]}
        await doors.open(DoorSpec("sb-1", network=rules), agent.dial)
        for value in ("value-one", "value-two", "value-three"):
            if value == "value-two":
                await put(value)  # by root, while it runs
            elif value == "value-three":
                await doors.secret_put("", "key", value)  # by the proxy itself
            assert " 200 " in await inside(agent, f"http://127.0.0.1:{plain.port}/")
            assert f"Authorization: Bearer {value}".encode() in plain.requests[-1]
        await put("value-four")
        assert " 200 " in await inside(agent, f"http://127.0.0.1:{plain.port}/")
        assert b"Authorization: Bearer value-four" in plain.requests[-1]


async def test_secrets_placeholders_and_questions_through_doors(
    agent: NetlessAgent, doors: Doors, plain: Origin, tmp_path: Path
) -> None:
    spec = DoorSpec("sb-1", project="p", network={"mode": "egress", "onUnknown": "ask", "askTimeout": "60s"})
    await doors.open(spec, agent.dial)
    assert (await doors.secret_put("p", "key", "value-one"))["version"] == 1
    assert [one["name"] for one in await doors.secret_list("p")] == ["key"]
    found = await doors.placeholders("sb-1", ["key"])
    assert found == await doors.placeholders("sb-1", ["key"]) and found["key"].startswith("rfsecret0")
    await doors.revoke("sb-1", ["sb-0"])
    await doors.secret_remove("p", "key")
    with pytest.raises(NotFound):
        await doors.secret_remove("p", "key")
    request = asyncio.ensure_future(inside(agent, "http://192.0.2.1/a"))
    async with asyncio.timeout(60):
        while not (pending := await doors.pending()):
            await asyncio.sleep(0.02)
    assert pending[0]["host"] == "192.0.2.1" and pending[0]["sandbox"] == "sb-1"
    await doors.answer(pending[0]["id"], False)
    assert " 403 " in await request
    with pytest.raises(NotFound):
        await doors.answer(pending[0]["id"], True)
    assert (await doors.metrics())["doors"] == 1


async def test_webhook_answers(agent: NetlessAgent, tmp_path: Path) -> None:
    hook = await Origin().start()
    body = b'{"answer": "deny"}'
    hook.response = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (
        len(body),
        body,
    )
    async with await Doors.start(tmp_path / "egress", webhook=f"http://127.0.0.1:{hook.port}/ask") as doors:
        await doors.open(DoorSpec("sb-1", network={"mode": "egress", "onUnknown": "ask"}), agent.dial)
        out = await inside(agent, "http://192.0.2.1/a")
        assert " 403 " in out and "somebody said no" in out
        assert json.loads(hook.bodies[0])["host"] == "192.0.2.1"
    await hook.stop()


async def test_command_line(
    agent: NetlessAgent, plain: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("RINGFENCE_HOME", str(tmp_path))

    async def run(*arguments: str) -> tuple[int, str]:
        code = await asyncio.to_thread(cli, ["egress", *arguments])
        found = capsys.readouterr()
        return code, found.out + found.err

    async with await Doors.start(tmp_path / "egress") as doors:
        rules = network(plain.port, onUnknown="ask", askTimeout="60s", record="headers")
        await doors.open(DoorSpec("sb-1", task="nightly", network=rules), agent.dial)
        await inside(agent, f"http://127.0.0.1:{plain.port}/x?y=1")
        for verb, status, words in (
            ("deny", " 403 ", "denied: 192.0.2.1:80"),
            ("allow", " 502 ", "allowed: 127.0.0.1:9"),
        ):
            url = "http://192.0.2.1/a" if verb == "deny" else "http://127.0.0.1:9/a"
            request = asyncio.ensure_future(inside(agent, url))
            async with asyncio.timeout(60):
                while True:
                    code, out = await run("pending", "--json")
                    if pending := json.loads(out)["pending"]:
                        break
                    await asyncio.sleep(0.05)
            assert pending[0]["id"] in (await run("pending"))[1]
            with monkeypatch.context() as gone:  # a service that is not there hides none of them
                gone.setenv("RINGFENCE_URL", "http://127.0.0.1:9")
                gone.setenv("RINGFENCE_API_KEY", "rf_" + "x" * 32)
                code, out = await run("pending")
                assert code == 125 and pending[0]["id"] in out and "127.0.0.1:9" in out
                code, out = await run("pending", "--json")
                told = json.loads(out)
                assert code == 125 and told["pending"] == pending and "127.0.0.1:9" in str(told["error"])
            remember = ("--remember",) if verb == "allow" else ()
            code, out = await run(verb, pending[0]["id"], *remember)
            assert code == 0 and words in out
            if verb == "allow":
                assert '"host": "127.0.0.1"' in out
            assert status in await request
        code, out = await run("allow", "ask-none")
        assert code == 125 and "no question" in out
        async with asyncio.timeout(60):  # each is written down when it has ended
            while True:
                code, out = await run("log", "--json", "--task", "nightly")
                decisions = [line["decision"] for line in json.loads(out)["connections"]]
                if len(decisions) >= 3:
                    break
                await asyncio.sleep(0.05)
        assert sorted(decisions) == ["allowed", "allowed", "denied"]
        assert "192.0.2.1" in (await run("log", "--denied"))[1]
        code, out = await run("learn", "--json")
        assert json.loads(out)["network"]["allow"] == [
            {"host": "127.0.0.1", "ports": [plain.port], "methods": ["GET"], "paths": ["/x"]}
        ]
        assert "kind: Policy" in (await run("learn"))[1]
        code, out = await run("log", "--har", "--sandbox", "sb-1")
        assert json.loads(out)["log"]["entries"][0]["request"]["url"].endswith("/x?y=1")
        assert sum(1 for _ in visits(tmp_path / "egress")) == 1
    assert sum(1 for _ in visits(tmp_path / "egress")) == 0
    assert "no request waits" in (await run("pending"))[1]
    monkeypatch.setenv("RINGFENCE_URL", "http://127.0.0.1:9")
    code, out = await run("pending")
    assert code == 125 and "no request waits" not in out and "127.0.0.1:9" in out


def memory(pid: int) -> int:
    """Bytes that a process has for itself."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no such line")


async def test_owner_that_dies_takes_the_proxy_with_it(tmp_path: Path) -> None:
    script = (
        "import asyncio,sys\nfrom ringfence.egress.client import Doors\n"
        "async def main():\n doors=await Doors.start(sys.argv[1])\n"
        " print((await doors.status())['pid'],flush=True)\n await asyncio.sleep(600)\nasyncio.run(main())\n"
    )
    import sys

    owner = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "egress")], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pid = int(await asyncio.to_thread(owner.stdout.readline))
    owner.kill()
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the proxy outlived its owner")
