"""Runs the shipped suite on one runtime, in a process of its own, and leaves nothing behind however it ends.

The suite is pytest's business: ``ringfence.conformance.reporting`` tells us over a pipe what happens there.
All that the session makes lies in one folder of ours, state root included: what a killed one left is found.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ringfence.cli.output import note, printable
from ringfence.model.errors import RuntimeUnavailable

# What the suite needs: module, and the package that brings it.
NEEDED = {"pytest": "pytest", "pytest_asyncio": "pytest-asyncio", "pytest_timeout": "pytest-timeout"}
REMEDY = "pip install 'ringfence[conformance]'"
PATIENCE = 2  # signals that a clean-up ignores; whoever sends more wants us gone
CLEAN_UP = 60.0  # seconds that an interrupted session gets to take its sandboxes down
PER_TEST = 120  # seconds; the suite itself gives runtimes more that start slowly
_INI = f"""[pytest]
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
timeout = {PER_TEST}
"""
_NO_TESTS = 5  # pytest's exit code


class Interrupted(KeyboardInterrupt):
    """A signal wants us to end; ``number`` is the signal's. As with Ctrl-C, nobody takes it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(slots=True)
class Session:
    """What the suite came to on one runtime. ``areas``: subject → outcome → count."""

    runtime: str
    collected: int = 0
    areas: dict[str, Counter[str]] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    xfailed: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, str]] = field(default_factory=list)
    expected: dict[str, Any] | None = None  # the committed row of capabilities
    trouble: str = ""  # why the session itself failed
    seconds: float = 0.0

    def count(self, outcome: str) -> int:
        """Tests of all areas with this outcome."""
        return sum(counts[outcome] for counts in self.areas.values())

    @property
    def done(self) -> int:
        """Tests that have ended."""
        return sum(counts.total() for counts in self.areas.values())

    @property
    def ok(self) -> bool:
        """No test failed, and the session itself ended well."""
        return not self.trouble and not self.failures

    def take(self, line: dict[str, Any]) -> None:
        """One line of the session's."""
        if "collected" in line:
            self.collected = int(line["collected"])
        elif "runtime" in line:
            self.expected = line["expected"]
        elif "outcome" in line:
            outcome = str(line["outcome"])
            self.areas.setdefault(str(line["area"]), Counter())[outcome] += 1
            if outcome == "failed":
                self.failures.append({"test": f"{line['area']}: {line['test']}", "text": str(line["text"])})
            elif outcome in ("skipped", "xfailed"):
                getattr(self, outcome)[str(line["text"])] += 1

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "ok": self.ok,
            "seconds": round(self.seconds, 1),
            "passed": self.count("passed"),
            "failed": self.count("failed"),
            "areas": {name: dict(counts) for name, counts in self.areas.items()},
            "skipped": dict(self.skipped),
            "xfailed": dict(self.xfailed),
            "failures": self.failures,
            "trouble": self.trouble,
        }


def require_pytest() -> None:
    """See that the suite can run.

    Raises:
        RuntimeUnavailable: pytest or one of its plugins is missing; the hint says how to get them.
    """
    missing = [package for module, package in NEEDED.items() if find_spec(module) is None]
    if missing:
        raise RuntimeUnavailable(
            f"the conformance suite needs {', '.join(missing)}, not installed for {sys.executable}",
            hint=REMEDY,
        )


