"""``ringfence bench --api``: a service of its own, through raw HTTP and through the SDK, many at once.

Everything runs on this machine, in one run, bounded: the client, the service and the sandboxes share its
CPUs, so figures at 50 at once say what these cores do, not what a client feels that has its own. References
are measured beside ours: a bare ASGI server for bodies, the same server outside for ports.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringfence.cli.bench_http import Connection
from ringfence.cli.output import note
from ringfence.cli.timing import Samples
from ringfence.model.errors import HostLimit

MIB = 1024 * 1024
AT_ONCE = (1, 10, 20, 50)
SMALL = {"runtime": "jail", "memory": 64 * MIB, "disk": 16 * MIB, "timeout": 1800}
CODE = "x = 6 * 7\nx"
# A server that costs next to nothing, so that what the proxy adds can be seen; the same inside and outside.
_SERVER = """
import asyncio, sys
async def serve(reader, writer):
    try:
        while await reader.readuntil(b"\\r\\n\\r\\n"):
            writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\nok")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]))
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
# What bodies are compared with: uvicorn as the service runs it, and an application that does nothing.
_BARE = """
import asyncio, socket, sys, uvicorn
BODY = bytes(int(sys.argv[1]))
async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    while True:
        message = await receive()
        if not message.get("more_body"):
            break
    get = scope["method"] == "GET"
    headers = [(b"content-length", str(len(BODY) if get else 2).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    step = 262144
    if get:
        for at in range(0, len(BODY), step):
            await send({"type": "http.response.body", "body": BODY[at : at + step], "more_body": True})
    await send({"type": "http.response.body", "body": b"" if get else b"ok"})
sock = socket.create_server(("127.0.0.1", 0))
print(sock.getsockname()[1], flush=True)
options = dict(loop="uvloop", http="httptools", lifespan="off", access_log=False, timeout_keep_alive=600)
config = uvicorn.Config(app, log_level="error", **options)
asyncio.run(uvicorn.Server(config).serve([sock]))
"""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    creates: int
    cold: int
    execs: int
    codes: int
    bodies: int
    size: int  # bytes of a body
    ports: int
    pool: int
    working: int  # sandboxes alive and working
    idle: int  # sandboxes alive and idle


FULL = Effort(500, 60, 600, 300, 5, 50 * MIB, 500, 50, 200, 1000)
QUICK = Effort(40, 8, 60, 30, 2, 8 * MIB, 60, 8, 12, 24)


def run(options: argparse.Namespace) -> int:
    """Measure and print; 1 if a promise does not hold."""
    from ringfence.cli import bench

    try:
        import uvicorn  # noqa: F401 - the extra's own
    except ImportError:
        raise HostLimit(
            "the service needs packages that are not installed", hint="pip install 'ringfence[service]'"
        ) from None
    made = bench.Bench(bench.QUICK if options.quick else bench.FULL, "", None, quiet=options.json)
    measured = ApiBench(QUICK if options.quick else FULL, made)
    store = options.store or ""
    if options.only != ["stores"]:
        asyncio.run(measured.run(store))
    if not store or store.startswith("postgres"):
        from ringfence.cli.bench_stores import compare

        asyncio.run(compare(measured.effort, made, store))
    return int(made.told(json=options.json))


