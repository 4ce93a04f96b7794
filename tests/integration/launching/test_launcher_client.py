"""The launcher itself: what it answers to right and wrong plans, and who dies when somebody is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ringfence import _native
from ringfence.conformance.harness import eventually
from ringfence.model.errors import HostLimit, StartFailed
from ringfence.runtimes.launching.launcher import Child, Launcher
from ringfence.runtimes.launching.plan import BIND_OPTIONAL, CLONE_NEWNS, MS_REC, MS_SLAVE, OPS, Plan
from ringfence.runtimes.launching.processes import ProcessRef


@pytest.fixture
async def launcher() -> AsyncIterator[Launcher]:
    made = await Launcher.start()
    yield made
    await made.close()


def program(*argv: str, keep: bool = False, exit_file: Path | None = None) -> Plan:
    plan = Plan()
    if keep:
        plan.add("KEEP")
    if exit_file is not None:
        plan.add("EXIT_FILE", str(exit_file))
    if not keep:
        plan.add("DEATH_SIGNAL", 9)
    for word in argv:
        plan.add("ARG", word)
    plan.add("ENV", "PATH=/usr/bin:/bin")
    plan.add("EXEC", argv[0])
    return plan


async def run(launcher: Launcher, *argv: str) -> int | None:
    child = await launcher.spawn(program(*argv))
    status = await child.exited
    child.close()
    return status


async def test_a_program_runs_and_its_status_comes_back(launcher: Launcher) -> None:
    assert os.waitstatus_to_exitcode(await run(launcher, "/bin/sh", "-c", "exit 7") or 0) == 7
    child = await launcher.spawn(program("/bin/sleep", "60"))
    signal.pidfd_send_signal(child.pidfd, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(await child.exited or 0) == -signal.SIGTERM
    child.close()


async def test_descriptors_arrive_at_their_numbers_and_no_others(launcher: Launcher) -> None:
    read, write = os.pipe()
    plan = Plan()
    plan.add("FD", plan.fd(write), 1)
    plan.add("FD", plan.fd(write), 9)
    for word in ("/bin/sh", "-c", "ls /proc/self/fd; echo $X >&9"):
        plan.add("ARG", word)
    plan.add("ENV", "X=given")
    plan.add("EXEC", "/bin/sh")
    child = await launcher.spawn(plan)
    os.close(write)
    await child.exited
    child.close()
    with open(read) as file:
        words = file.read().split()
    # 0 and 2 are /dev/null, 3 is ls's own view of the folder.
    assert words == ["0", "1", "2", "3", "9", "given"]


@pytest.mark.parametrize("ahead", [False, True])
async def test_every_number_may_be_given_to_a_descriptor(ahead: bool) -> None:
    """That of the pipe among them by whose end the launcher hears of the exec."""
    prelude = Plan()
    prelude.add("READY", 4)
    prelude.add("UMASK", 0o022)
    launcher = await Launcher.start(prelude=prelude)
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(12):
            plan = Plan()
            if ahead:
                plan.add("PRELUDE")
            index = plan.fd(nothing)
            for number in range(3, 60):
                plan.add("FD", index, number)
            plan.add("ARG", "true")
            plan.add("EXEC", "/bin/true")
            child = await launcher.spawn(plan)
            assert await child.exited == 0
            child.close()
    finally:
        os.close(nothing)
        await launcher.close()


async def test_a_child_without_a_descriptor_for_it_fails_and_dies(launcher: Launcher, tmp_path: Path) -> None:
    """As many as it may have are open when the answer comes: its end would never be heard."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened: list[int] = []

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, limit[1]))
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.dup(0))

    plan = program("/bin/sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 60")
    try:
        with pytest.raises(HostLimit, match="no file descriptor left"):
            await launcher.spawn(plan, meanwhile=fill)
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert opened
    if (told := tmp_path / "pid").exists() and (text := told.read_text()):
        while Path(f"/proc/{text.strip()}").exists():
            await asyncio.sleep(0.01)
    assert await run(launcher, "/bin/true") == 0  # and it goes on


async def test_a_limit_of_open_files_does_not_hinder_the_start(launcher: Launcher) -> None:
    read, write = os.pipe()
    plan = Plan()
    plan.add("FD", plan.fd(write), 1)
    plan.add("RLIMIT", 7, 8, 8)
    for word in ("/bin/sh", "-c", "ulimit -n"):
        plan.add("ARG", word)
    plan.add("EXEC", "/bin/sh")
    child = await launcher.spawn(plan)
    os.close(write)
    await child.exited
    child.close()
    with open(read) as file:
        assert file.read() == "8\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
