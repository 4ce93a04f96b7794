"""Terminals: what a program sees that runs on a PTY."""

from __future__ import annotations

import signal

import pytest

from ringfence.conformance.harness import Kit, RuntimeSuite, finish, read_until, run
from ringfence.conformance.plugin import needs
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import GuestRefused
from ringfence.model.levels import Boundary

FACTS = (
    "import os; print([os.isatty(n) for n in (0,1,2)], os.get_terminal_size(), os.getpgrp()==os.tcgetpgrp(0))"
)


@needs("pty")
class TerminalSuite(RuntimeSuite):
    """PTYs."""

    async def test_it_is_a_terminal_of_the_size_asked_for(self, kit: Kit) -> None:
        link = await kit.started()
        argv = ("/usr/bin/python3", "-I", "-S", "-c", FACTS)
        done = await finish(await link.start(ProcessSpec(argv, pty=True, rows=33, columns=101)))
        assert done.text == "[True, True, True] os.terminal_size(columns=101, lines=33) True"
        assert done.stderr == b""

    async def test_without_one_it_is_none(self, kit: Kit) -> None:
        link = await kit.started()
        done = await run(link, "/bin/sh", "-c", "test -t 0 || test -t 1 || test -t 2 || echo none")
        assert done.text == "none"

    async def test_resizing(self, kit: Kit) -> None:
        link = await kit.started()
        script = "trap 'stty size; exit 0' WINCH; echo ready; while :; do sleep 0.05; done"
        process = await link.start(ProcessSpec(("/bin/sh", "-c", script), pty=True))
        await read_until(process, b"ready")
        await process.resize(50, 132)
        assert (await finish(process)).text == "50 132"
        plain = await link.start(ProcessSpec(("sleep", "60")))
        with pytest.raises(GuestRefused):
            await plain.resize(1, 1)

    async def test_control_c_interrupts(self, kit: Kit) -> None:
        link = await kit.started()
        process = await link.start(
            ProcessSpec(("/bin/sh", "-c", "echo ready; exec sleep 60"), pty=True, stdin=True)
        )
        await read_until(process, b"ready")
        await process.write(b"\x03")
        assert (await process.wait()).signal == signal.SIGINT

    async def test_control_d_ends_the_input(self, kit: Kit) -> None:
        link = await kit.started()
        process = await link.start(ProcessSpec(("cat",), pty=True, stdin=True))
        await process.write(b"line\n")
        await read_until(process, b"line\r\nline\r\n")
        await process.write(b"\x04")
        assert (await process.wait()).code == 0

    async def test_the_terminal_is_its_controlling_one(self, kit: Kit) -> None:
        link = await kit.started()
        # gVisor's kernel has a controlling terminal, but nothing behind its name /dev/tty.
        name = "$(tty)" if kit.runtime.boundary is Boundary.USERSPACE_KERNEL else "/dev/tty"
        done = await finish(
            await link.start(ProcessSpec(("/bin/sh", "-c", f"echo hello > {name}; tty"), pty=True))
        )
        assert done.text.splitlines()[0] == "hello"
        assert done.text.splitlines()[1].startswith("/dev/pts/")