class ApiBench:
    """One run against one service."""

    def __init__(self, effort: Effort, bench: Any) -> None:
        self.effort = effort
        self.bench = bench
        self.url = self.key = ""
        self.pid = 0
        self._connections: list[Connection] = []

    async def run(self, store: str) -> None:
        """Everything."""
        with contextlib.ExitStack() as stack:
            self.url, self.key, self.pid = await asyncio.to_thread(stack.enter_context, service_of(store))
            try:
                await self.unlimited()
                for part in (
                    self._creates,
                    self._commands,
                    self._code,
                    self._bodies,
                    self._ports,
                    self._density,
                ):
                    await part()
            finally:
                await self.close()

    async def close(self) -> None:
        """End the pool and every sandbox, wait until the node has none, since they outlive their service, and
        hang up.

        Raises:
            HostLimit: something is left.
        """
        raw = await self.connected()
        await raw.call("DELETE", "/v1/pools/bench")
        await self._clear()
        end = time.monotonic() + 60
        while _walls(self.pid):
            if time.monotonic() > end:
                raise HostLimit(
                    "sandboxes of the bench are left", hint="`ringfence doctor` says what holds them"
                )
            await asyncio.sleep(0.05)
        for connection in self._connections:
            await connection.close()

    # -- parts

    async def _creates(self) -> None:
        self._say("creates from a pool")
        effort, raw = self.effort, await self.connected()
        body = {
            "name": "bench",
            "min": effort.pool,
            "max": effort.pool,
            "most": 400,
            "overflow": 200,
            **SMALL,
        }
        await self.ok(raw, "POST", "/v1/pools", body)
        end = time.monotonic() + 120
        while (await self.ok(raw, "GET", "/v1/pools/bench/queue"))["warm"] < effort.pool:
            if time.monotonic() > end:
                raise HostLimit(
                    "the pool was not filled within two minutes", hint="look at the machine's load"
                )
            await asyncio.sleep(0.05)

        async def create(connection: Connection) -> str:
            return str((await self.ok(connection, "POST", "/v1/sandboxes", {"pool": "bench"}))["id"])

        async def delete(connection: Connection, id: str) -> None:
            await self.ok(connection, "DELETE", f"/v1/sandboxes/{id}")

        for many in AT_ONCE:
            samples = await self._many(
                f"API: create from a pool, {many} at once", many, effort.creates, create, delete
            )
            if many == 1:
                self._promise("API: create from a pool, p50", 6, samples.percentile(50))
            if many == 20:
                self._promise("API: create from a pool, 20 at once, p95", 100, samples.percentile(95))
        await self._sdk_creates()
        await self.ok(raw, "DELETE", "/v1/pools/bench")
        self._say("cold creates")

        async def cold(connection: Connection) -> str:
            return str((await self.ok(connection, "POST", "/v1/sandboxes", SMALL))["id"])

        for many in (1, 10):
            await self._many(f"API: create without a pool, {many} at once", many, effort.cold, cold, delete)

    async def _sdk_creates(self) -> None:
        from ringfence.sdk.sandbox import AsyncSandbox

        async with self._sdk() as service:

            async def create(_: object) -> AsyncSandbox:
                return await AsyncSandbox.create(pool="bench", service=service)

            async def delete(_: object, sandbox: AsyncSandbox) -> None:
                await sandbox.kill()

            for many in (1, 20):
                await self._many(
                    f"SDK: create from a pool, {many} at once", many, self.effort.creates // 4, create, delete
                )

    async def _commands(self) -> None:
        self._say("commands")
        boxes = await self._boxes(8)

        async def true(connection: Connection) -> None:
            path = f"/v1/sandboxes/{next(boxes)}/processes"
            ended = await self.ok(connection, "POST", path, {"argv": ["true"]})
            if ended["exit_code"] != 0:
                raise RuntimeError(f"true ended with {ended}")

        for many in AT_ONCE:
            samples = await self._many(
                f"API: true in a running jail, {many} at once", many, self.effort.execs, true
            )
            if many == 1:
                self._promise("API: true in a running jail, p50", 4, samples.percentile(50))
        from ringfence.sdk.sandbox import AsyncSandbox

        async with self._sdk() as service:
            held = [await AsyncSandbox.connect(next(boxes), service=service) for _ in range(8)]
            turn = _round(held)

            async def run(_: object) -> None:
                (await next(turn).run(["true"])).check()

            for many in AT_ONCE:
                samples = await self._many(
                    f"SDK: true in a running jail, {many} at once", many, self.effort.execs // 2, run
                )
                if many == 1:
                    self._promise("SDK: true in a running jail, p50", 6, samples.percentile(50))

    async def _code(self) -> None:
        self._say("code")
        raw, boxes = await self.connected(), await self._boxes(4, memory=256 * MIB)
        names = [next(boxes) for _ in range(4)]
        for name in names:
            await self.ok(raw, "POST", f"/v1/sandboxes/{name}/contexts", {"id": "bench"})
            await self.ok(raw, "POST", f"/v1/sandboxes/{name}/contexts/bench/run", {"code": CODE})
        turn = _round(names)

        async def code(connection: Connection) -> None:
            path = f"/v1/sandboxes/{next(turn)}/contexts/bench/run"
            if (await self.ok(connection, "POST", path, {"code": CODE}))["status"] != "ok":
                raise RuntimeError("the code failed")

        for many in (1, 10):
            samples = await self._many(
                f"API: warm Python snippet, {many} at once", many, self.effort.codes, code
            )
            if many == 1:
                self._promise("API: warm Python snippet, p50", 4, samples.percentile(50))
        from ringfence.sdk.sandbox import AsyncSandbox

        async with self._sdk() as service:
            sandbox = await AsyncSandbox.connect(names[0], service=service)

            async def run(_: object) -> None:
                (await sandbox.run_code(CODE)).check()

            await self._many("SDK: warm Python snippet, 1 at once", 1, self.effort.codes, run)

    async def _bodies(self) -> None:
        self._say("files, beside a bare ASGI server")
        size, data = self.effort.size, os.urandom(self.effort.size)
        name = next(await self._boxes(1, memory=4 * size + 128 * MIB, disk=2 * size + 16 * MIB))
        digest = base64.b64encode(hashlib.sha256(data).digest()).decode()
        headers = f"content-digest: sha-256=:{digest}:\r\ncontent-type: application/octet-stream\r\n"
        path = f"/v1/sandboxes/{name}/files/content?path=big"
        with _python(_BARE, str(size)) as port:
            bare, ours = Connection("127.0.0.1", port), await self.connected()
            self._connections.append(bare)
            times: dict[str, list[float]] = {}

            async def timed(key: str, work: Awaitable[tuple[int, Any]], wanted: int) -> None:
                began = time.perf_counter()
                status, _ = await work
                times.setdefault(key, []).append(time.perf_counter() - began)
                if status != wanted:
                    raise RuntimeError(f"{key}: HTTP {status}")

            for _ in range(self.effort.bodies):
                await timed("bare up", bare.send("PUT", "/", data), 200)
                await timed("up", ours.send("PUT", path, data, headers), 201)
                await timed("bare down", bare.drain("/"), 200)
                await timed("down", ours.drain(path, "want-repr-digest: sha-256=1\r\n"), 200)
        for way in ("up", "down"):
            bare_time, own_time = _middle(times[f"bare {way}"]), _middle(times[way])
            text = f"{size / MIB / own_time:.0f} MiB/s beside {size / MIB / bare_time:.0f} MiB/s"
            what = f"API: file of {size // MIB} MiB {way}, beside a bare ASGI server, p50"
            self._promise(what, 0.4, bare_time / own_time, "x", at_least=True, reference=text)

    async def _ports(self) -> None:
        self._say("ports")
        name = next(await self._boxes(1))
        raw = await self.connected()
        body = {"argv": ["python3", "-c", _SERVER, "8000"], "wait": False, "detached": True}
        await self.ok(raw, "POST", f"/v1/sandboxes/{name}/processes", body)
        token = await self.ok(raw, "POST", f"/v1/sandboxes/{name}/token", {"ports": [8000]})
        headers = "".join(f"{key}: {value}\r\n" for key, value in token["headers"].items())
        path = f"/v1/sandboxes/{name}/ports/8000/"
        through = Connection(*self._address)
        self._connections.append(through)
        end = time.monotonic() + 60
        while (await through.send("GET", path, b"", headers))[0] != 200:
            if time.monotonic() > end:
                raise HostLimit("the server inside did not come up")
            await asyncio.sleep(0.1)
        with _python(_SERVER, "0") as port:
            direct = Connection("127.0.0.1", port)
            self._connections.append(direct)

            async def outside(_: object) -> None:
                await direct.send("GET", "/")

            async def inside(_: object) -> None:
                status, _body = await through.send("GET", path, b"", headers)
                if status != 200:
                    raise RuntimeError(f"the port answered {status}")

            plain = await self._many("HTTP call to a server on this machine", 1, self.effort.ports, outside)
            proxied = await self._many("API: the same to a port inside", 1, self.effort.ports, inside)
        text = f"{proxied.percentile(50):.2f} ms beside {plain.percentile(50):.2f} ms"
        added = proxied.percentile(50) - plain.percentile(50)
        self._promise("API: what the port proxy adds, p50", 2, added, "ms", reference=text)

    async def _density(self) -> None:
        await self._clear()
        self._say(f"{self.effort.working} alive and working, then {self.effort.idle} idle")
        await self._boxes(self.effort.working)
        names = [item["id"] for item in await self._alive()]
        turn = _round(names)

        async def true(connection: Connection) -> None:
            await self.ok(connection, "POST", f"/v1/sandboxes/{next(turn)}/processes", {"argv": ["true"]})

        what = f"API: {len(names)} alive and working, 10 at once"
        samples = await self._many(what, 10, max(len(names) * 2, self.effort.execs), true)
        self._promise(f"API: {len(names)} alive and working, p99", 250, samples.percentile(99))
        await self._boxes(max(0, self.effort.idle - len(names)))
        alive = len(await self._alive())
        self._promise("API: idle jails at once", self.effort.idle, alive, "sandboxes", at_least=True)
        await asyncio.sleep(1.0)
        rss = sum(_resident(pid) for pid in _api_processes(self.pid))
        self._promise(f"API: memory of the service's API process with {alive} idle", 200, rss / 1e6, "MB")

    # -- helpers

    @property
    def _address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    async def connected(self) -> Connection:
        """A connection to the API, closed in the end."""
        connection = Connection(*self._address, self.key)
        self._connections.append(connection)
        return await connection.open()

    def _sdk(self) -> Any:
        from ringfence.sdk.service import AsyncService

        return AsyncService(self.url, self.key)

    async def ok(self, connection: Connection, method: str, path: str, body: Any = None) -> Any:
        """The answer of a request that must succeed."""
        status, value = await connection.call(method, path, body)
        if status >= 300:
            raise RuntimeError(f"{method} {path}: {status} {value}")
        return value

    async def unlimited(self) -> None:
        """Let no quota be in the way."""
        raw = await self.connected()
        project = (await self.ok(raw, "GET", "/v1/me"))["project"]
        names = ("alive", "cpus", "memory", "storage", "creates", "pool", "requests")
        await self.ok(raw, "PATCH", f"/v1/projects/{project}/quota", dict.fromkeys(names))

    async def _boxes(self, count: int, **size: int) -> Any:
        """So many sandboxes more; their names round and round."""
        names: list[str] = []

        async def create(connection: Connection) -> None:
            names.append((await self.ok(connection, "POST", "/v1/sandboxes", {**SMALL, **size}))["id"])

        await self._work(4, count, create)
        return _round(names)

    async def _alive(self) -> list[dict[str, Any]]:
        raw, found, cursor = await self.connected(), [], ""
        while True:
            more = f"&cursor={cursor}" if cursor else ""
            page = await self.ok(raw, "GET", f"/v1/sandboxes?state=running&limit=1000{more}")
            found += page["items"]
            cursor = page["next_cursor"]
            if not cursor:
                return found

    async def _clear(self) -> None:
        names = [item["id"] for item in await self._alive()]
        turn = iter(names)

        async def delete(connection: Connection) -> None:
            await self.ok(connection, "DELETE", f"/v1/sandboxes/{next(turn)}")

        await self._work(8, len(names), delete)

    async def _many(
        self,
        name: str,
        many: int,
        count: int,
        work: Callable[[Connection], Awaitable[Any]],
        after: Callable[[Connection, Any], Awaitable[None]] | None = None,
    ) -> Samples:
        """``count`` operations, ``many`` at once; ``after`` each is not timed."""
        samples, errors = Samples(name), 0

        async def one(connection: Connection) -> None:
            nonlocal errors
            started = time.perf_counter()
            try:
                made = await work(connection)
            except Exception as error:
                errors += 1
                if errors > count // 10 + 1:
                    raise
                note(f"{name}: {error}")
                return
            samples.add(started)
            if after is not None:
                await after(connection, made)

        await self._work(many, count + many, one)
        del samples.values[: min(many, len(samples.values) - 1)]  # the first of each connection warm up
        self.bench.figures.append(samples.as_dict())
        if errors:
            self.bench.figures.append({"name": f"{name}: errors", "unit": "", "n": count, "value": errors})
        return samples

    async def _work(self, many: int, count: int, one: Callable[[Connection], Awaitable[None]]) -> None:
        turns = iter(range(count))

        async def worker() -> None:
            connection = await self.connected()
            for _ in turns:
                await one(connection)

        await asyncio.gather(*(worker() for _ in range(min(many, max(count, 1)))))

    def _promise(
        self,
        what: str,
        limit: float,
        value: float,
        unit: str = "ms",
        *,
        at_least: bool = False,
        reference: str = "",
    ) -> None:
        from ringfence.cli.bench import Promise

        self.bench.promises.append(Promise(what, limit, value, unit, at_least, reference))

    def _say(self, text: str) -> None:
        self.bench.say("API: " + text)


