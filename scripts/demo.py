"""An agent's job in a jail, end to end, by the command line that users have.

usage: demo.py [--runtime NAME] [--out FOLDER]

Runs examples/agent-job/job.py on its data file: it computes a chart and a report, then tries everything a
hostile script would. Prints what came out, what was stopped and by which layer, the boundary as measured, and
how long each stage took. Exit status 1 if an attempt succeeded, the host noticed any of it, or an output is
missing.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringfence.cli.output import table
from ringfence.model.quantities import format_size

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "examples" / "agent-job" / "job.py"
DATA = ROOT / "examples" / "agent-job" / "laureates.csv"
LIMITS = ("--memory", "256M", "--disk", "64M", "--pids", "64", "--timeout", "2m")
MIB = 1024**2
# What a bomb asks for: far above the limits, and harmless to the machine if it were granted.
FORKS, FILL, MEMORY = 2000, 256 * MIB, 1024 * MIB

FILES = {"ENOENT": "mount namespace: not there", "EACCES": "file permissions"}
FILTER = {"EPERM": "system call filter", "ENOSYS": "system call filter (no such call)"}
# attempt: answer: the layer that gives it. Any other answer means that it came further than it should.
LAYERS: dict[str, dict[str, str]] = {
    "read a secret of the host": FILES,
    "… through /proc and a symlink": {
        "ENOENT": "mount namespace: not there",
        "EACCES": "no right to trace the agent, so /proc/1 is closed",
    },
    "read a file that everybody may read": FILES,
    "read the host's password hashes": FILES,
    "find and kill a process of the host": {"": "pid namespace: not there"},
    "connect to a server on the host": {"ECONNREFUSED": "network namespace: a loopback of its own"},
    "… by its abstract unix socket": {"ECONNREFUSED": "network namespace: sockets of its own"},
    "reach the metadata service": {"ENETUNREACH": "network namespace: no route"},
    "reach the internet": {"ENETUNREACH": "network namespace: no route"},
    "open a raw socket": FILTER,
    "mount a file system": FILTER,
    "make a user namespace": FILTER,
    "become root": {"EPERM": "no capability", "EINVAL": "user namespace: no such id"},
    "plant a program in /usr/bin": {"EACCES": "file permissions", "EROFS": "read-only mount"},
    "change a kernel setting": {"EROFS": "read-only /proc/sys", "EACCES": "file permissions"},
    "open the disk of the host": {"ENOENT": "minimal /dev"},
    "read the kernel's memory": {"ENOENT": "minimal /dev"},
    "load BPF": FILTER,
    "profile the kernel": FILTER,
    "use io_uring": FILTER,
    "read the kernel's keyrings": FILTER,
    "load a kernel module": FILTER,
    "fork bomb": {"": "process limit"},
    "fill the disk": {"": "disk limit"},
}


@dataclass
class Run:
    """One `ringfence run --json`: its document, its exit status, and how long it took in all."""

    document: dict[str, Any]
    status: int
    seconds: float


@dataclass
class Host:
    """What an attack would reach if it came through: files, a server, a process. Watches them."""

    folder: Path
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    visits: int = 0
    victim: subprocess.Popen[bytes] | None = None
    plant: str = ""

    @contextmanager
    def ready(self) -> Any:
        """Everything is in place inside the context, and gone after it."""
        secret, neighbour = self.folder / "secret.txt", self.folder / "neighbour.txt"
        for path, mode in ((secret, 0o600), (neighbour, 0o644)):
            path.write_text(f"the host's secret is {self.token}\n", encoding="utf-8")
            path.chmod(mode)
        self.folder.chmod(0o755)
        self.plant = f"/usr/bin/ringfence-demo-{self.token[:8]}"
        abstract, marker = f"ringfence-demo-{self.token[8:16]}", f"86399.{int(self.token[16:24], 16):010d}"
        self.victim = subprocess.Popen(["sleep", marker])
        servers = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)]
        servers[1].bind("\0" + abstract)
        servers[1].listen()
        for server in servers:
            threading.Thread(target=self._serve, args=(server,), daemon=True).start()
        try:
            yield {
                "secret": str(secret),
                "neighbour": str(neighbour),
                "marker": marker,
                "port": servers[0].getsockname()[1],
                "abstract": abstract,
                "plant": self.plant,
                "forks": FORKS,
                "fill": FILL,
            }
        finally:
            for server in servers:
                server.close()
            self.victim.kill()
            self.victim.wait()

    def _serve(self, server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            self.visits += 1
            connection.close()

    def damage(self, texts: list[str]) -> list[str]:
        """What the host noticed, in words; empty if nothing. ``texts``: everything that came out."""
        found = []
        if any(self.token in text for text in texts):
            found.append("the host's secret came out")
        if self.visits:
            found.append(f"the host's server was reached {self.visits} times")
        if self.victim is not None and self.victim.poll() is not None:
            found.append("the host's process was killed")
        if os.path.lexists(self.plant):
            found.append(f"{self.plant} was written")
            os.unlink(self.plant)
        return found


def ringfence(*arguments: str) -> Run:
    """Run it as a user would, with ``--json``; what it says on stderr is passed on.

    Raises:
        SystemExit: Ringfence itself failed; the message is its own.
    """
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "ringfence", "run", "--json", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    seconds = time.monotonic() - started
    try:
        document = json.loads(done.stdout)
    except ValueError:
        document = {"error": {"message": f"no JSON on stdout: {done.stdout[:200]!r}", "hint": ""}}
    if "error" in document:
        error = document["error"]
        raise SystemExit(f"demo: {error['message']}\n  {error['hint']}")
    return Run(document, done.returncode, seconds)


def judge(result: dict[str, Any], limits: dict[str, str]) -> tuple[str, str, bool]:
    """What the attempt got, the layer that stopped it, and whether it was stopped where it should be."""
    answer = result["errno"] or ""
    text = f"{answer} ({result['detail']})" if answer else str(result["detail"])
    layer = LAYERS[result["attempt"]].get(answer)
    if result["succeeded"] or layer is None:
        return text, "NOT STOPPED", False
    kind = {"process limit": "pids", "disk limit": "disk"}.get(layer)
    return text, f"{layer} ({limits.get(kind, '?')})" if kind else layer, True


def bombs(runtime: str) -> list[tuple[str, Run, str, str, int]]:
    """What ends a whole sandbox, each in one of its own: name, run, expected cause, limit, exit status."""
    job = f"{JOB}:/workspace/job.py"
    run = ("--runtime", runtime, "--quiet")
    return [
        (
            "fill the memory",
            ringfence(*run, *LIMITS, "--file", job, "--", "python3", "job.py", "memory", str(MEMORY)),
            "out_of_memory",
            "memory",
            137,
        ),
        ("flood the output", ringfence(*run, "--output", "1M", "--", "yes"), "output_limit", "output", 137),
        ("never end", ringfence(*run, "--timeout", "1s", "--", "sleep", "60"), "deadline", "deadline", 124),
    ]


def show_boundary(boundary: dict[str, Any]) -> None:
    """The wall as it was measured on the living sandbox."""
    rows = []
    for name, value in boundary.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key}: {how}" for key, how in value.items())
        elif isinstance(value, list):
            value = ("; " if name == "notes" else " ").join(map(str, value)) or "none"
        rows.append((name.replace("_", " "), value))
    table(("boundary", "measured"), rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--runtime", default="jail")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "demo")
    options = parser.parse_args()
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="ringfence-demo-") as folder:
        base = Path(folder)
        host, results = Host(base), base / "results"
        with host.ready() as config:
            (base / "config.json").write_text(json.dumps(config), encoding="utf-8")
            print(
                f"Running {JOB.name} on {DATA.name} ({DATA.parent.relative_to(ROOT)}) in {options.runtime} …"
            )
            job = ringfence(
                *("--runtime", options.runtime, *LIMITS, "--changes"),
                *("--file", f"{JOB}:/workspace/job.py", "--file", f"{DATA}:/workspace/laureates.csv"),
                *("--file", f"{base / 'config.json'}:/workspace/config.json"),
                *("--out", f"/workspace/out:{results}"),
                *("--", "python3", "job.py", "both", "laureates.csv", "config.json", "out"),
            )
            ended = bombs(options.runtime)
            texts = [json.dumps([job.document, *(run.document for _, run, *_ in ended)])]
            texts += [path.read_text(errors="replace") for path in results.rglob("*") if path.is_file()]
            damage = host.damage(texts)
        failures += damage
        boundary = job.document["boundary"]
        failures += show_products(job, results, options.out)
        failures += show_attempts(job, results, ended, boundary["limits"])
    print(f"The host noticed: {', '.join(damage) or 'nothing'}\n")
    show_boundary(boundary)
    show_times([("job and attempts", job), *((name, run) for name, run, *_ in ended)])
    if failures:
        print("\ndemo: FAILED: " + "; ".join(failures), file=sys.stderr)
        return 1
    print(f"The job's work came out, nothing else did. Look at {options.out}: chart.svg and report.md.")
    return 0


def show_products(job: Run, results: Path, out: Path) -> list[str]:
    """Table of what the job made; copies it to ``out``. Returns what is missing."""
    missing, rows = [], []
    if job.status != 0:
        missing.append(f"the job ended with {job.status} ({job.document['cause']}): {job.document['stderr']}")
    out.mkdir(parents=True, exist_ok=True)
    for name, start in (("chart.svg", "<svg "), ("report.md", "# Nobel Prizes")):
        path = results / name
        if not path.is_file() or not path.read_text(encoding="utf-8").startswith(start):
            missing.append(f"{name} did not come out")
            continue
        shutil.copyfile(path, out / name)
        rows.append((name, format_size(path.stat().st_size), str(out / name)))
    print()
    table(("the job produced", "size", "copied to"), rows)
    changes = job.document["changes"] or []
    added = sum(change["kind"] == "added" for change in changes)
    print(f"Files changed, as the host saw it: {added} added, {len(changes) - added} modified or deleted.\n")
    return missing


def show_attempts(job: Run, results: Path, ended: list[Any], limits: dict[str, str]) -> list[str]:
    """Table of what was tried and what stopped it. Returns what was not stopped."""
    failures, rows = [], []
    try:
        attempts = json.loads((results / "attempts.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [f"no record of the attempts: {error}"]
    absent = set(LAYERS) - {result["attempt"] for result in attempts}
    failures += [f"never tried: {name}" for name in sorted(absent)]
    for result in attempts:
        text, layer, stopped = judge(result, limits)
        rows.append((result["attempt"], text, layer))
        if not stopped:
            failures.append(f"not stopped: {result['attempt']}: {text}")
    for name, run, cause, limit, status in ended:
        stopped = run.document["cause"] == cause and run.status == status
        lines = (run.document["stdout"] or "").splitlines()
        reached = f" after {lines[-1]}" if limit == "memory" and lines else ""
        text = f"exit {run.status}, {run.document['cause']}{reached}"
        how = run.document["boundary"]["limits"].get(limit, "?")
        rows.append((name, text, f"{limit} limit ({how})" if stopped else "NOT STOPPED"))
        if not stopped:
            failures.append(f"not stopped: {name}: {text}")
    table(("the job tried to", "and got", "stopped by"), rows)
    return failures


def show_times(runs: list[tuple[str, Run]]) -> None:
    """Table of the stages: the command inside, and everything around it."""
    rows = []
    for name, run in runs:
        inside = run.document["usage"]["wall_seconds"]
        cpu = run.document["usage"]["cpu_seconds"]
        rows.append((name, f"{run.seconds:.2f} s", f"{inside:.2f} s", "" if cpu is None else f"{cpu:.2f} s"))
    table(("stage", "in all", "sandbox", "CPU"), rows)


if __name__ == "__main__":
    sys.exit(main())