class Signals:
    """SIGINT, SIGTERM and SIGHUP raise :class:`Interrupted` once; more are ignored until it is enough."""

    def __init__(self) -> None:
        self.number = 0
        self._ignored = 0
        self.despair: Callable[[], None] = lambda: None

    @contextmanager
    def caught(self) -> Iterator[None]:
        """While the suites run."""
        before = {
            each: signal.signal(each, self._handle) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _handle(self, number: int, _: object) -> None:
        if not self.number:
            self.number = number
            raise Interrupted(number)
        self._ignored += 1
        if self._ignored > PATIENCE:
            self.despair()


def run(
    runtime: str,
    keyword: str | None,
    signals: Signals,
    progress: Callable[[Session, dict[str, Any]], None],
) -> Session:
    """Run the suite on one runtime, telling ``progress`` every line of it.

    Raises:
        Interrupted: a signal came; the session has ended and nothing of it is left.
    """
    session = Session(runtime)
    folder = Path(tempfile.mkdtemp(prefix="rf-suite-"))
    started = time.monotonic()
    try:
        folder.chmod(0o711)  # a workload's host user passes through to its folder, and can't list
        _run_in(folder, session, keyword, signals, progress)
    finally:
        session.seconds = time.monotonic() - started
        _sweep(folder)
        shutil.rmtree(folder, ignore_errors=True)
    return session


def _run_in(
    folder: Path,
    session: Session,
    keyword: str | None,
    signals: Signals,
    progress: Callable[[Session, dict[str, Any]], None],
) -> None:
    (folder / "pytest.ini").write_text(_INI)
    reader, writer = os.pipe()
    with open(folder / "log", "w+b") as log, open(reader, encoding="utf-8") as lines:
        try:
            child = subprocess.Popen(
                _command(folder, session.runtime, keyword),
                cwd=folder,
                env=_environment(folder, writer),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(writer,),
                # A session of its own: a terminal's Ctrl-C reaches it once, through us.
                start_new_session=True,
            )
        finally:
            os.close(writer)
        signals.despair = child.kill
        try:
            for line in lines:
                told = json.loads(line)
                session.take(told)
                progress(session, told)
            child.wait()
        except BaseException:
            _end(child)
            raise
        finally:
            signals.despair = lambda: None
        log.seek(0)
        session.trouble = _trouble(child.returncode, session, log.read().decode(errors="replace"))


def _command(folder: Path, runtime: str, keyword: str | None) -> list[str]:
    from importlib.metadata import entry_points

    argv = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    argv += ["-c", str(folder / "pytest.ini"), f"--rootdir={folder}", f"--basetemp={folder / 'pt'}"]
    if not any(found.name == "ringfence" for found in entry_points(group="pytest11")):
        argv += ["-p", "ringfence.conformance.plugin"]
    argv += ["-p", "ringfence.conformance.reporting", f"--ringfence-runtime={runtime}"]
    if keyword:
        argv += ["-k", keyword]
    return [*argv, "--pyargs", "ringfence.conformance.test_runtime"]


def _environment(folder: Path, pipe: int) -> dict[str, str]:
    import ringfence
    from ringfence.node.state import default_root

    place = str(Path(ringfence.__file__).parents[1])
    env = {**os.environ, "TMPDIR": str(folder), "RINGFENCE_CONFORMANCE_PIPE": str(pipe)}
    env["RINGFENCE_CONFORMANCE_PARENT"] = str(os.getpid())
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [place, env.get("PYTHONPATH")]))
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    env.pop("PYTEST_ADDOPTS", None)
    # What is made once a machine (compiled interpreters) is kept where every other run of this user finds it.
    env.setdefault("RINGFENCE_MODULES", str(default_root() / "modules"))
    return env


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ask the session to end as Ctrl-C does, so that it takes its sandboxes down; then insist."""
    if child.poll() is None:
        note("ending: the sandboxes of the running test are taken down")
        with suppress(ProcessLookupError):
            child.send_signal(signal.SIGINT)
    try:
        child.wait(CLEAN_UP)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _trouble(code: int, session: Session, log: str) -> str:
    """Why the session is no result; empty if it is one."""
    if code in (0, _NO_TESTS) or (code == 1 and session.failures):
        return ""
    last = [line for line in log.strip().splitlines() if line.strip()][-12:]
    end = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"the session ended with {end}: " + printable(" / ".join(last))[-2000:]


def _sweep(folder: Path) -> None:
    """Destroy what a session left that was killed: ephemeral sandboxes died with it, kept ones live."""
    roots = list(folder.glob("*/nodes"))
    if not roots:
        return
    import asyncio

    from ringfence.node.service import Node

    async def destroy(root: Path) -> None:
        async with await Node.open(root) as node:
            for sandbox in node.sandboxes():
                await sandbox.destroy()
            if node.leftovers:
                note(f"left behind: {printable(node.leftovers)}")

    for path in roots:
        asyncio.run(destroy(path.parent))