def _round(items: list[Any]) -> Any:
    import itertools

    return itertools.cycle(items)


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _walls(serve: int) -> list[str]:
    """Folders of the sandboxes of a service, by its command line's ``--state``."""
    words = Path(f"/proc/{serve}/cmdline").read_bytes().split(b"\0")
    return os.listdir(Path(os.fsdecode(words[words.index(b"--state") + 1])) / "sandboxes")


@contextlib.contextmanager
def service_of(store: str) -> Any:
    """A service of this run's own: address, key, process number. Nothing of it is left."""
    folder = tempfile.mkdtemp(prefix="ringfence-bench-")
    os.chmod(folder, 0o711)  # noqa: S103 - as root the API is another user, and passes through
    command = [
        sys.executable, "-m", "ringfence", "serve", "--json", "--bind", "127.0.0.1:0", "--state", folder,
        "--service", "bench", "--no-egress", "--memory-ratio", "64", "--cpu-ratio", "10000",
    ]  # fmt: skip
    command += ["--store", store] if store else []
    log = Path(folder) / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file, text=True,
            env=os.environ | {"RINGFENCE_HOME": folder},
        )  # fmt: skip
    assert process.stdout is not None
    told: dict[str, Any] = {}
    try:
        for line in process.stdout:
            told |= json.loads(line)
            if "ready" in told:
                break
        if not {"key", "url"} <= told.keys():
            said = log.read_text(errors="replace")[-1000:]
            raise HostLimit("the service did not start", hint=said or str(told.get("error", "")))
        yield told["url"], told["key"], process.pid
    finally:
        ended(process)
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


def ended(process: subprocess.Popen[Any], how: int = signal.SIGTERM) -> None:
    """Ask it to end; kill it if it does not within a minute."""
    process.send_signal(how)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _python(program: str, argument: str) -> Any:
    """A server in a process of its own; the port that it says."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, argument], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _api_processes(serve: int) -> list[int]:
    """The API's processes below ``ringfence serve``; itself, if there are none."""
    found = []
    for task in Path(f"/proc/{serve}/task").iterdir():
        for word in (task / "children").read_text().split():
            with contextlib.suppress(OSError):
                if b"ringfence.serving.worker" in Path(f"/proc/{word}/cmdline").read_bytes():
                    found.append(int(word))
    return found or [serve]


def _resident(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
