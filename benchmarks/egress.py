"""The egress door beside what it is compared with: a plain relay (socat), and connections without a proxy.

    python benchmarks/egress.py [--megabytes 512] [--seconds 5] [--doors 1000] [--json]

Everything runs on loopback: a real agent in a network namespace of its own, a real proxy process, servers and
clients in processes of their own. Figures of one run stand beside each other; those of two runs do not.
"""

# ruff: noqa: ASYNC220, ASYNC221, ASYNC240, ASYNC251
from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / name) for name in ("src", "tests")]

NAME = "bench.example.test"
REQUEST = b"GET /v1/x HTTP/1.1\r\nHost: %b\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"x" * 100


# -- the other side: `egress.py serve PEM`, prints the ports of an HTTPS server and of a sink


class Http(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self.transport, self.held = transport, b""

    def data_received(self, data: bytes) -> None:
        self.held += data
        while b"\r\n\r\n" in self.held:
            self.held = self.held.partition(b"\r\n\r\n")[2]
            self.transport.write(ANSWER)


class Sink(asyncio.Protocol):
    """Takes what comes; at its end says how much it was."""

    def connection_made(self, transport: Any) -> None:
        self.transport, self.count = transport, 0

    def data_received(self, data: bytes) -> None:
        self.count += len(data)

    def eof_received(self) -> bool:
        self.transport.write(b"%d" % self.count)
        self.transport.close()
        return False


async def serve(pem: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    loop = asyncio.get_running_loop()
    https = await loop.create_server(Http, "127.0.0.1", 0, ssl=context)
    plain = await loop.create_server(Http, "127.0.0.1", 0)
    sink = await loop.create_server(Sink, "127.0.0.1", 0)
    print(*(one.sockets[0].getsockname()[1] for one in (https, plain, sink)), flush=True)
    await asyncio.Event().wait()


# -- the client: `egress.py client PLAN`, prints figures as JSON


async def connected(plan: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", plan["proxy"] or plan["port"], limit=2**20)
    if plan["proxy"]:
        target = f"{NAME}:{plan['port']}"
        writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
    if plan["ca"]:
        await writer.start_tls(ssl.create_default_context(cafile=plan["ca"]), server_hostname=NAME)
    return reader, writer


async def requests(plan: dict[str, Any]) -> dict[str, Any]:
    request = REQUEST % f"{NAME}:{plan['port']}".encode()
    times: list[float] = []
    end = time.monotonic() + plan["seconds"]

    async def one() -> None:
        reader, writer = await connected(plan)
        while (began := time.monotonic()) < end:
            writer.write(request)
            await reader.readexactly(len(ANSWER))
            times.append(time.monotonic() - began)
        writer.close()

    for _ in range(1):
        warm = dict(plan)
        reader, writer = await connected(warm)
        for _ in range(20):
            writer.write(request)
            await reader.readexactly(len(ANSWER))
        writer.close()
    began = time.monotonic()
    await asyncio.gather(*(one() for _ in range(plan["at_once"])))
    return {"p50_ms": statistics.median(times) * 1000, "per_second": len(times) / (time.monotonic() - began)}


async def connects(plan: dict[str, Any]) -> dict[str, Any]:
    """A new connection, one request: what the door adds to that."""
    request = REQUEST % f"{NAME}:{plan['port']}".encode()
    times = []
    for _ in range(plan["count"]):
        began = time.monotonic()
        reader, writer = await connected(plan)
        writer.write(request)
        await reader.readexactly(len(ANSWER))
        times.append(time.monotonic() - began)
        writer.close()
    return {"p50_ms": statistics.median(times) * 1000}


def upload(plan: dict[str, Any]) -> dict[str, Any]:
    sock = socket.create_connection(("127.0.0.1", plan["proxy"] or plan["port"]))
    if plan["proxy"]:
        target = f"{NAME}:{plan['port']}"
        sock.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        assert b" 200 " in sock.recv(1000)
    data = bytes(2**20)
    began = time.monotonic()
    for _ in range(plan["megabytes"]):
        sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)
    got = b""
    while piece := sock.recv(100):
        got += piece
    seconds = time.monotonic() - began
    assert int(got) == plan["megabytes"] * 2**20, got
    return {"megabytes_per_second": plan["megabytes"] / seconds}


# -- the measurements


def cpu(*pids: int) -> float:
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def client(kind: str, plan: dict[str, Any]) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), kind, json.dumps(plan)]


