"""Zygotes that attack: the agent, commands that are not theirs, and whoever is to end their copies."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable

import pytest
from wall import DATA, ERROR, PING, PONG, REPLY, AgentError, Client, Wall, argv, follow, numbers, parse, wall

START, ATTACH, SIGNAL, LIST, RESIZE, REMOVE = range(1, 7)
STDIN, ROOT, ZYGOTE = 2, 8, 64

# Answers each request as the words of its environment say.
PROGRAM = r"""
import array, os, signal, socket, struct, sys, time
asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, 0)
print("ready", flush=True)

def orphan(then):
    out, into = os.pipe()
    between = os.fork()
    if not between:
        if os.fork():
            os._exit(0)
        while os.getppid() != 1:
            time.sleep(0.001)
        os.close(out)
        then(into)
        os._exit(0)
    os.waitpid(between, 0)
    os.close(into)
    return out

def lead(into):
    os.setsid()
    os.write(into, b"%d" % os.getpid())
    os.close(into)
    time.sleep(600)

while True:
    data, fds, flags, _ = socket.recv_fds(asked, 1 << 18, 8)
    if not data and not fds:
        break
    env = dict(word.split("=", 1) for word in data.decode().split("\0")[1:-1])
    report, how = fds[3], env["HOW"]
    def say(first, second=0):
        os.write(report, struct.pack("=II", first, second))
    def copy(into):
        if how != "follower":
            os.setsid()
        say(os.getpid())
        for n in range(3):
            os.dup2(fds[n], n)
        if how == "twice":
            say(os.getpid())
            say(1)
        os.closerange(3, 64)
        time.sleep(600)
    if how in ("copy", "follower", "twice"):
        os.close(orphan(copy))
    elif how == "other":  # a process that has nothing to do with it, and says nothing
        out = orphan(lead)
        pid = int(os.read(out, 16))
        os.close(out)
        say(pid)
    elif how == "error":
        say(int(env["NUMBER"]), 1)
    elif how == "rights":
        thrown = os.open("/dev/null", os.O_RDONLY)
        right = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [thrown] * 200))]
        back = socket.socket(fileno=os.dup(report))
        back.sendmsg([struct.pack("=II", 13, 1)], right)
        back.close()
        os.close(thrown)
    elif how == "flood":
        thrown = os.open("/dev/null", os.O_RDONLY)
        right = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [thrown] * 50))]
        asked.setblocking(False)
        try:
            while True:
                asked.sendmsg([b"x" * 1000], right)
        except OSError:
            pass
        asked.setblocking(True)
        os.close(thrown)
        say(13, 1)
    elif how == "storm":
        def burst(into):
            os.setsid()
            time.sleep(600)
        for _ in range(300):
            os.close(orphan(lambda into: None))
        for _ in range(100):
            os.close(orphan(burst))
        os.close(orphan(copy))
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        os.close(orphan(copy))  # late
    for fd in fds:
        os.close(fd)
"""


def zygote(client: Client, name: str = "z", flags: int = STDIN | ZYGOTE) -> int:
    """A running zygote of the test's; its channel."""
    channel = client.open(START, (1, name), *argv("python3", "-c", PROGRAM), (5, flags))
    client.reply(channel)
    while True:
        frame = client.frame(channel)
        if frame.type == DATA:
            assert frame.payload[9:] == b"ready\n"
            return channel


def ask(client: Client, name: str, how: str, *extra: tuple[int, int | bytes | str]) -> int:
    """Start a command that is to be a copy; its channel."""
    return client.open(START, (1, name), *argv("copy"), (3, f"HOW={how}"), (5, STDIN), (10, "z"), *extra)


def refused(client: Client, *call: object) -> int:
    """The errno."""
    with pytest.raises(AgentError) as caught:
        client.reply(ask(client, *call))  # type: ignore[arg-type]
    assert caught.value.text.startswith("zygote")
    return caught.value.errno


def records(client: Client) -> dict[str, dict[int, bytes]]:
    """All records, by id."""
    rows = [dict(parse(value)) for tag, value in parse(client.call(LIST)) if tag == 1]
    return {row[1].decode(): row for row in rows}


def kill(client: Client, name: str) -> None:
    """As a host ends a command: its group."""
    client.call(SIGNAL, (1, name), (2, signal.SIGKILL))


def until(done: Callable[[], bool]) -> None:
    """Wait for it."""
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


def descriptors(walled: Wall) -> list[str]:
    """What the agent holds, numbers left out."""
    folder = f"/proc/{walled.pid}/fd"
    held = []
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            held.append(os.readlink(f"{folder}/{name}").split("[")[0])
    return sorted(held)


def inside(walled: Wall) -> int:
    """Processes that live in the agent's pid namespace."""
    space = os.readlink(f"/proc/{walled.pid}/ns/pid")
    count = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.readlink(f"/proc/{name}/ns/pid") == space:
                count += 1
    return count


def test_a_copy_can_be_ended_as_any_command(client: Client) -> None:
    """One in the group of its zygote would never hear the host's signals, which go to the command's group."""
    zygote(client)
    assert refused(client, "a", "follower") == errno.ECHILD
    channel = ask(client, "a", "copy")  # control: one that leads its own
    client.reply(channel)
    kill(client, "a")
    assert follow(client, channel).exit[2] == signal.SIGKILL


