"""Commands that begin as copies of a zygote, and zygotes that lie."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from wall import (
    CLOSE,
    DATA,
    ERROR,
    PING,
    REPLY,
    AgentError,
    Client,
    Wall,
    argv,
    follow,
    number,
    numbers,
    parse,
)

START, ATTACH, SIGNAL, LIST, RESIZE, REMOVE = range(1, 7)
PTY, STDIN, ROOT, DETACHED, ZYGOTE = 1, 2, 8, 32, 64

# Answers each request as the words of its environment say.
PROGRAM = r"""
import os, signal, socket, struct, sys, time
asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, 0)
print("ready", flush=True)
while True:
    data, fds, flags, _ = socket.recv_fds(asked, 1 << 18, 8)
    if not data and not fds:
        break
    env = dict(word.split("=", 1) for word in data.decode().split("\0")[1:-1])
    report, how = fds[3], env["HOW"]
    def say(first, second=0):
        os.write(report, struct.pack("=II", first, second))
    if how == "copy":
        wait, go = os.pipe()
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            os.close(go)
            os.read(wait, 1)
            os.setsid()
            if "AFTER" in env:
                open(env["AFTER"] + ".waits", "w").close()
                while not os.path.exists(env["AFTER"]):
                    time.sleep(0.005)
                say(os.getpid())
                os._exit(7)
            os.chdir(data.split(b"\0")[0])
            for n in range(3):
                os.dup2(fds[n], n)
            say(os.getpid())
            os.closerange(3, 64)
            print(os.getcwd(), env["HOME"], flush=True)
            line = sys.stdin.readline()
            print("got", line, end="", file=sys.stderr, flush=True)
            os._exit(7) if line != "wait\n" else time.sleep(600)
        os.waitpid(between, 0)
        os.close(wait)
        os.close(go)
    elif how == "error":
        say(28, 1)
    elif how == "short":
        os.write(report, b"abc")
    elif how == "child":  # its own, not the agent's
        pid = os.fork()
        if not pid:
            time.sleep(600)
        say(pid)
    elif how == "number":
        say(int(env["NUMBER"]))
    elif how == "self":
        say(os.getpid())
    elif how == "die":
        os._exit(1)
    elif how == "silent":
        kept = fds
        continue
    for fd in fds:
        os.close(fd)
"""


@pytest.fixture
def zygote(client: Client) -> int:
    """A running zygote of the test's; its channel."""
    channel = client.open(START, (1, "z"), *argv("python3", "-c", PROGRAM), (5, STDIN | ZYGOTE))
    client.reply(channel)
    while True:
        frame = client.frame(channel)
        if frame.type == DATA:
            assert frame.payload[9:] == b"ready\n"
            return channel


def ask(
    client: Client, name: str, how: str, *extra: tuple[int, int | bytes | str], flags: int = STDIN
) -> int:
    """Start a command that is to be a copy; its channel."""
    return client.open(START, (1, name), *argv("copy"), (3, f"HOW={how}"), (5, flags), (10, "z"), *extra)


def refused(client: Client, *call: object, **options: int) -> int:
    """The errno."""
    with pytest.raises(AgentError) as caught:
        client.reply(ask(client, *call, **options))  # type: ignore[arg-type]
    return caught.value.errno


def known(client: Client) -> set[str]:
    """All ids."""
    return {dict(parse(value))[1].decode() for tag, value in parse(client.call(LIST)) if tag == 1}


def ended_children(pid: int) -> int:
    """How many of its children have ended and are not reaped."""
    states = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):  # it is reaped at this moment
            states.append(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0])
    return states.count("Z")


