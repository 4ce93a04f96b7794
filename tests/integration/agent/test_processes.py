"""Commands: streams, terminals, signals, offsets, and what is kept of them."""

from __future__ import annotations

import errno
import os
import signal
import struct
from pathlib import Path

import pytest
from wall import (
    CLOSE,
    DATA,
    EOF,
    ERROR,
    EVENT,
    USER,
    AgentError,
    Client,
    Wall,
    argv,
    follow,
    number,
    numbers,
    parse,
    run,
    wall,
)

START, ATTACH, SIGNAL, LIST, RESIZE, REMOVE = range(1, 7)
PTY, STDIN, DROP, ROOT, MERGE, DETACHED = 1, 2, 4, 8, 16, 32
FROM_NOW = 2**64 - 1


def refused(error: int, client: Client, *call: object) -> None:
    """The operation answers this errno."""
    with pytest.raises(AgentError) as caught:
        client.call(*call)  # type: ignore[arg-type]
    assert caught.value.errno == error


def started(client: Client, name: str, *words: str, flags: int = 0, **extra: int) -> int:
    """Start a shell command; its channel."""
    tags = {"window": 8, "ring": 9, "rows": 6, "columns": 7}
    items = [(tags[key], value) for key, value in extra.items()]
    channel = client.open(START, (1, name), *argv(*words), (5, flags), *items)
    client.reply(channel)
    return channel


def records(client: Client) -> dict[str, dict[int, bytes]]:
    """process.list by id."""
    found = [dict(parse(value)) for tag, value in parse(client.call(LIST)) if tag == 1]
    return {record[1].decode(): record for record in found}


