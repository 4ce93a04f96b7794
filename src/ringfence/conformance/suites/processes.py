"""Commands: how they start, what they see, how they end, and signals."""

from __future__ import annotations

import asyncio
import errno
import signal
import time

import pytest

from ringfence.conformance.harness import Kit, RuntimeSuite, finish, python, read_until, run
from ringfence.conformance.plugin import needs
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import GuestRefused

SHOW = "import os,sys; print(ascii({}))"


class ProcessSuite(RuntimeSuite):
    """process.start, signal, list, remove."""

    @needs("programs")
    async def test_exit_codes_come_through(self, kit: Kit) -> None:
        link = await kit.started()
        for code in (0, 1, 7, 255):
            done = await run(link, "/bin/sh", "-c", f"exit {code}")
            assert (done.exit.code, done.exit.signal) == (code, None)

    @needs("programs")
    async def test_output_that_nobody_wants_goes_to_dev_null(self, kit: Kit) -> None:
        link = await kit.started()
        done = await run(
            link,
            "/bin/sh",
            "-c",
            "echo no > /dev/null && echo no >> /dev/null; cat < /dev/zero | head -c 3 | wc -c",
        )
        assert (done.text, done.exit.code) == ("3", 0)

    @needs("programs")
    async def test_a_signal_that_kills_comes_through(self, kit: Kit) -> None:
        link = await kit.started()
        done = await run(link, "/bin/sh", "-c", "kill -SEGV $$")
        assert (done.exit.code, done.exit.signal) == (None, signal.SIGSEGV)
        assert done.exit.status == 128 + signal.SIGSEGV

    async def test_a_program_that_is_not_there(self, kit: Kit) -> None:
        link = await kit.started()
        for name in ("/no/such/program", "no-such-program"):
            with pytest.raises(GuestRefused) as caught:
                await run(link, name)
            assert caught.value.errno == errno.ENOENT

    @needs("programs")
    async def test_a_file_that_is_no_program(self, kit: Kit) -> None:
        link = await kit.started()
        with pytest.raises(GuestRefused) as caught:
            await run(link, "/etc/passwd")
        assert caught.value.errno == errno.EACCES

    @needs("programs")
    async def test_the_working_directory(self, kit: Kit) -> None:
        link = await kit.started()
        assert (await run(link, "pwd")).text == "/workspace"
        assert (await run(link, "pwd", cwd="/tmp")).text == "/tmp"
        with pytest.raises(GuestRefused) as caught:
            await run(link, "pwd", cwd="/no/such")
        assert caught.value.errno == errno.ENOENT

    @needs("programs")
    async def test_arguments_are_bytes(self, kit: Kit) -> None:
        link = await kit.started()
        words = [b"a b", b"", b"\xff\xfe", b"new\nline", "ü".encode(), b"-", b"x" * 20000]
        done = await run(link, "printf", "%s\\0", *words)
        assert done.stdout == b"".join(word + b"\0" for word in words)

    @needs("programs")
    async def test_the_environment(self, kit: Kit) -> None:
        link = await kit.started(env={"FROM_REQUEST": "1", "BOTH": "request"})
        done = await run(link, "env", "-0", env={"BOTH": "command", "ODD": "a=b\nc"})
        seen = dict(line.split(b"=", 1) for line in done.stdout.split(b"\0") if line)
        assert seen[b"FROM_REQUEST"] == b"1"
        assert seen[b"BOTH"] == b"command"
        assert seen[b"ODD"] == b"a=b\nc"
        assert seen[b"HOME"] == b"/home/agent"
        assert b"/usr/bin" in seen[b"PATH"].split(b":")

    @needs("programs")
    async def test_nothing_of_the_host_is_in_the_environment(
        self, kit: Kit, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RINGFENCE_TEST_SECRET", "decoy")
        link = await kit.started()
        assert b"decoy" not in (await run(link, "env", "-0")).stdout

    @needs("programs")
    async def test_who_it_runs_as(self, kit: Kit) -> None:
        link = await kit.started()
        done = await python(link, SHOW.format("(os.getresuid(), os.getresgid(), os.getgroups())"))
        assert done.text in ("((1000, 1000, 1000), (1000, 1000, 1000), [])",) or kit.name == "fake", done

    @needs("programs")
    async def test_a_command_starts_with_default_signals_and_three_descriptors(self, kit: Kit) -> None:
        link = await kit.started()
        done = await python(
            link,
            "import os, signal;"
            "print(sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),"
            " [n for n in range(1, 32) if signal.getsignal(n) is signal.SIG_IGN],"
            " sorted(int(n) for n in os.listdir('/proc/self/fd'))[:3], len(os.listdir('/proc/self/fd')))",
        )
        # Python itself ignores SIGPIPE and SIGXFSZ; the fourth descriptor is the listing's.
        assert done.text == "[] [13, 25] [0, 1, 2] 4", done

    async def test_an_id_names_one_process(self, kit: Kit) -> None:
        link = await kit.started()
        process = await link.start(ProcessSpec(("sleep", "60"), id="mine"))
        with pytest.raises(GuestRefused) as caught:
            await link.start(ProcessSpec(("true",), id="mine"))
        assert caught.value.errno == errno.EEXIST
        assert [(p.id, p.state) for p in await link.processes()] == [("mine", "running")]
        with pytest.raises(GuestRefused) as caught:
            await link.remove("mine")
        assert caught.value.errno == errno.EBUSY
        await process.signal(signal.SIGKILL)
        assert (await process.wait()).signal == signal.SIGKILL
        assert [(p.id, p.state, p.signal) for p in await link.processes()] == [("mine", "killed", 9)]
        await link.remove("mine")
        assert await link.processes() == []

    @needs("programs")
    async def test_signals_reach_the_group_or_the_process(self, kit: Kit) -> None:
        link = await kit.started()
        script = (
            "trap 'echo parent; exit 3' USR1; "
            "(trap 'echo child; exit' USR1; echo ready; sleep 60 & wait) & wait; wait"
        )
        process = await link.start(ProcessSpec(("/bin/sh", "-c", script)))
        await read_until(process, b"ready")
        await process.signal(signal.SIGUSR1, "group")
        done = await finish(process)
        assert done.exit.code == 3
        assert b"parent" in done.stdout
        process = await link.start(
            ProcessSpec(("/bin/sh", "-c", "trap 'exit 4' USR1; echo ready; sleep 60 & wait"))
        )
        await read_until(process, b"ready")
        await process.signal(signal.SIGUSR1, "process")
        assert (await process.wait()).code == 4

    @needs("programs")
    async def test_a_group_dies_as_a_whole(self, kit: Kit) -> None:
        link = await kit.started()
        process = await link.start(ProcessSpec(("/bin/sh", "-c", "sleep 61 & sleep 62 & echo ready; wait")))
        await read_until(process, b"ready")
        await process.signal(signal.SIGKILL)
        await process.wait()
        await self._gone(link, b"sleep")

    async def _gone(self, link: object, name: bytes) -> None:
        code = (
            "import os\nfor n in os.listdir('/proc'):\n try:\n"
            "  print(open(f'/proc/{n}/comm').read().strip(), open(f'/proc/{n}/stat').read().split()[2])\n"
            " except OSError: pass"
        )
        end = time.monotonic() + 60
        while time.monotonic() < end:
            done = await python(link, code)  # type: ignore[arg-type]
            if not any(
                line.startswith(name) and not line.endswith(b"Z") for line in done.stdout.split(b"\n")
            ):
                return
        raise AssertionError(done.stdout)

    async def test_a_signal_to_an_ended_process(self, kit: Kit) -> None:
        link = await kit.started()
        process = await link.start(ProcessSpec(("true",), id="over"))
        await process.wait()
        with pytest.raises(GuestRefused) as caught:
            await process.signal(signal.SIGTERM)
        assert caught.value.errno == errno.ESRCH

    async def test_a_signal_to_everything_spares_the_agent(self, kit: Kit) -> None:
        link = await kit.started()
        processes = [await link.start(ProcessSpec(("sleep", "60"))) for _ in range(3)]
        await link.signal_all(signal.SIGKILL)
        assert [(await process.wait()).signal for process in processes] == [9, 9, 9]
        assert (await run(link, "echo", "on")).text == "on"

    @needs("programs")
    async def test_many_at_once(self, kit: Kit) -> None:
        link = await kit.started()
        results = await asyncio.gather(
            *(run(link, "/bin/sh", "-c", f"echo {n}; exit {n}") for n in range(40))
        )
        assert [(done.text, done.exit.code) for done in results] == [(str(n), n) for n in range(40)]

    @needs("programs")
    async def test_orphans_are_reaped(self, kit: Kit) -> None:
        link = await kit.started()
        for _ in range(20):
            await run(link, "/bin/sh", "-c", "(sleep 0.01 &) ; (true &)")
        code = (
            "import os\nprint(sum(open(f'/proc/{n}/stat').read().rpartition(')')[2].split()[0] == 'Z'"
            " for n in os.listdir('/proc') if n.isdigit() and os.path.exists(f'/proc/{n}/stat')))"
        )
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if (await python(link, code)).text == "0":
                return
        raise AssertionError("zombies stay")

    async def test_usage_is_reported(self, kit: Kit) -> None:
        link = await kit.started()
        done = await python(link, "x = bytearray(20_000_000)\nfor n in range(2_000_000): pass")
        assert done.exit.user_us > 1000
        assert done.exit.max_rss > 20_000_000

    @needs("user_zero")
    async def test_user_zero_is_root_of_its_own_namespace_only(self, kit: Kit) -> None:
        sandbox = await kit.sandbox(user=0)
        link = await kit.link(sandbox)
        done = await run(link, "id", "-u", as_root=True)
        assert done.text == "0", done
        assert (await kit.runtime.measure(sandbox.handle)).host_uid != 0

    async def test_root_is_refused_unless_it_was_asked_for(self, kit: Kit) -> None:
        link = await kit.started()
        with pytest.raises(GuestRefused) as caught:
            await run(link, "id", as_root=True)
        assert caught.value.errno == errno.EPERM