async def test_what_is_optional_may_be_missing_at_both_ends(launcher: Launcher, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    for source, target, flags in (
        (str(there), "/does/not/exist", BIND_OPTIONAL),
        ("/does/not/exist", str(there), BIND_OPTIONAL),
        (str(there), "/does/not/exist", 0),
    ):
        plan = Plan()
        plan.add("UNSHARE", CLONE_NEWNS)
        plan.add("BIND", source, target, flags)
        plan.extend(program("/bin/true"))
        if not flags:
            with pytest.raises(StartFailed, match="bind"):
                await launcher.spawn(plan)
            continue
        child = await launcher.spawn(plan)
        assert await child.exited == 0
        child.close()


@pytest.mark.parametrize(
    ("steps", "step", "number"),
    [
        ([("EXEC", "/does/not/exist")], "exec", "ENOENT"),
        ([("CHDIR", "/does/not/exist")], "chdir", "ENOENT"),
        ([("MKDIR", "/proc/nothing", 0, 0, 0)], "mkdir", "ENOENT"),
        ([("RLIMIT", 999, 0, 0)], "rlimit", "EINVAL"),
        ([("DETACH",)], "detach", "EBADF"),
        ([("WRITE", "/proc/self/nothing", "x")], "write", "ENOENT"),
        ([("FD", 0, 9999)], "fd", "EINVAL"),
        ([("SETSID",)], "setsid", "ENOEXEC"),  # the last step, and none was an exec
    ],
)
async def test_a_failing_step_is_told_by_name_and_errno(
    launcher: Launcher, steps: list[tuple[object, ...]], step: str, number: str
) -> None:
    plan = Plan()
    with open("/dev/null") as null:
        plan.fd(null.fileno())
        for name, *arguments in steps:
            plan.add(str(name), *arguments)  # type: ignore[arg-type]
        with pytest.raises(StartFailed) as caught:
            await launcher.spawn(plan)
    assert caught.value.details == {"step": step, "errno": number}
    assert await run(launcher, "/bin/true") == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
@pytest.mark.parametrize(
    ("step", "number", "to"),
    [("MASK", "ELOOP", "file"), ("MASK", "ELOOP", "folder"), ("READONLY", "EINVAL", "folder")],
)
async def test_a_link_is_not_taken_for_what_it_shows(
    launcher: Launcher, tmp_path: Path, step: str, number: str, to: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(to)
    written = tmp_path / ("file" if to == "file" else "folder/file")

    def plan(path: Path) -> Plan:
        made = Plan()
        made.add("UNSHARE", CLONE_NEWNS)
        made.add("MOUNT", "none", "/", "none", MS_REC | MS_SLAVE, "")
        made.add(step, str(path))
        made.extend(program("/bin/sh", "-c", f"echo x > {written}"))
        return made

    with pytest.raises(StartFailed) as caught:
        await launcher.spawn(plan(tmp_path / "link"))
    assert caught.value.details == {"step": step.lower(), "errno": number}
    for path in (tmp_path / to, tmp_path / "missing"):  # the second is the control: nothing is hidden
        child = await launcher.spawn(plan(path))
        await child.exited
        child.close()
        assert (written.exists() and written.read_text() == "x\n") == (path.name == "missing")


async def test_a_plan_that_is_too_long_is_not_even_sent(launcher: Launcher) -> None:
    plan = Plan()
    plan.add("CHDIR", "x" * 70_000)
    with pytest.raises(StartFailed):
        await launcher.spawn(plan)
    assert await run(launcher, "/bin/true") == 0


GARBAGE = {
    "unknown step": struct.pack("<HHI", 9999, 0, 0),
    "cut head": b"\1\0\0",
    "length past the end": struct.pack("<HHI", OPS["CHDIR"][0], 0, 1000) + b"x",
    "text without end": struct.pack("<HHII", OPS["CHDIR"][0], 0, 6, 2) + b"ab",
    "text with a zero inside": struct.pack("<HHII", OPS["CHDIR"][0], 0, 8, 4) + b"a\0b\0",
    "empty text": struct.pack("<HHII", OPS["CHDIR"][0], 0, 4, 0),
    "text length that wraps": struct.pack("<HHII", OPS["CHDIR"][0], 0, 4, 0xFFFFFFFF),
    "no such descriptor": struct.pack("<HHIQ", OPS["SECCOMP"][0], 0, 8, 0),
    "trailing bytes": struct.pack("<HHIQ", OPS["SETSID"][0], 0, 8, 0),
    "reserved bits": struct.pack("<HHI", OPS["SETSID"][0], 1, 0),
    "maps of odd length": struct.pack("<HHII", OPS["USERNS"][0], 0, 9, 5) + b"x" * 5,
    "too many steps": struct.pack("<HHI", OPS["SETSID"][0], 0, 0) * 600,
    "too many arguments": struct.pack("<HHII", OPS["ARG"][0], 0, 6, 2) + b"a\0",
}
GARBAGE["too many arguments"] *= 300


@pytest.mark.parametrize("name", GARBAGE)
async def test_wrong_bytes_are_refused_and_cost_nothing(launcher: Launcher, name: str) -> None:
    class Wrong(Plan):
        def encode(self) -> bytes:
            return GARBAGE[name]

    with pytest.raises(StartFailed) as caught:
        await launcher.spawn(Wrong())
    assert caught.value.details["step"] == "plan"
    assert await run(launcher, "/bin/true") == 0


def bare() -> tuple[int, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        actions = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), 3)]
        return os.posix_spawn(_native.launcher(), ["launcher"], {}, file_actions=actions), ours


