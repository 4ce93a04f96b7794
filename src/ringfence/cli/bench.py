"""``ringfence bench``: speed and memory through the contract, beside other tools in the same run.

docs/SPECIFICATION.md has the promises and the method. Each sample is one whole operation; ours and the
references' alternate, so that what else the machine does hits both.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, cast

from ringfence.cli import hello, timing
from ringfence.cli.output import note, print_json, printable, table
from ringfence.cli.parsing import Parser, add_json
from ringfence.cli.references import LIMITS, REFERENCES, Absent, Reference
from ringfence.cli.timing import Samples
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import InvalidRequest, RingfenceError
from ringfence.model.levels import Level
from ringfence.model.policy import Isolation, Mount, Policy
from ringfence.model.quantities import format_size
from ringfence.model.sandbox import EffectiveBoundary, SandboxRequest
from ringfence.node.service import Node
from ringfence.runtimes.contract import Handle, Runtime, StartSpec

INSIDE = "/mnt/hello"
MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    starts: int
    execs: int
    rate_seconds: float
    idle: int
    alive: int
    cli: int
    warm: int = 3

    def for_start(self, seconds: float) -> Effort:
        """Less of it where a single start takes so long: a bench ends within minutes on a virtual machine."""
        if seconds < _SLOW:
            return self
        starts, idle, alive, warm = (12, 4, 8, 1) if seconds > _SLOWEST else (40, 20, 50, 2)
        return replace(
            self,
            starts=min(self.starts, starts),
            idle=min(self.idle, idle),
            alive=min(self.alive, alive),
            warm=min(self.warm, warm),
        )


FULL = Effort(starts=200, execs=500, rate_seconds=3.0, idle=200, alive=500, cli=30)
QUICK = Effort(starts=30, execs=100, rate_seconds=1.0, idle=40, alive=100, cli=8)
WORKERS = (1, 2, 4, 8, 16)
_SLOW, _SLOWEST = 0.15, 1.0  # seconds of a start
# Seconds before each start that is compared: what the last one left is taken down, what is made ahead made.
_REST = 0.03
# What a runtime that runs no programs is asked to run: its Python, which is what it is for.
MAPPED = ("python3", "-I", "-S", "-c", "print('hello')")


@dataclass(slots=True)
class Promise:
    """A line of docs/SPECIFICATION.md, measured. ``limit`` is the most, or the least with ``at_least``."""

    what: str
    limit: float
    value: float
    unit: str
    at_least: bool = False
    reference: str = ""

    @property
    def held(self) -> bool:
        """Whether it holds here and now."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        sign = ">=" if self.at_least else "<="
        return {
            "what": self.what,
            "promise": f"{sign} {self.limit:g} {self.unit}".strip(),
            "measured": round(self.value, 3),
            "unit": self.unit,
            "held": self.held,
            "reference": self.reference,
        }


