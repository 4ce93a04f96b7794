"""``ringfence bench --egress``: the door of a real jail, beside socat and beside no door at all.

Everything is on this machine, in one run: client (in the jail), agent, proxy and servers share its CPUs. So
the processor time of agent and proxy is printed with each figure, and socat's beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringfence.cli import bench_egress_ends as ends
from ringfence.cli import door
from ringfence.cli.output import note
from ringfence.cli.timing import Samples
from ringfence.egress.authority import Authority
from ringfence.egress.client import Doors, DoorSpec
from ringfence.egress.names import Host
from ringfence.egress.resolver import reply
from ringfence.guest import doors as inner
from ringfence.guest import frames
from ringfence.guest.fields import decode, encode
from ringfence.guest.processes import ProcessSpec
from ringfence.model.levels import Level
from ringfence.model.policies import network_from_dict
from ringfence.model.policy import Isolation, Policy, Resources
from ringfence.model.sandbox import SandboxRequest
from ringfence.node.service import Node

GIB, MIB = 1024**3, 1024**2
SANDBOX = "sb-bench"
_LIMIT = 80_000_000  # bits a second that the bandwidth limit is measured with


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    requests: int
    connects: int
    megabytes: int
    rounds: int  # of the throughput, ours and socat's in turn
    doors: int


FULL = Effort(requests=3000, connects=300, megabytes=256, rounds=3, doors=1000)
QUICK = Effort(requests=100, connects=10, megabytes=16, rounds=1, doors=20)


def run(options: argparse.Namespace) -> int:
    """Measure and print; 1 if a promise does not hold."""
    from ringfence.cli import bench

    door.check()
    made = bench.Bench(bench.QUICK if options.quick else bench.FULL, "", None, quiet=options.json)
    measured = EgressBench(QUICK if options.quick else FULL, made)
    with tempfile.TemporaryDirectory(prefix="ringfence-egress-bench-") as folder:
        os.chmod(folder, 0o755)  # noqa: S103 - the proxy's user looks in
        asyncio.run(measured.run(Path(folder)))
    return int(made.told(json=options.json))


class EgressBench:
    """One run."""

    def __init__(self, effort: Effort, bench: Any) -> None:
        self.effort = effort
        self.bench = bench
        self._link: Any = None
        self._pids: tuple[int, ...] = ()  # of proxy and agent

    async def run(self, folder: Path) -> None:
        """Everything."""
        authority = Authority.make("bench")
        pem, ca = folder / "server.pem", folder / "ca.pem"
        pem.touch(mode=0o600)
        pem.write_bytes(authority.leaf(Host(ends.NAME)))
        ca.write_bytes(authority.certificate)
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(_program("serve", str(pem)))
            https, plain, sink = map(int, (await server.stdout.readline()).split())
            dns = await stack.enter_async_context(_dns())
            node = await stack.enter_async_context(await Node.open(adopt=False))
            doors = await stack.enter_async_context(
                await Doors.start(folder / "egress", dns=dns, ca_file=str(ca))
            )
            sandbox = await node.create(_request())
            stack.push_async_callback(sandbox.destroy)
            self.bench.boundaries.append(await sandbox.boundary())
            self._link = await sandbox.link()
            self._pids = ((await doors.status())["pid"], sandbox.handle.pid)
            local = {"host": ends.NAME, "addresses": ["127.0.0.1"]}

            @contextlib.asynccontextmanager
            async def opened(rule: dict[str, Any], **more: Any) -> AsyncIterator[None]:
                network = {"mode": "egress", "record": "metadata", "allow": [local | rule]}
                spec = DoorSpec(SANDBOX, network=network, **more)
                await doors.open(spec, lambda: sandbox.runtime.connect(sandbox.handle))
                await inner.place_bundle(self._link, authority.certificate + await doors.ca(SANDBOX))
                try:
                    yield
                finally:
                    await doors.close(SANDBOX)

            async with opened({"ports": [sink, plain], "protocol": "tcp"}):
                await self._throughput(sink)
                await self._passing(plain)
            async with opened({"ports": [https], "tls": "inspect"}):
                await self._inspected(https, str(ca))
            async with opened({"ports": [sink], "protocol": "tcp"}, bandwidth=_LIMIT):
                await self._limited(sink)
            await self._idle(folder / "idle")

    # -- parts

    async def _throughput(self, port: int) -> None:
        self._say("throughput, beside socat")
        plan = {"proxy": 0, "ca": "", "port": port, "megabytes": self.effort.megabytes}
        ours: list[float] = []
        theirs: list[float] = []
        spent = [0.0, 0.0]
        socat = shutil.which("socat")
        for _ in range(self.effort.rounds):
            before = self._cpu()
            ours.append((await self._inside("upload", plan | {"proxy": inner.HTTP_PORT}))["mb_per_second"])
            spent[0] += self._cpu() - before
            if socat is not None:
                got, used = await _through_socat(socat, "upload", plan)
                theirs.append(got["mb_per_second"])
                spent[1] += used
        size = self.effort.megabytes * self.effort.rounds / 1024
        self._figure("egress: pass-through, one stream", statistics.median(ours), "MB/s", len(ours))
        self._figure("egress: CPU of proxy and agent for 1 GiB", spent[0] / size, "s")
        if socat is None:
            self.bench.absent["socat"] = "not installed"
            return
        self._figure("socat: the same", statistics.median(theirs), "MB/s", len(theirs))
        self._figure("socat: CPU for 1 GiB", spent[1] / size, "s")
        ratio = statistics.median(ours) / statistics.median(theirs)
        text = f"{statistics.median(ours):.0f} MB/s beside {statistics.median(theirs):.0f} MB/s"
        self._promise("egress: pass-through beside socat", 0.4, ratio, "x", at_least=True, reference=text)

    async def _passing(self, port: int) -> None:
        self._say("latency of what passes")
        plan = {"proxy": 0, "ca": "", "port": port, "at_once": 1, "count": self.effort.requests}
        door = plan | {"proxy": inner.HTTP_PORT}
        direct, passed = await self._pair("requests", plan, door, "HTTP request", "egress: the same, passed")
        self._added("egress: what passing adds, p50", 1, direct, passed)
        socat = shutil.which("socat")
        if socat is not None:
            got, _ = await _through_socat(socat, "requests", plan)
            self.bench.figures.append(Samples("socat: the same, relayed", got["times"]).as_dict())
        less = {"count": self.effort.connects}
        await self._pair("connects", plan | less, door | less, "HTTP connection and request",
                         "egress: the same, a new tunnel")  # fmt: skip

    async def _inspected(self, port: int, ca: str) -> None:
        self._say("inspected TLS")
        plan = {"proxy": 0, "ca": ca, "port": port, "at_once": 1, "count": self.effort.requests}
        door = plan | {"proxy": inner.HTTP_PORT, "ca": inner.BUNDLE}
        direct, seen = await self._pair(
            "requests", plan, door, "HTTPS request", "egress: the same, inspected"
        )
        self._added("egress: what inspection adds, p50", 2, direct, seen)
        before = self._cpu()
        got = await self._inside("requests", door | {"at_once": 10})
        used = self._cpu() - before
        rate, many = len(got["times"]) / got["seconds"], len(got["times"]) + 10 * ends.WARM
        self.bench.figures.append(Samples("egress: inspected, 10 at once", got["times"]).as_dict())
        self._figure(
            "egress: CPU of proxy and agent for an inspected request", used / many * 1000, "ms", many
        )
        client = got["cpu"] / len(got["times"])
        text = f"each {used / many * 1000:.2f} ms of CPU, and {client * 1000:.2f} ms of the client's"
        self._promise("egress: inspected, 10 at once", 600, rate, "1/s", at_least=True, reference=text)

    async def _limited(self, port: int) -> None:
        self._say("the bandwidth limit")
        megabytes = max(10, self.effort.megabytes // 6)
        plan = {"proxy": inner.HTTP_PORT, "ca": "", "port": port, "megabytes": megabytes}
        got = (await self._inside("upload", plan))["mb_per_second"]
        off = abs(got / (_LIMIT / 8e6) - 1) * 100
        text = f"{got:.2f} MB/s of {_LIMIT / 8e6:g}"
        self._promise("egress: bandwidth limit is off by", 10, off, "%", reference=text)

    async def _idle(self, folder: Path) -> None:
        self._say(f"{self.effort.doors} idle doors")
        async with await Doors.start(folder) as doors, _agents() as dial:
            pid = (await doors.status())["pid"]
            network = {"mode": "egress", "allow": [{"host": ends.NAME}]}
            for number in range(self.effort.doors):
                await doors.open(DoorSpec(f"sb-{number}", network=network), dial)
            held = _private(pid) / 1e6
        what = f"egress: memory of the proxy with {self.effort.doors} idle doors"
        if held:
            self._promise(what, 100, held, "MB")
        else:
            self.bench.absent["egress: memory of the proxy"] = "only root may look into it"

    # -- helpers

    async def _pair(
        self, kind: str, plan: dict[str, Any], door: dict[str, Any], name: str, ours: str
    ) -> tuple[Samples, Samples]:
        """Both halves without the door, the door's between them."""
        half = plan | {"count": plan["count"] // 2}
        times = (await _outside(kind, half))["times"]
        through = await self._inside(kind, door)
        times += (await _outside(kind, half))["times"]
        found = Samples(name, times), Samples(ours, through["times"])
        self.bench.figures += [samples.as_dict() for samples in found]
        return found

    def _added(self, what: str, limit: float, direct: Samples, through: Samples) -> None:
        text = f"{through.percentile(50):.2f} ms beside {direct.percentile(50):.2f} ms"
        added = through.percentile(50) - direct.percentile(50)
        self._promise(what, limit, added, "ms", reference=text)

    async def _inside(self, kind: str, plan: dict[str, Any]) -> dict[str, Any]:
        argv = ("/usr/bin/python3", "-I", "-c", inspect.getsource(ends), kind, json.dumps(plan))
        process = await self._link.start(ProcessSpec(argv, stdin=False))
        out: dict[int, bytes] = {1: b"", 2: b""}
        async for piece in process:
            out[piece.stream] += piece.data
        end = await process.wait()
        await self._link.remove(process.id)
        if end.code != 0:
            raise RuntimeError(f"the client inside failed: {out[2].decode(errors='replace')[-500:]}")
        found: dict[str, Any] = json.loads(out[1])
        return found

    def _cpu(self) -> float:
        """Seconds that proxy and agent have taken."""
        total = 0
        for pid in self._pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")

    def _say(self, what: str) -> None:
        if not self.bench.quiet:
            note(f"measuring {what} …")

    def _figure(self, name: str, value: float, unit: str, n: int | None = None) -> None:
        figure = {"name": name, "unit": unit, "value": round(value, 3)}
        self.bench.figures.append(figure if n is None else figure | {"n": n})

    def _promise(self, what: str, limit: float, value: float, unit: str, **more: Any) -> None:
        from ringfence.cli.bench import Promise

        self.bench.promises.append(Promise(what, limit, value, unit, **more))


def _request() -> SandboxRequest:
    policy = Policy().with_wall(
        isolation=Isolation(runtime="jail", minimum=Level.L2), resources=Resources(cpus=2, memory=GIB)
    )
    return SandboxRequest(policy=policy.with_door(network=network_from_dict({"mode": "egress"})))


@contextlib.asynccontextmanager
async def _program(*arguments: str) -> AsyncIterator[Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", inspect.getsource(ends), *arguments, stdout=subprocess.PIPE
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _outside(kind: str, plan: dict[str, Any]) -> dict[str, Any]:
    async with _program(kind, json.dumps(plan)) as process:
        output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the client outside ended with {process.returncode}")
    found: dict[str, Any] = json.loads(output)
    return found


async def _through_socat(program: str, kind: str, plan: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """The same through a plain relay, and the seconds of CPU that it took."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    listen = f"TCP-LISTEN:{port},bind=127.0.0.1,reuseaddr"
    relay = subprocess.Popen([program, listen, f"TCP:127.0.0.1:{plan['port']}"])  # noqa: ASYNC220 - at once
    try:
        found = await _outside(kind, plan | {"port": port})
        _, _, usage = await asyncio.to_thread(os.wait4, relay.pid, 0)
        relay.returncode = 0
    finally:
        if relay.returncode is None:
            relay.kill()
            relay.wait()
    return found, usage.ru_utime + usage.ru_stime


@contextlib.asynccontextmanager
async def _dns() -> AsyncIterator[str]:
    """A DNS server that knows every name, at 127.0.0.1."""
    from ipaddress import ip_address

    class Answers(asyncio.DatagramProtocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def datagram_received(self, data: bytes, address: Any) -> None:
            self.transport.sendto(reply(data, [ip_address("127.0.0.1")]), address)

    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(Answers, ("127.0.0.1", 0))
    try:
        yield f"127.0.0.1:{transport.get_extra_info('sockname')[1]}"
    finally:
        transport.close()


@contextlib.asynccontextmanager
async def _agents() -> AsyncIterator[Any]:
    """Dial as often as you like: each is another agent, that says what agents say when a door is opened."""
    transports: list[Any] = []

    class Agent(asyncio.Protocol):
        def __init__(self) -> None:
            self.parser = frames.FrameParser()

        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            for channel, kind, payload in self.parser.feed(data):
                if kind == frames.HELLO:
                    nonce = decode(payload).raw(3)
                    told: list[tuple[int, int | str | bytes | None]] = [
                        (1, frames.MAGIC),
                        (2, 1),
                        (3, nonce),
                        (5, 1),
                        (6, os.urandom(16)),
                        (7, "bench"),
                    ]
                    self.transport.write(frames.frame(0, frames.HELLO, encode(told)))
                elif kind == frames.OPEN:
                    port = decode(payload[2:]).number(1)
                    self.transport.write(frames.frame(channel, frames.REPLY, encode([(1, port)])))

    async def dial() -> socket.socket:
        theirs, ours = socket.socketpair()
        transport, _ = await asyncio.get_running_loop().create_connection(Agent, sock=ours)
        transports.append(transport)
        return theirs

    try:
        yield dial
    finally:
        for transport in transports:
            transport.abort()
        await asyncio.sleep(0)


def _private(pid: int) -> int:
    """Bytes of memory that are this process's alone; 0: we may not know."""
    with contextlib.suppress(PermissionError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Private_Dirty:"):
                return int(line.split()[1]) * 1024
    return 0