def test_nobody_else_is_made_a_command(client: Client) -> None:
    """What a host kills is what has reported itself, not whomever the zygote names."""
    zygote(client)
    before = set(records(client))
    assert refused(client, "a", "other") == errno.ECHILD
    assert set(records(client)) == before
    channel = ask(client, "a", "twice")  # control: one that names itself; what it says again is nothing
    pid = numbers(client.reply(channel))[1]
    assert int.from_bytes(records(client)["a"][2], "little") == pid > 1
    kill(client, "a")
    assert follow(client, channel).exit[2] == signal.SIGKILL


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        (errno.EEXIST, errno.EPROTO),  # would be: the id is in use
        (errno.ESRCH, errno.EPROTO),  # there is no zygote
        (errno.ETIMEDOUT, errno.EPROTO),
        (0, errno.EPROTO),
        (2**32 - 1, errno.EPROTO),
        (errno.ENOSPC, errno.ENOSPC),  # control
        (errno.ESTALE, errno.ESTALE),
    ],
)
def test_a_zygotes_errors_are_not_the_agents(client: Client, said: int, heard: int) -> None:
    zygote(client)
    assert refused(client, "a", "error", (3, f"NUMBER={said}")) == heard


def test_it_is_not_asked_before_it_has_said_a_word(client: Client) -> None:
    """Its host may still be sending what it is to run: a request would be taken for a part of that."""
    quiet = "import os\nos.read(0, 16)\n" + PROGRAM
    channel = client.open(START, (1, "z"), *argv("python3", "-c", quiet), (5, STDIN | ZYGOTE))
    client.reply(channel)
    assert refused(client, "a", "copy") == errno.ESRCH
    client.data(channel, b"go")
    while client.frame(channel).type != DATA:
        pass
    copy = ask(client, "a", "copy")  # control
    client.reply(copy)
    kill(client, "a")
    follow(client, copy)


def test_there_is_no_zygote_with_more_rights() -> None:
    with wall("root=1", "caps=3", "uid=0", "gid=0") as walled:
        client = walled.client()
        with pytest.raises(AgentError) as caught:
            zygote(client, flags=STDIN | ZYGOTE | ROOT)
        assert caught.value.errno == errno.EINVAL
        zygote(client)  # control


def test_descriptors_thrown_at_the_agent_do_not_stay(client: Client, walled: Wall) -> None:
    channel = zygote(client)
    before = descriptors(walled)
    for round in range(3):
        for how in ("rights", "flood"):
            assert refused(client, f"{how}{round}", how) == errno.EACCES
    assert refused(client, "a", "follower") == errno.ECHILD
    assert descriptors(walled) == before
    copy = ask(client, "b", "copy")  # control: where one runs, there are more
    client.reply(copy)
    assert len(descriptors(walled)) > len(before)
    kill(client, "b")
    follow(client, copy)
    kill(client, "z")
    follow(client, channel)
    until(lambda: len(descriptors(walled)) <= len(before))


def test_a_storm_of_forks_keeps_nobody_waiting(client: Client, walled: Wall) -> None:
    channel = zygote(client)
    copies = {name: ask(client, name, "storm") for name in ("a", "b", "c")}
    other = walled.client()
    for _ in range(20):
        other.ping()
        done = other.open(START, (1, "x"), *argv("true"))
        other.reply(done)
        assert follow(other, done).code == 0
        other.call(REMOVE, (1, "x"))
    killed: set[str] = set()
    for name, copy in copies.items():
        frame = client.frame(copy)  # it took part, or came too late
        if frame.type == REPLY:
            kill(client, name)
            killed.add(name)
        else:
            assert (frame.type, frame.errno) == (ERROR, errno.ETIMEDOUT)
    gone = (2).to_bytes(8, "little")
    until(lambda: all(records(client)[name][3] == gone for name in killed))
    until(lambda: inside(walled) > 100)  # control: there was a storm
    client.call(SIGNAL, (2, signal.SIGKILL), (3, 2))
    follow(client, channel)
    until(lambda: inside(walled) <= 1)
    client.ping()


def test_a_zygote_that_stands_still_holds_nothing(client: Client, walled: Wall) -> None:
    """Asked until its socket is full; every one is answered in time, and what comes late is no command."""
    channel = zygote(client)
    before = descriptors(walled)
    count = inside(walled)
    long = [(3, f"V{n}=" + "x" * 1000) for n in range(50)]
    asked = [ask(client, f"c{n}", "stop", *long) for n in range(12)]
    heard = []
    for one in asked:
        frame = client.frame(one)
        assert frame.type == ERROR, frame
        heard.append(frame.errno)
    assert set(heard) <= {errno.EAGAIN, errno.ETIMEDOUT} and errno.ETIMEDOUT in heard
    assert set(records(client)) == {"z"} and descriptors(walled) == before
    client.call(SIGNAL, (1, "z"), (2, signal.SIGCONT))
    for _ in heard:  # it stops at each of them again
        client.call(SIGNAL, (1, "z"), (2, signal.SIGCONT))
    assert set(records(client)) == {"z"}
    kill(client, "z")
    follow(client, channel)
    client.call(SIGNAL, (2, signal.SIGKILL), (3, 2))
    until(lambda: inside(walled) <= count - 1)


def test_it_is_reaped_whoever_it_says_it_is(client: Client) -> None:
    """A copy that ends at once, whose number may be another's by then, leaves nothing behind."""
    zygote(client)
    for n in range(20):
        channel = ask(client, f"a{n}", "copy")
        client.reply(channel)
        kill(client, f"a{n}")
        assert follow(client, channel).exit[2] == signal.SIGKILL
        client.call(REMOVE, (1, f"a{n}"))
    assert set(records(client)) == {"z"}
    client.send(PING, 0, b"hi")
    assert client.receive().type == PONG