def until(true: Callable[[], bool], what: str) -> None:
    """Poll until it holds."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def test_a_copy_is_a_command_as_any_other(client: Client, zygote: int) -> None:
    channel = ask(client, "a", "copy", (4, "/"), (3, "HOME=/mine"))
    reply = numbers(client.reply(channel))
    assert reply[2] == 1 and reply[1] > 1
    other = ask(client, "b", "copy")
    assert numbers(client.reply(other))[1] != reply[1]
    client.data(channel, b"words\n")
    ended = follow(client, channel)
    assert (bytes(ended.out[1]), bytes(ended.out[2])) == (b"/ /mine\n", b"got words\n")
    assert ended.code == 7
    client.data(other, b"wait\n")
    client.call(SIGNAL, (1, "b"), (2, signal.SIGKILL))
    assert follow(client, other).exit[2] == signal.SIGKILL
    client.call(REMOVE, (1, "a"))
    assert known(client) == {"z", "b"}


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("error", errno.ENOSPC),
        ("short", errno.ECHILD),
        ("child", errno.ECHILD),
        ("self", errno.ECHILD),
        ("die", errno.ECHILD),
        ("close", errno.ECHILD),
    ],
)
def test_what_is_no_copy_is_no_command(client: Client, zygote: int, how: str, error: int) -> None:
    assert refused(client, "a", how) == error
    assert "a" not in known(client)
    client.ping()


@pytest.mark.parametrize("claimed", [0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1])
def test_a_number_that_is_not_its_child_is_not_taken(client: Client, zygote: int, claimed: int) -> None:
    assert refused(client, "a", "number", (3, f"NUMBER={claimed}")) == errno.ECHILD
    client.ping()


def test_another_commands_number_is_not_taken(client: Client, zygote: int) -> None:
    other = client.open(START, (1, "other"), *argv("cat"), (5, STDIN))
    pid = numbers(client.reply(other))[1]
    assert refused(client, "a", "number", (3, f"NUMBER={pid}")) == errno.ECHILD
    client.eof(other, 0)
    assert follow(client, other).code == 0  # control: it was its own command's all the time


def test_a_zygote_that_says_nothing_is_not_waited_for(client: Client, zygote: int) -> None:
    channel = ask(client, "a", "silent")
    with pytest.raises(AgentError) as caught:  # there is no process yet; certainly not the agent's own group
        client.call(SIGNAL, (1, "a"), (2, signal.SIGKILL))
    assert caught.value.errno == errno.EAGAIN
    client.ping()
    with pytest.raises(AgentError) as caught:
        client.reply(channel)
    assert caught.value.errno == errno.ETIMEDOUT
    assert known(client) == {"z"}
    good = ask(client, "a", "copy")  # the id is free again
    assert numbers(client.reply(good))[2] == 1
    client.data(good, b"x\n")
    assert follow(client, good).code == 7


def test_a_lost_link_leaves_nothing_of_a_copy(client: Client, zygote: int, walled: Wall) -> None:
    ask(client, "a", "silent")
    client.ping()
    client.close()
    other = walled.client()
    until(lambda: known(other) == {"z"}, "it is still known")


def test_who_can_be_asked_and_for_what(client: Client, zygote: int) -> None:
    plain = client.open(START, (1, "plain"), *argv("cat"), (5, STDIN))
    client.reply(plain)
    for asked in ("plain", "nobody", "a"):
        with pytest.raises(AgentError) as caught:
            client.reply(client.open(START, (1, "a"), *argv("x"), (5, STDIN), (10, asked)))
        assert caught.value.errno == errno.ESRCH
    for flags in (0, STDIN | PTY, STDIN | ROOT, STDIN | DETACHED, STDIN | ZYGOTE):
        assert refused(client, "a", "copy", flags=flags) == errno.EINVAL
    for flags in (ZYGOTE, ZYGOTE | STDIN | PTY):
        with pytest.raises(AgentError) as caught:
            client.reply(client.open(START, (1, "y"), *argv("cat"), (5, flags)))
        assert caught.value.errno == errno.EINVAL
    assert refused(client, "a", "copy", (10, b"no id!")) == errno.EINVAL
    many = [(3, f"V{n}=" + "x" * 60) for n in range(800)]
    channel = ask(client, "a", "copy", *many)  # a long one
    assert numbers(client.reply(channel))[2] == 1
    client.eof(channel, 0)
    assert follow(client, channel).code == 7
    client.eof(zygote, 0)  # its end
    while client.frame(zygote).type != CLOSE:
        pass
    assert refused(client, "b", "copy") == errno.ESRCH


def test_one_that_ends_before_its_report_is_read_is_a_command_all_the_same(
    client: Client, zygote: int, walled: Wall
) -> None:
    first, second, agent = walled.work / "first", walled.work / "second", walled.pid
    other = client.open(START, (1, "other"), *argv("sh", "-c", f"until [ -e {first} ]; do sleep 0.01; done"))
    client.reply(other)
    channel = ask(client, "a", "copy", (3, f"AFTER={second}"))
    until((walled.work / "second.waits").exists, "it was not copied")
    links = [client, *(walled.client() for _ in range(63))]
    os.kill(agent, signal.SIGSTOP)
    try:
        until(lambda: Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[0] == "T", "runs on")
        # It hears of 64 things at once, in their order. So it reaps before it comes to the report.
        first.touch()
        until(lambda: ended_children(agent) == 1, "the command did not end")
        for link in links:
            link.send(PING, 0, b"x")
        second.touch()
        until(lambda: ended_children(agent) == 2, "the copy did not end")
    finally:
        os.kill(agent, signal.SIGCONT)
    assert numbers(client.reply(channel))[2] == 1
    assert follow(client, channel).code == 7
    assert follow(client, other).code == 0


def test_many_at_once(client: Client, zygote: int) -> None:
    channels = {ask(client, f"c{n}", "copy"): f"c{n}" for n in range(8)}
    pids = set()
    for channel in channels:
        frame = client.frame(channel)
        if frame.type == ERROR and frame.errno == errno.EAGAIN:
            continue  # its socket holds only so many: the host starts a cold one
        assert frame.type == REPLY, frame
        pids.add(numbers(frame.payload)[1])
        client.data(channel, b"x\n")
        assert follow(client, channel).code == 7
    assert len(pids) > 1
    assert number(dict(parse(client.call(49)))[1]) >= 1
