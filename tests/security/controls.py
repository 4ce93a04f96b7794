"""Positive controls: the same payload as a plain child of the test, where the protection is off.

Everything it could touch is in namespaces made for it; bombs are bounded by rlimits and a small cgroup.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from security.attacks import Attack, Control
from security.payloads import command, program, verdict

FLAGS = {
    "mount": "-m",
    "uts": "-u",
    "ipc": "-i",
    "net": "-n",
    "pid": "-pf",
    "user": "-Ur",
    "time": "-T",
    "cgroup": "-C",
}
NOBODY = 65534
_MOST = {"nofile": resource.RLIMIT_NOFILE, "as": resource.RLIMIT_AS, "nproc": resource.RLIMIT_NPROC}


@contextmanager
def small_cgroup(limits: Mapping[str, int]) -> Iterator[list[Path]]:
    """A cgroup of the test's own with ``memory`` (bytes) and ``pids``; yields the files to write a pid to."""
    made: list[Path] = []
    files = []
    try:
        for controller, limit in limits.items():
            base = Path("/sys/fs/cgroup") / controller
            if base.is_dir():  # v1
                name = {"memory": "memory.limit_in_bytes", "pids": "pids.max"}[controller]
            else:
                base, name = Path("/sys/fs/cgroup"), {"memory": "memory.max", "pids": "pids.max"}[controller]
            folder = base / f"ringfence-control-{os.getpid()}"
            if folder not in made:
                folder.mkdir()
                made.append(folder)
            (folder / name).write_text(str(limit))
            files.append(folder / "cgroup.procs")
        yield files
    finally:
        for folder in made:
            end = time.monotonic() + 60
            while True:
                for pid in (folder / "cgroup.procs").read_text().split():
                    with suppress(ProcessLookupError):  # it has ended by itself
                        os.kill(int(pid), signal.SIGKILL)
                try:
                    folder.rmdir()
                    break
                except OSError:  # they take a moment to die
                    assert time.monotonic() < end, f"processes of {folder} do not end"
                    time.sleep(0.005)


def run_control(attack: Attack, control: Control, things: Mapping[str, str], folder: Path) -> str:
    """The outcome of the payload without a wall."""
    at = folder / attack.payload
    if not at.exists():
        at.write_bytes(program(attack.payload))
        at.chmod(0o755)
    wanted = attack.args if control.args is None else control.args
    payload = [*command(attack.payload, str(at)), *(arg.format(**things) for arg in wanted)]
    namespaces = list(control.namespaces)
    if os.geteuid() != 0 and namespaces and "user" not in namespaces:
        namespaces.insert(0, "user")
    argv: list[str] = []
    if namespaces:
        argv += (
            ["unshare", *(FLAGS[name] for name in namespaces), "--kill-child"]
            if "pid" in namespaces
            else ["unshare", *(FLAGS[name] for name in namespaces)]
        )
    if control.before:
        argv += ["sh", "-c", control.before.format(**things) + '\nexec "$@"', "sh"]
    if control.unprivileged and os.geteuid() == 0:
        argv += ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    with ExitStack() as stack:
        # A root that is bounded by nothing is only ever started inside these.
        groups = stack.enter_context(small_cgroup(control.cgroup)) if os.geteuid() == 0 else []
        descriptors: list[int] = []
        if control.descriptor:
            descriptors = [os.open(control.descriptor.format(**things), os.O_PATH)]
            stack.callback(os.close, descriptors[0])

        def prepare() -> None:
            os.setsid()
            for file in groups:
                file.write_text("0")
            for name, limit in control.limits.items():
                resource.setrlimit(_MOST[name], (limit, limit))

        # Output goes to a file, not to memory: one payload writes 10 GiB to the stream that nobody reads.
        with (folder / "control-output").open("w+b") as output, open(os.devnull, "wb") as nowhere:
            streams = {"stdout": output, "stderr": nowhere}
            if attack.payload == "flood.c":
                streams = {"stdout": nowhere, "stderr": output} if wanted[0] == "stdout" else streams
            done = subprocess.Popen(
                [*argv, *payload],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                preexec_fn=prepare,
                cwd=folder / "scratch",
                **streams,  # type: ignore[call-overload]
            )
            try:
                done.wait(120)
            finally:
                if done.poll() is None:
                    os.killpg(done.pid, signal.SIGKILL)
                    done.wait()
            output.seek(0)
            found = verdict(output.read())
    if found is None:
        return (
            f"killed:{signal.Signals(-done.returncode).name}"
            if done.returncode < 0
            else f"exit:{done.returncode}"
        )
    return found