async def outside(kind: str, plan: dict[str, Any]) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(*client(kind, plan), stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    found: dict[str, Any] = json.loads(output)
    return found


async def inside(agent: Any, kind: str, plan: dict[str, Any]) -> dict[str, Any]:
    from ringfence.guest.link import GuestLink
    from ringfence.guest.processes import ProcessSpec

    async with await GuestLink.open(await agent.dial()) as link:
        process = await link.start(ProcessSpec(tuple(client(kind, plan))))
        out = b""
        async for piece in process:
            out += piece.data
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found


def private(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) * 1024
    return 0


async def idle_doors(folder: Path, count: int) -> dict[str, Any]:
    """Memory of a proxy with so many idle doors. Their agents are one process that says what agents say."""
    from egress_agents import FakeAgents

    from ringfence.egress.client import Doors, DoorSpec

    async with await Doors.start(folder) as doors, FakeAgents() as agents:
        pid = (await doors.status())["pid"]
        before = private(pid)
        network = {"mode": "egress", "allow": [{"host": NAME}]}
        for number in range(count):
            await doors.open(DoorSpec(f"sb-{number}", network=network), agents.dial)
        held = private(pid)
        files = len(os.listdir(f"/proc/{pid}/fd"))
        for number in range(count):
            await doors.close(f"sb-{number}")
        return {"doors": count, "before_mb": before / 1e6, "with_doors_mb": held / 1e6,
                "descriptors": files, "descriptors_after": len(os.listdir(f"/proc/{pid}/fd"))}  # fmt: skip


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    from integration.egress_proxy.test_egress_process import NetlessAgent
    from ringfence.egress.client import Doors, DoorSpec
    from support.doors import TestAuthority

    results: dict[str, Any] = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    folder = Path(tempfile.mkdtemp(prefix="rf-egress-bench-"))
    os.chmod(folder, 0o755)
    authority = TestAuthority(folder)
    authority.server(NAME)
    pem = next(folder.glob(f"{NAME}-*.pem"))
    server = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).resolve()), "serve", str(pem), stdout=subprocess.PIPE
    )
    assert server.stdout is not None
    https, plain, sink = map(int, (await server.stdout.readline()).split())
    agent = NetlessAgent()
    dns = await loopback_dns()
    try:
        async with await Doors.start(
            folder / "egress", ca_file=str(authority.file), dns=dns.address
        ) as doors:
            local = {"host": NAME, "addresses": ["127.0.0.1"]}
            rules = {
                "tcp": [local | {"ports": [sink, plain], "protocol": "tcp"}],
                "pass": [local | {"ports": [https]}],
                "inspect": [local | {"ports": [https], "tls": "inspect"}],
            }

            async def door(kind: str, **more: Any) -> None:
                spec = DoorSpec(
                    "sb-bench", network={"mode": "egress", "record": "metadata", "allow": rules[kind]}, **more
                )
                await doors.open(spec, agent.dial)

            from ringfence.guest.doors import HTTP_PORT

            pid = (await doors.status())["pid"]
            inner = int(
                Path(f"/proc/{agent.process.pid}/task/{agent.process.pid}/children").read_text().split()[0]
            )
            plan = {"proxy": 0, "ca": "", "port": sink, "megabytes": options.megabytes}
            await door("tcp")
            before = cpu(pid, inner)
            through = await inside(agent, "upload", plan | {"proxy": HTTP_PORT})
            results["pass_through"] = through | {"cpu_seconds": cpu(pid, inner) - before}
            socat = shutil.which("socat")
            if socat:
                with socket.socket() as free:
                    free.bind(("127.0.0.1", 0))
                    port = free.getsockname()[1]
                relay = subprocess.Popen(
                    [socat, f"TCP-LISTEN:{port},bind=127.0.0.1,reuseaddr,fork", f"TCP:127.0.0.1:{sink}"]
                )
                for _ in range(200):
                    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                        break
                    time.sleep(0.02)
                began = os.times()
                figures = await outside("upload", plan | {"port": port})
                relay.send_signal(signal.SIGTERM)
                relay.wait()
                ended = os.times()
                del began, ended
                results["socat"] = figures
                ratio = results["pass_through"]["megabytes_per_second"] / figures["megabytes_per_second"]
                results["pass_through"]["of_socat"] = ratio
            count = {"count": 300}
            direct = await outside("connects", {"proxy": 0, "ca": "", "port": plain} | count)
            tunnel = await inside(agent, "connects", {"proxy": HTTP_PORT, "ca": "", "port": plain} | count)
            results["new_connection"] = {"direct_ms": direct["p50_ms"], "door_ms": tunnel["p50_ms"]}
            base = {
                "proxy": 0,
                "port": https,
                "ca": str(authority.file),
                "seconds": options.seconds,
                "at_once": 1,
            }
            direct = await outside("requests", base)
            await doors.close("sb-bench")
            await door("pass")
            passed = await inside(agent, "requests", base | {"proxy": HTTP_PORT})
            await doors.close("sb-bench")
            await door("inspect")
            bundle = folder / "inspect.pem"
            bundle.write_bytes(await doors.ca("sb-bench"))
            through_door = base | {"proxy": HTTP_PORT, "ca": str(bundle)}
            inspected = await inside(agent, "requests", through_door)
            ten = await inside(agent, "requests", through_door | {"at_once": 10})
            direct_ten = await outside("requests", base | {"at_once": 10})
            results["request"] = {
                "direct_p50_ms": direct["p50_ms"],
                "pass_added_p50_ms": passed["p50_ms"] - direct["p50_ms"],
                "inspected_added_p50_ms": inspected["p50_ms"] - direct["p50_ms"],
                "inspected_per_second_at_10": ten["per_second"],
                "direct_per_second_at_10": direct_ten["per_second"],
            }
            await doors.close("sb-bench")
            await door("tcp", bandwidth=80_000_000)
            limited = await inside(agent, "upload", plan | {"proxy": HTTP_PORT, "megabytes": 40})
            results["bandwidth"] = {
                "limit_mb_per_second": 10.0,
                "got": limited["megabytes_per_second"] * 1.048576,
            }
        results["idle"] = await idle_doors(folder / "idle", options.doors)
    finally:
        dns.close()
        agent.close()
        server.kill()
        await server.wait()
        subprocess.run(["rm", "-rf", folder], check=True)
    return results


