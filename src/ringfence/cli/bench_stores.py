"""The same operations on a service with PostgreSQL and on one with SQLite, in one run, turn by turn.

Both services run side by side on this machine, each with a node of its own; only one of them is asked at a
time, in rounds, so that whatever else the machine does meets both. PostgreSQL is what ``--store`` names, or
a private server that is started here and removed again (``synchronous_commit = off``: as safe as SQLite's
write-ahead log is for those transactions that don't ask for more).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from ringfence.cli.bench_api import CODE, MIB, SMALL, ApiBench, Effort, ended, service_of
from ringfence.cli.timing import Samples
from ringfence.model.errors import HostLimit

LIMIT = 1.5  # times what SQLite takes
ROUNDS = 6
_NAMES = ("SQLite", "PostgreSQL")
_Work = Callable[[ApiBench, Any], Awaitable[Any]]


async def compare(effort: Effort, bench: Any, store: str) -> None:
    """Measure both, and add figures and promises. ``store``: a ``postgresql://`` address, or empty."""
    with contextlib.ExitStack() as stack:
        if not store:
            try:
                store = await asyncio.to_thread(stack.enter_context, _server())
            except HostLimit as error:
                bench.absent["PostgreSQL beside SQLite"] = error.message
                return
        bench.say("API: PostgreSQL beside SQLite")
        pair = []
        for address in ("", store):
            made = ApiBench(effort, bench)
            made.url, made.key, made.pid = await asyncio.to_thread(stack.enter_context, service_of(address))
            pair.append(made)
        try:
            for made in pair:
                await made.unlimited()
            await _measured(pair, effort, bench)
        finally:
            for made in pair:
                await made.close()


