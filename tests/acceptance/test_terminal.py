"""``ringfence run --interactive`` on a real terminal: a pseudo-terminal whose other end is the user."""

from __future__ import annotations

import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time

import pytest

from support.commands import COMMAND

PATIENCE = 120


class User:
    """Sits at a terminal in which a command line was started."""

    def __init__(self, env, *arguments, rows=30, columns=100):
        self.master, self.slave = pty.openpty()
        self.resize(rows, columns)
        self.before = termios.tcgetattr(self.slave)
        self.seen = b""
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            env=env,
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            preexec_fn=self._own_session,
        )

    def _own_session(self):
        os.setsid()
        import fcntl

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def resize(self, rows, columns):
        import fcntl

        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def types(self, text):
        os.write(self.master, text)

    def sees(self, text):
        """Wait until the text has appeared; what came before it is forgotten."""
        end = time.monotonic() + PATIENCE
        while text not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(0, end - time.monotonic()))
            assert ready, f"waited for {text!r}, saw {self.seen!r}"
            self.seen += os.read(self.master, 65536)
        before, _, self.seen = self.seen.partition(text)
        return before

    def leaves(self):
        """The exit code; the terminal must be as it was."""
        code = self.process.wait(PATIENCE)
        assert termios.tcgetattr(self.slave) == self.before
        return code

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def sit(ringfence):
    users = []

    def start(*arguments, **options):
        users.append(User(ringfence.env, *arguments, **options))
        return users[-1]

    yield start
    for user in users:
        user.close()


def test_a_shell(sit):
    user = sit("run", "-i", "--env", "PS1=ready> ", "--", "sh")
    user.sees(b"ready> ")
    user.types(b"tty; stty size; echo $TERM-$((6 * 7))\r")
    user.sees(b"/dev/pts/")
    user.sees(b"30 100")
    user.sees(b"-42")
    user.types(b"exit 5\r")
    assert user.leaves() == 5


def test_the_size_follows(sit):
    user = sit(
        "run", "-i", "--", "sh", "-c", "trap 'stty size' WINCH; echo ready; while :; do sleep 0.1; done"
    )
    user.sees(b"ready")
    user.resize(40, 120)
    user.process.send_signal(signal.SIGWINCH)
    user.sees(b"40 120")
    user.types(b"\x03")
    assert user.leaves() == 130


def test_ctrl_c_is_a_key_for_the_command(sit):
    user = sit("run", "-i", "--", "python3", "-c", "import time; print('ready', flush=True); time.sleep(60)")
    user.sees(b"ready")
    user.types(b"\x03")
    user.sees(b"KeyboardInterrupt")
    assert user.leaves() == 130


def test_keys_arrive_unchanged(sit):
    user = sit(
        "run", "-i", "--", "sh", "-c", "stty raw -echo; echo ready; head -c 4 | od -An -tx1; stty sane"
    )
    user.sees(b"ready")
    user.types(b"\x1a\x1c\x11\x7f")
    user.sees(b"1a 1c 11 7f")
    assert user.leaves() == 0


def test_the_terminal_is_restored_when_the_deadline_comes(sit):
    user = sit("run", "-i", "--timeout", "1s", "--", "sh", "-c", "stty raw -echo; sleep 60")
    assert user.leaves() == 124
    user.sees(b"deadline")


def test_the_terminal_is_restored_when_we_are_told_to_stop(sit):
    user = sit("run", "-i", "--", "sh", "-c", "echo ready; sleep 60")
    user.sees(b"ready")
    user.process.send_signal(signal.SIGTERM)
    assert user.leaves() in (137, 143)


def test_the_terminal_is_restored_when_the_command_can_not_start(sit):
    user = sit("run", "-i", "--", "nosuch")
    assert user.leaves() == 127


def test_without_interactive_the_command_has_no_terminal(sit):
    user = sit("run", "--", "sh", "-c", "tty; test -t 1 || echo none")
    user.sees(b"not a tty")
    user.sees(b"none")
    assert user.leaves() == 0


def test_ctrl_c_at_a_terminal_without_interactive(sit):
    user = sit("run", "--", "sh", "-c", "trap 'echo caught; exit 9' INT; echo ready; sleep 60 & wait")
    user.sees(b"ready")
    user.types(b"\x03")  # the terminal itself makes the signal
    user.sees(b"caught")
    assert user.leaves() == 9


def test_interactive_without_a_terminal_still_gives_the_command_one(ringfence):
    done = ringfence("run", "-i", "--", "sh", "-c", "tty; stty size")
    assert b"/dev/pts/" in done.stdout
    assert b"24 80" in done.stdout


def test_who_looks_on_while_it_starts_is_told(sit, ringfence):
    ringfence.env["RINGFENCE_FAKE_FAULTS"] = '{"start_delay": 5}'
    user = sit("run", "--runtime", "fake", "--", "echo", "up")
    assert b"up\r\n" not in user.sees(b"still starting")
    user.sees(b"up\r\n")
    assert user.leaves() == 0
    done = ringfence("run", "--runtime", "fake", "--", "echo", "up")
    assert (done.returncode, done.stdout) == (0, b"up\n")
    assert b"still starting" not in done.stderr  # nobody looks on
