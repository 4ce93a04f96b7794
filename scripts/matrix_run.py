"""The run behind docs/matrix.json: suites, probe and bench of every runtime, by the commands users have."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("suites", "probe", "bench")
Table = dict[str, Any]
_FACTS = ("level", "boundary", "health", "version", "reason", "ran")
_OUTCOMES = ("capabilities", "passed", "failed", "areas", "skipped", "xfailed", "trouble")
# An engine's own client, where another program of that name comes first in PATH.
_VARIABLES = {"docker": "DOCKER_HOST", "podman": "CONTAINER_HOST"}


class Failed(Exception):
    """A command that should have measured something did not; the message says why."""


def ringfence(*arguments: str) -> Any:
    """The document that a command prints; exit code 1 is a verdict.

    Raises:
        Failed: it came to none.
    """
    argv = [sys.executable, "-m", "ringfence", *arguments, "--json"]
    print("matrix: " + " ".join(argv[2:]), file=sys.stderr, flush=True)
    done = subprocess.run(argv, stdout=subprocess.PIPE, check=False, cwd=ROOT)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        found = {}
    if done.returncode not in (0, 1) or "error" in found or not found:
        reason = found.get("error", {}).get("message", f"exit code {done.returncode}")
        raise Failed(f"ringfence {arguments[0]}: {reason}")
    return found


def end_well() -> None:
    """A signal ends this process with everything taken down: engines and folders don't stay."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def measure(
    names: Sequence[str], parts: Sequence[str] = PARTS, suites: Sequence[str] = (), old: Table | None = None
) -> Table:
    """What a run on this machine shows, as docs/matrix.json keeps it.

    Args:
        names: runtimes; none means every one (without the suites: every one that ran before).
        parts: what to run; of the others what ``old`` has stays.
        suites: files that ``ringfence conformance --json`` has printed here, instead of running it.
        old: the run before.
    """
    made: Table = old or {"machine": {}, "kernel": os.uname().release, "root": os.geteuid() == 0}
    runtimes: dict[str, Table] = made.setdefault("runtimes", {})
    with contextlib.ExitStack() as stack:
        chosen = list(names) or [name for name, entry in runtimes.items() if entry["ran"]]
        for name in _VARIABLES:
            if not names or name in {each.partition(":")[0] for each in names}:
                stack.enter_context(engine(name))
        told = [json.loads(Path(path).read_text(encoding="utf-8")) for path in suites]
        if "suites" in parts and not suites:
            words = [word for name in names or ["all"] for word in ("--runtime", name)]
            try:
                told = [ringfence("conformance", *words)]
            except Failed as error:
                raise SystemExit(f"matrix: {error}") from None
        if told:
            chosen = []
            for document in told:
                made |= {key: document[key] for key in ("kernel", "root")}
                for found in document["runtimes"]:
                    runtimes[found["runtime"]] = _suites_of(found, runtimes.get(found["runtime"], {}))
                    chosen += [found["runtime"]] * bool(found["ran"])
        if missing := [name for name in chosen if name not in runtimes]:
            raise SystemExit(f"matrix: {', '.join(missing)}: not in docs/matrix.json; run the suites, too")
        if {"probe", "bench"} & {*parts}:
            stack.enter_context(home())
        for name in chosen:
            if "probe" in parts:
                _probe(name, runtimes[name])
            if "bench" in parts:
                made["machine"] = _costs(name, runtimes[name]) or made["machine"]
    return made


def _suites_of(found: Table, before: Table) -> Table:
    entry: Table = {key: found[key] for key in _FACTS}
    if not found["ran"]:
        return entry
    entry |= {key: found[key] for key in _OUTCOMES}
    entry["failures"] = [failure["test"] for failure in found["failures"]]
    kept = ("probe", "cold", "memory", "unmeasured")
    return entry | {"unmeasured": []} | {key: before[key] for key in kept if key in before}


def _probe(name: str, entry: Table) -> None:
    try:
        probed = ringfence("probe", "--runtime", name, "--template", template())["runtimes"][0]
    except Failed as error:
        _note(entry, "probe", str(error))
        return
    _note(entry, "probe", "")
    entry["probe"] = {promise: value["state"] for promise, value in probed["promises"].items()}


def _costs(name: str, entry: Table) -> Table:
    """Cold start and memory of one runtime into its entry. Returns the machine."""
    options = ("--quick", "--only", "cold", "--only", "memory", "--against", "", "--template", template())
    try:
        bench = ringfence("bench", "--runtime", name, *options)
    except Failed as error:
        _note(entry, "bench", str(error))
        return {}
    _note(entry, "bench", "")
    figures = {figure["name"]: figure for figure in bench["figures"]}
    for key, what in (("cold", "cold start to first output"), ("memory", "memory of an idle sandbox")):
        figure = figures.get(f"{name}: {what}")
        entry[key] = figure and {key: value for key, value in figure.items() if key != "name"}
    measured: Table = bench["machine"]
    return measured


def _note(entry: Table, command: str, text: str) -> None:
    """What a command could not measure, in place of what it said of that before."""
    entry["unmeasured"] = [old for old in entry["unmeasured"] if not old.startswith(f"ringfence {command}:")]
    entry["unmeasured"] += [text] * bool(text)


@contextlib.contextmanager
def engine(name: str) -> Iterator[None]:
    """A container engine of this run's own, unless the caller names one or none can be started here."""
    from support import engines

    if os.environ.get(_VARIABLES[name]) or engines.lacking(name):
        yield
        return
    with engines.running(name) as engine:
        os.environ[_VARIABLES[name]] = engine.address
        try:
            yield
        finally:
            del os.environ[_VARIABLES[name]]


@contextlib.contextmanager
def home() -> Iterator[None]:
    """A state root of this run's own, with a template for runtimes that can't show the host's programs."""
    from ringfence.conformance import templates
    from ringfence.node.state import default_root

    modules = os.environ.get("RINGFENCE_MODULES") or str(default_root() / "modules")
    with tempfile.TemporaryDirectory(prefix="rf-matrix-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)
        before = os.environ.copy()
        os.environ |= {"RINGFENCE_HOME": folder, "RINGFENCE_MODULES": modules}
        try:
            templates.ensure(Path(folder))
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def template() -> str:
    from ringfence.conformance import templates

    return templates.NAME