@pytest.mark.parametrize("data", [b"x", b"x" * 16, b"x" * 80_000], ids=["short", "no magic", "long"])
def test_wrong_messages_are_answered(data: bytes) -> None:
    pid, sock = bare()
    with sock:
        sock.settimeout(60)
        sock.send(data)
        kind, _serial, _pid, error = struct.unpack_from("<IIii", sock.recv(4096))
        assert (kind, error) == (2, 71)  # FAILED, EPROTO
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "its socket is closed, so it ends"


def test_it_is_not_for_use_by_hand() -> None:
    pid = os.posix_spawn(
        _native.launcher(),
        ["launcher"],
        {},
        file_actions=[(os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0)],
    )
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 64


async def test_closing_kills_the_ephemeral_and_spares_the_kept(tmp_path: Path) -> None:
    launcher = await Launcher.start()
    record = tmp_path / "exit"
    loose = await launcher.spawn(program("/bin/sleep", "60"))
    kept = await launcher.spawn(program("/bin/sleep", "60", keep=True, exit_file=record), keep=True)
    loose_ref, kept_ref = ProcessRef.of(loose.pid), ProcessRef.of(kept.pid)
    await launcher.close()
    await loose_ref.wait()
    assert kept_ref.alive()
    assert await kept.exited is None, "nobody will tell this process any more"
    os.kill(kept.pid, signal.SIGTERM)
    await kept_ref.wait()
    launcher_ref = ProcessRef.of(launcher.pid)
    await launcher_ref.wait()  # nothing is left to wait for
    assert os.waitstatus_to_exitcode(int(record.read_text())) == -signal.SIGTERM
    os.waitpid(launcher.pid, 0)
    loose.close()
    kept.close()


async def test_a_killed_launcher_takes_the_ephemeral_along() -> None:
    launcher = await Launcher.start()
    child = await launcher.spawn(program("/bin/sleep", "60"))
    ref = ProcessRef.of(child.pid)
    os.kill(launcher.pid, signal.SIGKILL)
    assert await child.exited is None
    await ref.wait()
    with pytest.raises(HostLimit):
        await launcher.spawn(program("/bin/true"))
    child.close()
    await launcher.close()
    await launcher.close()


async def test_whoever_gives_up_waiting_leaves_nothing(launcher: Launcher) -> None:
    for _ in range(20):
        task = asyncio.create_task(launcher.spawn(program("/bin/sleep", "60")))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await run(launcher, "/bin/true") == 0
    deadline = asyncio.get_running_loop().time() + 60
    while Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.005)


async def test_many_at_once_and_no_descriptor_is_lost(launcher: Launcher) -> None:
    await run(launcher, "/bin/true")
    before = len(os.listdir(f"/proc/{launcher.pid}/fd"))
    ours = len(os.listdir("/proc/self/fd"))
    assert await asyncio.gather(*[run(launcher, "/bin/true") for _ in range(100)]) == [0] * 100
    # What it told of it may close a moment later; and what was open before may have been such a one.
    theirs = Path(f"/proc/{launcher.pid}/fd")
    await eventually(lambda: len(os.listdir(theirs)) <= before, "the launcher keeps descriptors")
    await eventually(lambda: len(os.listdir("/proc/self/fd")) <= ours, "descriptors stay here")


async def test_children_do_not_inherit_what_the_node_blocks_or_ignores(launcher: Launcher) -> None:
    child: Child = await launcher.spawn(program("/bin/sleep", "60"))
    status = Path(f"/proc/{child.pid}/status").read_text()
    facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert int(facts["SigBlk"], 16) == 0
    assert int(facts["SigIgn"], 16) == 0, "Python ignores SIGPIPE; its children must not"
    os.kill(child.pid, signal.SIGKILL)
    await child.exited
    child.close()


async def full(launcher: Launcher, count: int) -> list[asyncio.Task[int | None]]:
    """Starts of which some wait for a launcher that does not read."""
    os.kill(launcher.pid, signal.SIGSTOP)
    tasks = [asyncio.create_task(run(launcher, "/bin/true", "x" * 8000)) for _ in range(count)]
    while launcher._room is None:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    return tasks


async def test_many_wait_for_a_launcher_that_is_behind(launcher: Launcher) -> None:
    tasks = await full(launcher, 200)
    assert launcher._sending.locked()
    tasks[150].cancel()  # one that was never sent
    await asyncio.gather(tasks[150], return_exceptions=True)
    held = len(launcher._starting)
    os.kill(launcher.pid, signal.SIGCONT)
    found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 90)
    assert [each for each in found if each != 0] == [found[150]]
    assert isinstance(found[150], asyncio.CancelledError)
    assert (held, launcher._starting) == (199, {})


async def test_who_waits_for_a_launcher_that_is_let_go_of_is_told(launcher: Launcher) -> None:
    tasks = await full(launcher, 200)
    closing = asyncio.create_task(launcher.close())
    found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 90)
    assert all(isinstance(each, HostLimit | StartFailed) for each in found), found
    os.kill(launcher.pid, signal.SIGCONT)
    await closing