def configure(parser: Parser) -> None:
    """Add the options."""
    parser.description = (
        "Measure through the same contract that everything uses, with the default policy, size small and\n"
        "every layer on: cold start to the first byte of a static command's output, a command in a running\n"
        "sandbox, create + run + destroy a second, memory of an idle sandbox, start of this command line.\n\n"
        "Prints p50, p95 and p99 with the number of samples, other tools beside them, and each promise of\n"
        "docs/SPECIFICATION.md. Exits 1 if one does not hold. Takes a minute or two; use an idle machine."
    )
    parser.epilog = (
        "examples:\n  ringfence bench --quick\n  ringfence bench --runtime jail --runtime bubblewrap\n"
        "  ringfence bench --against bwrap,runc,docker --json > figures.json\n"
        "  ringfence bench --api --json > api.json\n  ringfence bench --egress"
    )
    parser.add_argument("--runtime", action="append", metavar="NAME", help="may be repeated (default: jail)")
    parser.add_argument(
        "--against", default="bwrap", metavar="TOOLS", help=f"of {', '.join(REFERENCES)} (default: bwrap)"
    )
    parser.add_argument(
        "--template", metavar="NAME", help="for runtimes that can't run on the host's own files"
    )
    parser.add_argument(
        "--api",
        action="store_true",
        help="a service of its own instead: creates, commands, code, files, ports",
    )
    parser.add_argument(
        "--egress", action="store_true", help="the egress door instead: latency, rate, throughput, idle doors"
    )
    parser.add_argument(
        "--runtimes",
        action="store_true",
        help="each runtime beside the program that it is built on; restores; images of any size",
    )
    parser.add_argument(
        "--store",
        metavar="URL",
        help="with --api: keep its state there; postgresql://… is also compared with SQLite (without: with"
        " a PostgreSQL of the run's own, where there is one)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples: seconds instead of minutes")
    parser.add_argument(
        "--only",
        action="append",
        choices=("cold", "exec", "rate", "memory", "cli", "stores"),
        help="this part only (may be repeated); stores: with --api, PostgreSQL beside SQLite",
    )
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Measure, and print."""
    if options.api:
        from ringfence.cli import bench_api

        return bench_api.run(options)
    if options.egress:
        from ringfence.cli import bench_egress

        return bench_egress.run(options)
    if "stores" in (options.only or ()):
        raise InvalidRequest("stores are what a service has", hint="ringfence bench --api --only stores")
    names = [name for name in options.against.split(",") if name]
    for name in names:
        if name not in REFERENCES:
            raise InvalidRequest(f"--against {name}: unknown tool", hint=f"known: {', '.join(REFERENCES)}")
    with tempfile.TemporaryDirectory(prefix="ringfence-bench-") as folder:
        os.chmod(folder, 0o755)  # noqa: S103 - the workload's user runs what lies here
        try:
            inside = os.path.join(folder, "mnt")
            os.mkdir(inside, 0o755)
            program = hello.write(inside)
        except KeyError:
            raise InvalidRequest(f"no static command for {os.uname().machine} yet") from None
        bench = Bench(QUICK if options.quick else FULL, program, options.only, quiet=options.json)
        bench.template = options.template
        if options.runtimes:
            from ringfence.cli import bench_runtimes

            bench_runtimes.run(bench, options.runtime, folder)
            return bench.told(json=options.json)
        if bench.wants("cold"):
            bench.prepare(names, folder)
        try:
            _run(bench.runtimes(options.runtime or ["jail"]))
            if bench.wants("cli"):
                bench.command_line()
        finally:
            for reference in bench.references:
                reference.remove()
    return bench.told(json=options.json)


class Bench:
    """One run."""

    def __init__(self, effort: Effort, program: str, only: list[str] | None, *, quiet: bool) -> None:
        self.full = effort
        self.effort = effort  # of the runtime that is being measured
        self.program = program
        self.template: str | None = None  # where the host's files can't be used
        self.command: tuple[str, ...] = (INSIDE,)
        self.only = only
        self.quiet = quiet
        self.own = False  # each runtime beside the program that it is built on, and no other
        self.references: list[Reference] = []
        self.absent: dict[str, str] = {}
        self.figures: list[dict[str, Any]] = []
        self.promises: list[Promise] = []
        self.boundaries: list[EffectiveBoundary] = []

    def wants(self, part: str) -> bool:
        """Whether this part is to be measured."""
        return not self.only or part in self.only

    def prepare(self, names: list[str], folder: str) -> None:
        """Make the references ready; one that isn't here is reported, not fatal."""
        for name in names:
            place = os.path.join(folder, name)
            os.mkdir(place)
            reference = REFERENCES[name](self.program, place)
            try:
                reference.prepare()
                reference.start(None)
            except (Absent, OSError, RuntimeError) as error:
                self.absent[name] = str(error)
                reference.remove()
            else:
                self.references.append(reference)

    async def runtimes(self, names: list[str]) -> None:
        """Everything that goes through the node."""
        async with await Node.open(adopt=False) as node:
            for name in names:
                await node.runtime(name)  # an unknown name is an error before anything is measured
            for name in names:
                try:
                    await self.runtime(node, name)
                except RingfenceError as error:
                    if len(names) == 1:
                        raise
                    self.absent[name] = error.message

    async def runtime(self, node: Node, name: str) -> None:
        """One of them."""
        has = (await node.runtime(name)).capabilities()
        self.command = (INSIDE,) if has.mounts and has.programs else ("/bin/echo", "hello")
        if not has.programs:
            self.command = MAPPED
        request = self.request(name, mounts=has.mounts and has.programs)
        if self.template and not has.host_template:
            request = replace(request, template=self.template)
        first = await node.create(request)
        try:
            self.boundaries.append(await first.boundary())
        finally:
            await first.destroy()
        began = time.perf_counter()
        second = await node.create(request)  # what the first of all had to make is there now
        self.effort = self.full.for_start(time.perf_counter() - began)
        await second.destroy()
        if self.wants("cold"):
            await self._cold(node, name, request)
        if self.wants("exec"):
            await self._exec(node, name, request)
        if self.wants("rate"):
            await self._rate(node, name, request)
        if self.wants("memory"):
            await self._memory(node, name, request)
        if name == "wasm" and self.wants("exec"):
            await self._calls(node)

    def request(self, runtime: str, *, mounts: bool) -> SandboxRequest:
        """What is asked for: everything as it is by default, and the command where it can be shown."""
        isolation = Isolation(runtime=runtime, minimum=Level.L1, allow_emulated=True)
        policy = Policy().with_wall(isolation=isolation)
        filesystem = policy.wall.filesystem
        if not mounts:
            return SandboxRequest(policy=policy)
        # The folder, on one that is there: a mount point that a template lacks is a layer more.
        shown = (Mount(os.path.dirname(self.program), os.path.dirname(INSIDE)),)
        return SandboxRequest(policy=policy.with_wall(filesystem=replace(filesystem, mounts=shown)))

    async def _cold(self, node: Node, name: str, request: SandboxRequest) -> None:
        self.say(f"{name}: cold start")
        ours = Samples(f"{name}: cold start to first output")
        whole = Samples(f"{name}: the same, with what the node does")
        clock = Clocked(await node.runtime(name))
        node.use(cast(Runtime, clock))
        beside = [each for each in self.references if not self.own or (name, each.name) in LIMITS]
        bare = "bare " if self.own else ""
        others = [Samples(f"{bare}{reference.name}: cold start to first output") for reference in beside]
        for turn in range(-self.effort.warm, self.effort.starts):
            await asyncio.sleep(_REST)
            await _start_once(
                node, request, self.command, clock, *((ours, whole) if turn >= 0 else (None, None))
            )
            for reference, samples in zip(beside, others, strict=True):
                # The slow ones need fewer samples to be told from the fast ones.
                if reference.name != "bwrap" and turn % 5 and not self.own:
                    continue
                await asyncio.sleep(_REST)
                reference.start(samples if turn >= 0 else None)
        node.use(clock.driver)
        self.figures += [samples.as_dict() for samples in (ours, whole, *others)]
        if self.command == MAPPED:
            text = "of a Python program, its interpreter compiled before"
            self.promises.append(Promise(f"{ours.name}, p50", 80, ours.percentile(50), "ms", reference=text))
        for reference, samples in zip(beside, others, strict=True):
            limit = LIMITS.get((name, reference.name))
            ratio = ours.percentile(50) / samples.percentile(50)
            self.figures.append(
                {"name": f"{name} / {bare}{reference.name}, cold, p50", "unit": "ratio", "value": ratio}
            )
            if limit is not None:
                text = f"{ours.percentile(50):.2f} ms beside {samples.percentile(50):.2f} ms"
                self.promises.append(
                    Promise(
                        f"{name} cold start beside {bare}{reference.name}, p50",
                        limit,
                        ratio,
                        "x",
                        reference=text,
                    )
                )

    async def _exec(self, node: Node, name: str, request: SandboxRequest) -> None:
        self.say(f"{name}: commands in a running sandbox")
        samples = Samples(f"{name}: command in a running sandbox")
        sandbox = await node.create(request)
        try:
            link = await sandbox.link()
            for turn in range(-self.effort.warm, self.effort.execs):
                started = time.perf_counter()
                result = await sandbox.run(ProcessSpec(self.command, id=f"bench-{turn}"))
                if turn >= 0:
                    samples.add(started)
                if result.end.exit_code != 0:
                    raise RuntimeError(f"the static command ended with {result.end}")
                await link.remove(f"bench-{turn}")
        finally:
            await sandbox.destroy()
        self.figures.append(samples.as_dict())
        if name == "jail":
            self.promises.append(
                Promise(f"{name}: command in a running sandbox, p50", 1.5, samples.percentile(50), "ms")
            )

    async def _calls(self, node: Node) -> None:
        from ringfence.cli import bench_wasm

        self.say("wasm: calls of a function")
        samples = await bench_wasm.calls(node, self.effort.execs, self.effort.warm)
        self.figures.append(samples.as_dict())
        self.promises.append(Promise(f"{samples.name}, p50", 1.0, samples.percentile(50), "ms"))

    async def _rate(self, node: Node, name: str, request: SandboxRequest) -> None:
        best = 0.0
        for workers in WORKERS:
            self.say(f"{name}: create + run + destroy, {workers} at once")
            rate, count = await self._rate_of(node, request, workers)
            best = max(best, rate)
            label = f"{name}: create + run + destroy, {workers} at once"
            self.figures.append({"name": label, "unit": "1/s", "n": count, "value": round(rate, 1)})
        if name == "jail":
            self.promises.append(
                Promise(f"{name}: create + run + destroy, sustained", 250, best, "1/s", at_least=True)
            )

    async def _rate_of(self, node: Node, request: SandboxRequest, workers: int) -> tuple[float, int]:
        count = 0
        started = time.perf_counter()
        end = started + self.effort.rate_seconds

        async def work() -> None:
            nonlocal count
            while time.perf_counter() < end:
                await _whole_life(node, request, self.command)
                count += 1

        await asyncio.gather(*(work() for _ in range(workers)))
        return count / (time.perf_counter() - started), count

    async def _memory(self, node: Node, name: str, request: SandboxRequest) -> None:
        self.say(f"{name}: {self.effort.idle} idle, then {self.effort.alive} alive")
        sandboxes: list[Any] = []
        try:
            await _fill(node, request, sandboxes, 1)  # the template and the first of everything is not theirs
            await asyncio.sleep(0.2)
            before = timing.memory_available()
            await _fill(node, request, sandboxes, 1 + self.effort.idle)
            await asyncio.sleep(0.2)
            each = (before - timing.memory_available()) / self.effort.idle
            await _fill(node, request, sandboxes, self.effort.alive)
            alive = sum([await _answers(sandbox, self.command) for sandbox in sandboxes])
        finally:
            for start in range(0, len(sandboxes), 8):
                await asyncio.gather(*(sandbox.destroy() for sandbox in sandboxes[start : start + 8]))
        self.figures.append(
            {
                "name": f"{name}: memory of an idle sandbox",
                "unit": "MB",
                "n": self.effort.idle,
                "value": each / 1e6,
            }
        )
        self.figures.append({"name": f"{name}: alive at once", "unit": "", "n": 1, "value": alive})
        if name == "jail":
            self.promises.append(Promise(f"{name}: memory of an idle sandbox", 1.0, each / 1e6, "MB"))
            self.promises.append(
                Promise(f"{name}: alive at once", self.effort.alive, alive, "sandboxes", at_least=True)
            )

    def command_line(self) -> None:
        """Our own start, beside Python's."""
        self.say("command line")
        python, own = sys.executable, _own_command()
        env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        pairs = (
            ("ringfence run -- true", [*own, "run", "--", "true"], "import asyncio", 60.0),
            ("ringfence --help", [*own, "--help"], "pass", 80.0),
        )
        for label, argv, code, more in pairs:
            ours, plain = Samples(label), Samples(f"python -c '{code}'")
            for turn in range(-self.effort.warm, self.effort.cli):
                timing.to_the_end(argv, ours if turn >= 0 else None, env)
                timing.to_the_end([python, "-c", code], plain if turn >= 0 else None, env)
            self.figures += [ours.as_dict(), plain.as_dict()]
            text = f"{ours.percentile(50):.0f} ms beside {plain.percentile(50):.0f} ms"
            difference = ours.percentile(50) - plain.percentile(50)
            self.promises.append(
                Promise(f"{label} over python -c '{code}', p50", more, difference, "ms", reference=text)
            )

    def as_dict(self) -> dict[str, Any]:
        """The document of ``--json``."""
        return {
            "machine": _machine(),
            "boundaries": [boundary.as_dict() for boundary in self.boundaries],
            "figures": self.figures,
            "promises": [promise.as_dict() for promise in self.promises],
            "absent": self.absent,
        }

    def told(self, *, json: bool) -> int:
        """Print it. Returns the exit code: 1 if a promise does not hold."""
        if json:
            print_json(self.as_dict())
        else:
            self.print()
        return 0 if all(promise.held for promise in self.promises) else 1

    def print(self) -> None:
        """Tables."""
        machine = _machine()
        print(f"{machine['cpus']} CPUs, {format_size(machine['memory'])}, Linux {machine['kernel']}", end="")
        print(f", load {machine['load']:.2f}\n")
        for wall in self.boundaries:
            limits = ", ".join(f"{name} {how}" for name, how in wall.limits.items())
            print(
                f"{wall.runtime}: {wall.level.value} {wall.boundary.value}; own {' '.join(wall.namespaces)};"
                f" seccomp {wall.seccomp}; landlock {wall.landlock};"
                f" capabilities {', '.join(wall.capabilities) or 'none'}; {limits}\n"
            )
        timed = [figure for figure in self.figures if "p50" in figure]
        rows = [
            (f["name"], f["n"], *(f"{f[key]:.2f}" for key in ("min", "p50", "p95", "p99"))) for f in timed
        ]
        if rows:
            table(("milliseconds", "n", "min", "p50", "p95", "p99"), rows)
        rows = [
            (f["name"], f.get("n", ""), f"{f['value']:.2f} {f['unit']}") for f in self.figures if "value" in f
        ]
        if rows:
            table(("other figures", "n", "value"), rows)
        for name, reason in self.absent.items():
            print(f"{name}: absent: {printable(reason)}")
        shown = [promise.as_dict() for promise in self.promises]
        rows = [
            (p["what"], p["promise"], f"{p['measured']:g} {p['unit']}", "held" if p["held"] else "not held",
             p["reference"])
            for p in shown
        ]  # fmt: skip
        if rows:
            print()
            table(("promise", "limit", "measured", "state", "from"), rows)

    def say(self, text: str) -> None:
        """What is under way, on a terminal."""
        if not self.quiet and sys.stderr.isatty():
            note(text)