class loopback_dns:
    """A DNS server that knows one name."""

    def __await__(self) -> Any:
        return self._start().__await__()

    async def _start(self) -> loopback_dns:
        from ipaddress import ip_address

        from ringfence.egress.resolver import reply

        class Answer(asyncio.DatagramProtocol):
            def connection_made(self, transport: Any) -> None:
                self.transport = transport

            def datagram_received(self, data: bytes, address: Any) -> None:
                self.transport.sendto(reply(data, [ip_address("127.0.0.1")]), address)

        self.transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            Answer, ("127.0.0.1", 0)
        )
        self.address = f"127.0.0.1:{self.transport.get_extra_info('sockname')[1]}"
        return self

    def close(self) -> None:
        self.transport.close()


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        asyncio.run(serve(sys.argv[2]))
    elif sys.argv[1:2] == ["upload"]:
        print(json.dumps(upload(json.loads(sys.argv[2]))))
    elif sys.argv[1:2] in (["requests"], ["connects"]):
        work = requests if sys.argv[1] == "requests" else connects
        print(json.dumps(asyncio.run(work(json.loads(sys.argv[2])))))
    else:
        parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
        parser.add_argument("--megabytes", type=int, default=512)
        parser.add_argument("--seconds", type=float, default=5.0)
        parser.add_argument("--doors", type=int, default=1000)
        parser.add_argument("--json", action="store_true")
        options = parser.parse_args()
        results = asyncio.run(measure(options))
        print(json.dumps(results, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