async def _measured(pair: list[ApiBench], effort: Effort, bench: Any) -> None:
    pool = {"name": "bench", "min": effort.pool, "max": effort.pool, "most": 400, "overflow": 200, **SMALL}
    boxes: dict[ApiBench, Any] = {}
    for made in pair:
        raw = await made.connected()
        await made.ok(raw, "POST", "/v1/pools", pool)
        await _filled(made, raw, effort.pool)
        box = (await made.ok(raw, "POST", "/v1/sandboxes", {**SMALL, "memory": 256 * MIB}))["id"]
        path = f"/v1/sandboxes/{box}/contexts"
        await made.ok(raw, "POST", path, {"id": "bench"})
        await made.ok(raw, "POST", f"{path}/bench/run", {"code": CODE})
        boxes[made] = box

    async def create(made: ApiBench, connection: Any) -> str:
        return str((await made.ok(connection, "POST", "/v1/sandboxes", {"pool": "bench"}))["id"])

    async def delete(made: ApiBench, connection: Any, id: str) -> None:
        await made.ok(connection, "DELETE", f"/v1/sandboxes/{id}")

    async def true(made: ApiBench, connection: Any) -> None:
        path = f"/v1/sandboxes/{boxes[made]}/processes"
        await made.ok(connection, "POST", path, {"argv": ["true"]})

    async def code(made: ApiBench, connection: Any) -> None:
        path = f"/v1/sandboxes/{boxes[made]}/contexts/bench/run"
        await made.ok(connection, "POST", path, {"code": CODE})

    async def listed(made: ApiBench, connection: Any) -> None:
        await made.ok(connection, "GET", "/v1/sandboxes?limit=20")

    rounds: tuple[tuple[str, int, int, float, _Work, Any], ...] = (
        ("create from a pool, 1 at once", 1, effort.creates, 50, create, delete),
        ("create from a pool, 20 at once", 20, effort.creates, 95, create, delete),
        ("true in a running jail", 1, effort.execs, 50, true, None),
        ("warm Python snippet", 1, effort.codes, 50, code, None),
        ("list of sandboxes", 1, effort.execs, 50, listed, None),
    )
    for what, many, count, percent, work, after in rounds:
        samples = [Samples(f"API on {name}: {what}") for name in _NAMES]
        for number in range(ROUNDS):
            order = (0, 1) if number % 2 == 0 else (1, 0)
            for side in order:
                await _turn(pair[side], samples[side], many, max(count // ROUNDS, many) + many, work, after)
        bench.figures += [each.as_dict() for each in samples]
        sqlite, postgres = (each.percentile(percent) for each in samples)
        bench.promises.append(
            _promise(
                f"API: {what}, p{percent:g}, PostgreSQL / SQLite",
                postgres / sqlite,
                f"{postgres:.2f} ms beside {sqlite:.2f} ms",
            )
        )


def _promise(what: str, value: float, reference: str) -> Any:
    from ringfence.cli.bench import Promise

    return Promise(what, LIMIT, value, "x", False, reference)


async def _filled(made: ApiBench, raw: Any, wanted: int) -> None:
    end = time.monotonic() + 120
    while (await made.ok(raw, "GET", "/v1/pools/bench/queue"))["warm"] < wanted:
        if time.monotonic() > end:
            raise HostLimit("the pool was not filled within two minutes", hint="look at the machine's load")
        await asyncio.sleep(0.05)


async def _turn(made: ApiBench, samples: Samples, many: int, count: int, work: _Work, after: Any) -> None:
    """Some operations on one of the two; the first of each connection is not counted."""
    turns = iter(range(count))

    async def worker() -> None:
        connection = await made.connected()
        try:
            first = True
            for _ in turns:
                started = time.perf_counter()
                result = await work(made, connection)
                if not first:
                    samples.add(started)
                first = False
                if after is not None:
                    await after(made, connection, result)
        finally:
            await connection.close()

    await asyncio.gather(*(worker() for _ in range(many)))


@contextlib.contextmanager
def _server() -> Iterator[str]:
    """A PostgreSQL of this run's own, on a unix socket; its address.

    Raises:
        HostLimit: there is none on this machine, or it does not start.
    """
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: path.parent.parent.name
    )
    program = found[-1] if found else Path(shutil.which("postgres") or "")
    if not program.name:
        raise HostLimit("no PostgreSQL server here", hint="Debian: apt install postgresql; or --store URL")
    folder = tempfile.mkdtemp(prefix="ringfence-bench-pg-", dir="/tmp")
    prefix = [] if shutil.which("setpriv") is None else ["setpriv", "--pdeathsig", "QUIT"]
    if os.geteuid() == 0:
        user = next((each for each in pwd.getpwall() if each.pw_name in ("postgres", "nobody")), None)
        if user is None or not prefix:
            raise HostLimit("PostgreSQL does not run as root, and there is nobody else here")
        os.chown(folder, user.pw_uid, user.pw_gid)
        prefix += [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    os.chmod(folder, 0o755)  # noqa: S103 - the API connects as another user
    server: subprocess.Popen[bytes] | None = None
    data = f"{folder}/data"
    try:
        command = [*prefix, str(program.parent / "initdb"), "-D", data, "-U", "postgres", "-A", "trust", "-N"]
        done = subprocess.run(
            [*command, "-E", "UTF8", "--locale=C.UTF-8"], capture_output=True, cwd="/", check=False
        )
        if done.returncode != 0:
            raise HostLimit("PostgreSQL's initdb failed", hint=done.stderr.decode(errors="replace")[-500:])
        options = ["-c", "listen_addresses=", "-c", "synchronous_commit=off", "-c", "max_connections=100"]
        server = subprocess.Popen(
            [*prefix, str(program), "-D", data, "-k", folder, *options],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
        )  # fmt: skip
        end = time.monotonic() + 60
        while not Path(f"{folder}/.s.PGSQL.5432").exists() or not _answers(folder):
            if server.poll() is not None or time.monotonic() > end:
                raise HostLimit("PostgreSQL did not start")
            time.sleep(0.05)
        yield f"postgresql://postgres@/postgres?host={folder}"
    finally:
        if server is not None:
            ended(server, signal.SIGINT)
        shutil.rmtree(folder, ignore_errors=True)


def _answers(folder: str) -> bool:
    import psycopg

    try:
        psycopg.connect(f"postgresql://postgres@/postgres?host={folder}", connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True