class Clocked:
    """A driver that notes when a wall was asked of it: there the contract begins."""

    def __init__(self, runtime: Runtime) -> None:
        self.driver = runtime
        self.asked = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.driver, name)

    async def start(self, spec: StartSpec) -> Handle:
        """See the contract."""
        self.asked = time.perf_counter()
        return await self.driver.start(spec)


async def _start_once(
    node: Node,
    request: SandboxRequest,
    command: tuple[str, ...],
    clock: Clocked,
    contract: Samples | None,
    whole: Samples | None,
) -> None:
    """From nothing to the first byte of output; the end is not timed."""
    started = time.perf_counter()
    sandbox = await node.create(request)
    try:
        process = await sandbox.start(ProcessSpec(command))
        async for _ in process:
            break
        else:
            raise RuntimeError("the static command said nothing")
        if contract is not None and whole is not None:
            contract.add(clock.asked)
            whole.add(started)
        await process.close()
    finally:
        await sandbox.destroy()


async def _whole_life(node: Node, request: SandboxRequest, command: tuple[str, ...]) -> None:
    sandbox = await node.create(request)
    try:
        result = await sandbox.run(ProcessSpec(command))
    finally:
        await sandbox.destroy()
    if result.end.exit_code != 0:
        raise RuntimeError(f"the static command ended with {result.end}")


async def _fill(node: Node, request: SandboxRequest, sandboxes: list[Any], count: int) -> None:
    while len(sandboxes) < count:
        more = min(4, count - len(sandboxes))
        made = await asyncio.gather(*(node.create(request) for _ in range(more)), return_exceptions=True)
        sandboxes += [sandbox for sandbox in made if not isinstance(sandbox, BaseException)]
        for failed in made:
            if isinstance(failed, BaseException):
                raise failed


async def _answers(sandbox: Any, command: tuple[str, ...]) -> bool:
    if sandbox.ended.done():
        return False
    result = await sandbox.run(ProcessSpec(command))
    return bool(result.end.exit_code == 0)


def _run(main: Coroutine[Any, Any, None]) -> None:
    """On the event loop of ``ringfence node``: uvloop, where the packages of the service are installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def _own_command() -> list[str]:
    """The installed script beside this Python, else the module."""
    script = os.path.join(os.path.dirname(sys.executable), "ringfence")
    if os.access(script, os.X_OK):
        return [script]
    return [sys.executable, "-m", "ringfence"]


def _machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": os.uname().release,
        "python": sys.version.split()[0],
        "root": os.geteuid() == 0,
        "load": os.getloadavg()[0],
    }