def test_streams_and_exit(client: Client) -> None:
    ended = run(client, "a", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (bytes(ended.out[1]), bytes(ended.out[2])) == (b"out\n", b"err\n")
    assert ended.eof == {1: 4, 2: 4}
    assert ended.exit[1] == 3
    assert 2 not in ended.exit
    assert ended.exit[3] == 4
    assert ended.exit[4] == 4
    assert ended.exit[7] > 0
    killed = run(client, "b", "sh", "-c", "kill -9 $$")
    assert killed.exit[2] == 9
    assert 1 not in killed.exit
    merged = run(client, "c", "sh", "-c", "echo 1; echo 2 >&2; echo 3", flags=MERGE)
    assert bytes(merged.out[1]) == b"1\n2\n3\n"
    assert merged.eof[2] == 0


def test_failing_steps_are_named(client: Client) -> None:
    for items, error, step in (
        ([*argv("nope-no-such")], errno.ENOENT, "program"),
        ([*argv("/")], errno.EACCES, "program"),
        ([*argv("true"), (4, "/nope")], errno.ENOENT, "cwd"),
        ([*argv("true"), (4, "/bin/true")], errno.ENOTDIR, "cwd"),
        ([*argv("true"), (5, ROOT)], errno.EPERM, "root"),
        ([*argv("true"), (3, "=x")], errno.EINVAL, ""),
        ([*argv("true"), (9, 100)], errno.EINVAL, ""),
        ([*argv("true"), (5, 64)], errno.EINVAL, ""),
        ([*argv(b"a\0b")], errno.EINVAL, ""),
        ([], errno.EINVAL, ""),
    ):
        with pytest.raises(AgentError) as caught:
            client.call(START, (1, "x"), *items)
        assert caught.value.errno == error
        assert caught.value.text.startswith(step)
    for name in ("", "a" * 65, "a/b", "ä"):
        refused(errno.EINVAL, client, START, (1, name), *argv("true"))
    assert "x" not in records(client)
    assert run(client, "x", "true").code == 0, "an id whose start failed is free"
    refused(errno.EEXIST, client, START, (1, "x"), *argv("true"))


def test_what_a_command_inherits(walled: Wall, client: Client) -> None:
    script = (
        "umask; pwd; ls /proc/self/fd | wc -l; "
        "grep -E 'Sig(Blk|Ign)|Cap(Inh|Prm|Eff|Amb)|Groups' /proc/self/status; "
        "id -u; cat /proc/self/oom_score_adj; ps -o sid= -p $$; echo $$"
    )
    lines = bytes(run(client, "a", "sh", "-c", script).out[1]).decode().split("\n")
    assert lines[0] == "0022"
    assert lines[1] == str(walled.work)
    assert lines[2] == "4"
    status = dict(line.split(":\t") for line in lines[3:-5])
    assert not status.pop("Groups").strip() or os.geteuid() != 0
    if os.geteuid() == 0:
        assert set(status.values()) == {"0" * 16}
        assert len(status) == 6
        assert lines[-5] == str(USER)
    assert lines[-4] == "500"
    assert lines[-3].strip() == lines[-2], "a session of its own"


def test_environment(client: Client) -> None:
    client.call(48, (1, "A=bound"), (1, "B=bound"))
    items = [(3, "B=own"), (3, "C=1"), (3, "C=2")]
    channel = client.open(START, (1, "e"), *argv("env"), *items)
    client.reply(channel)
    env = bytes(follow(client, channel).out[1]).decode().split()
    assert {"A=bound", "B=own", "C=2", "PATH=/usr/bin:/bin"} <= set(env)
    assert len(env) == len(set(env))
    client.call(48, (1, "A=other"))
    env = bytes(run(client, "f", "env").out[1]).decode().split()
    assert "A=other" in env
    assert not any(name.startswith("B=") for name in env)


def test_stdin(client: Client) -> None:
    assert bytes(run(client, "none", "cat").out[1]) == b"", "without the flag it is empty"
    channel = started(client, "cat", "cat", flags=STDIN)
    offset = 0
    for piece in (b"one ", b"two ", b"x" * 60_000):
        offset = client.data(channel, piece, offset)
    client.eof(channel, offset)
    assert len(follow(client, channel).out[1]) == offset
    full = started(client, "sleep", "sleep", "1000", flags=STDIN)
    client.data(full, b"y" * 60_000)
    client.data(full, b"y" * 5_536, 60_000)
    client.ping()
    client.call(SIGNAL, (1, "sleep"), (2, 9))
    assert follow(client, full).exit[2] == 9


def test_stdin_goes_on_after_a_lost_link(walled: Wall, client: Client) -> None:
    other = walled.client()
    channel = started(other, "cat", "cat", flags=STDIN)
    other.data(channel, b"first ")
    assert other.frame(channel).payload[9:] == b"first "
    other.close()
    channel = client.open(ATTACH, (1, "cat"))
    taken = numbers(client.reply(channel))[4]
    assert taken == 6
    end = client.data(channel, b"second", taken)
    client.eof(channel, end)
    assert bytes(follow(client, channel).out[1]) == b"first second"


def test_a_terminal(client: Client) -> None:
    script = (
        "tty; stty size; test -t 2 && echo yes; trap 'stty size; exit 7' WINCH; "
        "read line; echo got $line; while :; do sleep 0.1; done"
    )
    channel = started(client, "t", "sh", "-c", script, flags=PTY, rows=30, columns=100)
    text = b""
    while b"yes\r\n" not in text:
        frame = client.frame(channel)
        assert frame.type == EOF or frame.payload[0] == 1
        text += frame.payload[9:] if frame.type == DATA else b""
    assert text.startswith(b"/dev/pts/")
    assert b"30 100\r\n" in text
    client.data(channel, b"hello\n")
    while b"got hello\r\n" not in text:
        text += client.frame(channel).payload[9:]
    client.call(RESIZE, (1, "t"), (2, 50), (3, 132))
    ended = follow(client, channel)
    assert bytes(ended.out[1]) == b"50 132\r\n"
    assert ended.code == 7
    assert ended.exit[3] == ended.eof[1], "all of a terminal's output counts as the command's"
    run(client, "p", "true")
    refused(errno.ENOTTY, client, RESIZE, (1, "p"), (2, 1), (3, 1))


def test_a_terminal_is_controlled(client: Client) -> None:
    """Ctrl-C reaches the foreground; Ctrl-D ends the input."""
    channel = started(client, "t", "sleep", "1000", flags=PTY)
    client.data(channel, b"\x03")
    assert follow(client, channel).exit[2] == signal.SIGINT
    channel = started(client, "c", "cat", flags=PTY | STDIN)
    offset = client.data(channel, b"a\n")
    client.eof(channel, offset)
    assert follow(client, channel).code == 0


def test_signals(client: Client) -> None:
    script = (
        "trap 'echo term' TERM; (trap 'echo child; exit' TERM; echo up; while :; do sleep 0.05; done) & "
        "while :; do sleep 0.05; done"
    )
    channel = started(client, "g", "sh", "-c", script)
    assert client.frame(channel).payload[9:] == b"up\n"
    client.call(SIGNAL, (1, "g"), (2, signal.SIGTERM), (3, 1))
    text = b""
    while not {b"term", b"child"} <= set(text.split()):
        text += client.frame(channel).payload[9:]
    other = started(client, "other", "sleep", "1000")
    client.call(SIGNAL, (2, 9), (3, 2))
    assert follow(client, channel).exit[2] == 9
    assert follow(client, other).exit[2] == 9
    refused(errno.ESRCH, client, SIGNAL, (1, "g"), (2, 15))
    refused(errno.ENOENT, client, SIGNAL, (1, "nobody"), (2, 15))
    for items in (((1, "g"), (2, 99)), ((1, "g"), (2, 0)), ((2, 9),), ((1, "g"), (2, 9), (3, 2))):
        refused(errno.EINVAL, client, SIGNAL, *items)


def test_output_of_a_descendant_goes_on(client: Client) -> None:
    channel = started(client, "d", "sh", "-c", "echo own; (sleep 0.3; echo later) & exit 5")
    ended = follow(client, channel)
    assert bytes(ended.out[1]) == b"own\nlater\n"
    assert ended.code == 5
    assert ended.exit[3] == 4
    assert ended.eof[1] == 10


def test_resume_by_offset_after_a_lost_link(walled: Wall, client: Client) -> None:
    """Bytes sent to a host that died unread are there for the next one: nothing is lost, nothing doubled."""
    total = 3_000_000
    other = walled.client()
    other.auto_credit = False
    channel = started(other, "gen", "sh", "-c", f"seq 1 1000000 | head -c {total}")
    got = b""
    while len(got) < 100_000:
        got += other.frame(channel).payload[9:]
    other.credit(channel, 1, 50_000)
    other.ping()
    other.close()
    channel = client.open(ATTACH, (1, "gen"), (2, 50_000))
    assert numbers(client.reply(channel))[2] == 50_000
    ended = follow(client, channel)
    expected = b"".join(b"%d\n" % i for i in range(1, 1_000_001))[:total]
    assert expected[:50_000] + bytes(ended.out[1]) == expected
    assert ended.code == 0
    assert ended.eof[1] == total


def test_many_lost_links(walled: Wall, client: Client) -> None:
    """Hang up again and again in the middle of everything; the output stays whole."""
    total, at, got = 2_000_000, 0, b""
    run_once = walled.client()
    started(run_once, "gen", "sh", "-c", f"seq 1 1000000 | head -c {total}")
    run_once.close()
    while at < total:
        link = walled.client()
        channel = link.open(ATTACH, (1, "gen"), (2, at))
        assert numbers(link.reply(channel))[2] == at
        for _ in range(3):
            frame = link.frame(channel)
            if frame.type == DATA:
                assert struct.unpack_from("<BQ", frame.payload) == (1, at)
                got += frame.payload[9:]
                at = len(got)
        link.sock.send(b"\x30\0\0\0half a fra")
        link.close()
    assert got == b"".join(b"%d\n" % i for i in range(1, 1_000_001))[:total]


def test_back_pressure_and_drop(walled: Wall, client: Client) -> None:
    counter = "import os,sys\nfor i in range(100): os.write(1, b'x'*65536); os.write(2, b'%d ' % i)\n"
    client.auto_credit = False
    held = started(client, "held", "python3", "-c", counter, window=0, ring=4096)
    dropping = started(client, "drop", "python3", "-c", counter, flags=DETACHED | DROP, ring=4096)
    del dropping
    while records(client)["drop"][3] == struct.pack("<Q", 0) or number(records(client)["held"][5]) < 4096:
        pass
    assert number(records(client)["held"][3]) == 0, "it waits for its reader"
    assert number(records(client)["held"][5]) == 4096
    assert number(records(client)["drop"][5]) == 6_553_600
    client.auto_credit = True
    channel = client.open(ATTACH, (1, "drop"))
    reply = numbers(client.reply(channel))
    assert reply[2] == 6_553_600 - 4096
    assert len(follow(client, channel).out[1]) == 4096
    client.credit(held, 1, 1_000_000)
    client.credit(held, 2, 1_000)
    ended = follow(client, held)
    assert len(ended.out[1]) == 6_553_600
    assert ended.code == 0


def test_two_readers(walled: Wall, client: Client) -> None:
    other = walled.client()
    channel = started(client, "a", "sh", "-c", "read x; echo $x; seq 1 30000", flags=STDIN)
    second = other.open(ATTACH, (1, "a"))
    other.reply(second)
    events = client.open(ATTACH, (1, "a"), (4, 1))
    client.reply(events)
    client.data(channel, b"go\n")
    first = follow(client, channel)
    assert first.out == follow(other, second).out
    assert len(first.out[1]) == 168_897
    quiet = follow(client, events)
    assert quiet.out[1] == b""
    assert quiet.code == 0
    late = client.open(ATTACH, (1, "a"), (2, FROM_NOW), (3, FROM_NOW))
    assert numbers(client.reply(late))[2] == 168_897
    assert follow(client, late).out[1] == b""


def test_list_and_remove(client: Client) -> None:
    run(client, "done", "sh", "-c", "echo x; exit 2")
    started(client, "runs", "sleep", "1000", flags=DETACHED)
    killed = started(client, "killed", "sleep", "1000")
    client.call(SIGNAL, (1, "killed"), (2, 15))
    follow(client, killed)
    found = records(client)
    assert [number(found[name][3]) for name in ("runs", "done", "killed")] == [0, 1, 2]
    assert number(found["done"][4]) == 2
    assert number(found["killed"][4]) == 15
    assert number(found["done"][5]) == 2
    assert found["runs"][7] == b"sleep"
    refused(errno.EBUSY, client, REMOVE, (1, "runs"))
    client.call(REMOVE, (1, "done"))
    refused(errno.ENOENT, client, REMOVE, (1, "done"))
    assert set(records(client)) == {"runs", "killed"}


def test_records_are_bounded(client: Client) -> None:
    for i in range(600):
        channel = client.open(START, (1, f"p{i}"), *argv("true"), (5, DETACHED))
        client.reply(channel)
    while any(number(record[3]) == 0 for record in records(client).values()):
        pass
    found = records(client)
    assert len(found) == 512
    assert "p599" in found
    assert "p0" not in found


def test_orphans_are_reaped(walled: Wall, client: Client) -> None:
    run(client, "a", "sh", "-c", "for i in 1 2 3 4 5 6 7 8; do (sh -c 'sleep 0.0$0 &' $i); done; wait")
    while True:
        states = run(client, "ps", "sh", "-c", "ps -eo stat=,ppid= | grep -c '^Z' ; true")
        client.call(REMOVE, (1, "ps"))
        if bytes(states.out[1]).strip() == b"0":
            return


@pytest.mark.skipif(os.geteuid() != 0, reason="needs an agent that may change its user")
def test_root_of_the_sandbox() -> None:
    """User 0 only where the agent was started for it; it keeps just the capabilities it was given."""
    with wall("root=1", "caps=3", "uid=0", "gid=0") as walled:
        client = walled.client()
        ended = run(client, "a", "grep", "-E", "Uid|CapEff|CapPrm|CapInh", "/proc/self/status", flags=ROOT)
        text = bytes(ended.out[1]).decode()
        assert "Uid:\t0\t0\t0\t0" in text
        assert "CapInh:\t0000000000000003" in text


def test_cgroups_are_joined_before_the_program_runs(tmp_path: Path) -> None:
    """The child writes to the descriptors that the host opened; without that right the start fails."""
    joined = os.open(tmp_path / "procs", os.O_RDWR | os.O_CREAT)
    with wall(f"cgroup={joined}") as walled:
        assert run(walled.client(), "a", "true").code == 0
        assert (tmp_path / "procs").read_bytes() == b"0"
    read_only = os.open(tmp_path / "procs", os.O_RDONLY)
    with wall(f"cgroup={read_only}") as walled, pytest.raises(AgentError) as caught:
        run(walled.client(), "a", "true")
    assert caught.value.text.startswith("cgroup")
    os.close(joined)
    os.close(read_only)


def test_closing_a_channel_leaves_the_process(client: Client) -> None:
    channel = started(client, "a", "sleep", "1000")
    client.send(CLOSE, channel)
    assert client.frame(channel).type == CLOSE
    assert number(records(client)["a"][3]) == 0
    again = client.open(ATTACH, (1, "a"))
    client.reply(again)
    client.call(SIGNAL, (1, "a"), (2, 9))
    kinds = []
    while CLOSE not in kinds:
        kinds.append(client.frame(again).type)
    assert kinds == [EOF, EOF, EVENT, CLOSE]
    assert ERROR not in kinds


def test_ended_commands_hold_no_terminal(walled: Wall, client: Client) -> None:
    """Records of ended commands keep their output, and no descriptor."""
    before = len(os.listdir(f"/proc/{walled.pid}/fd"))
    for i in range(20):
        run(client, f"t{i}", "echo", "x", flags=PTY)
        channel = started(client, f"p{i}", "cat", flags=STDIN)
        client.call(SIGNAL, (1, f"p{i}"), (2, 9))
        follow(client, channel)
    assert len(os.listdir(f"/proc/{walled.pid}/fd")) == before


def test_one_who_takes_the_input_over_is_the_only_one_who_writes(walled: Wall, client: Client) -> None:
    first = started(client, "a", "cat", flags=STDIN)
    at = client.data(first, b"one ")
    assert client.frame(first).payload[9:] == b"one "
    other, third = walled.client(), walled.client()
    beside = third.open(ATTACH, (1, "a"))
    assert numbers(third.reply(beside))[4] == 4
    alone = other.open(ATTACH, (1, "a"), (2, FROM_NOW), (4, 2))
    assert numbers(other.reply(alone))[4] == 4
    for told, channel in ((client, first), (third, beside)):
        while (frame := told.frame(channel)).type != EVENT:
            pass
        assert frame.payload == b"\x04\x00"
    at = client.data(first, b"late ", at)  # more of what is dropped than it has credit at once
    for _ in range(40):
        at = client.data(first, b"x" * 4096, at)
        client.ping()
    third.data(beside, b"late ", 4)
    third.eof(beside, 9)
    third.ping()
    after = walled.client()
    joined = after.open(ATTACH, (1, "a"), (2, FROM_NOW))  # after it: as ever
    assert numbers(after.reply(joined))[4] == 4
    other.data(alone, b"two ", 4)
    assert other.frame(alone).payload[9:] == b"two "
    after.data(joined, b"three ", 4)
    assert other.frame(alone).payload[9:] == b"three "
    other.eof(alone, 8)
    assert follow(other, alone).code == 0
    assert bytes(follow(client, first).out[1]) == b"two three "
    with pytest.raises(AgentError):
        after.call(ATTACH, (1, "a"), (4, 4))


def test_input_can_be_taken_over_before_it_runs(walled: Wall, client: Client) -> None:
    """Whichever comes first: the one who starts it hears of it after its REPLY."""
    other = walled.client()
    first = client.open(START, (1, "a"), *argv("cat"), (5, STDIN))
    alone = None
    while alone is None:
        try:
            channel = other.open(ATTACH, (1, "a"), (4, 2))
            other.reply(channel)
            alone = channel
        except AgentError as error:
            if error.errno != errno.ENOENT:
                raise
    client.reply(first)
    assert client.frame(first).type == EVENT
    client.data(first, b"dropped")
    client.ping()
    other.data(alone, b"kept")
    other.eof(alone, 4)
    assert bytes(follow(other, alone).out[1]) == b"kept"
