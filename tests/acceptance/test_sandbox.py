"""ringfence sandbox and ringfence snapshot, as a user meets them."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import time

import pytest


@pytest.fixture
def kept(ringfence):
    """The id of a kept sandbox with a file."""
    done = ringfence("run", "--keep", "--name", "mine", "--quiet", "--memory", "256M", "--", "sh", "-c",
                     "echo one > file")  # fmt: skip
    assert done.returncode == 0, done.stderr
    (found,) = ringfence.json("sandbox", "ls", "--json")["sandboxes"]
    yield found["id"]
    ringfence("sandbox", "rm", "--all", "--grace", "0s")


def said(done, words, code=125):
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert words in done.stderr.decode(), done.stderr


def test_ls_and_show(ringfence, kept):
    (found,) = ringfence.json("sandbox", "ls", "--json")["sandboxes"]
    assert found["runtime"] == "jail"
    assert found["state"] == "running"
    assert found["labels"] == {"name": "mine"}
    assert found["started_at"] < time.time() < found["deadline"]
    assert ringfence.json("list", "--json")["sandboxes"][0]["id"] == kept
    text = ringfence("sandbox", "ls").stdout.decode()
    assert kept in text
    assert "mine" in text
    shown = ringfence.json("sandbox", "show", "--json", kept)
    assert shown["boundary"]["seccomp"] == "filter"
    assert [each["state"] for each in shown["processes"]] == ["exited"]
    assert "L2 (namespaces)" in ringfence("sandbox", "show", kept).stdout.decode()


def test_exec_passes_everything_through(ringfence, kept):
    done = ringfence("sandbox", "exec", "-e", "A=b", "-w", "/tmp", kept, "--", "sh", "-c",
                     "cat; echo $A; pwd; echo bad >&2; exit 3", input=b"in\n")  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (3, b"in\nb\n/tmp\n", b"bad\n")
    assert ringfence("sandbox", "exec", kept, "cat", "/workspace/file").stdout == b"one\n"
    document = ringfence.json(
        "sandbox", "exec", "--json", kept, "--", "sh", "-c", "echo x; kill -9 $$", code=137
    )
    assert (document["cause"], document["stdout"], document["exit_code"]) == ("signaled", "x\n", 137)
    said(ringfence("sandbox", "exec", kept, "nonesuch"), "not found in the sandbox", 127)
    said(ringfence("sandbox", "exec", kept), "no command to run")
    said(ringfence("sandbox", "exec", "-w", "/nowhere", kept, "true"), "--workdir /nowhere")


def test_exec_beside_another_exec_and_after_it_was_killed(ringfence, kept):
    first = ringfence.start("sandbox", "exec", kept, "--", "sh", "-c", "echo up; cat")
    assert first.stdout.readline() == b"up\n"
    assert ringfence("sandbox", "exec", kept, "echo", "beside").stdout == b"beside\n"
    first.stdin.write(b"through\n")
    first.stdin.close()
    assert first.stdout.read() == b"through\n"
    assert first.wait(60) == 0
    first.stdout.close()
    first.stderr.close()
    # The first Ctrl-C is the command's; told to end, we end the command and not the sandbox.
    for number in (signal.SIGINT, signal.SIGTERM):
        other = ringfence.start("sandbox", "exec", kept, "--", "sh", "-c", "echo up; exec sleep 600")
        assert other.stdout.readline() == b"up\n"
        other.send_signal(number)
        assert other.wait(60) == 128 + number
        for stream in (other.stdin, other.stdout, other.stderr):
            stream.close()
    gone = ringfence("sandbox", "exec", kept, "sh", "-c", "ps ax 2>/dev/null | grep -c '[s]leep 600'")
    assert gone.stdout.strip() in (b"0", b"")
    assert ringfence("sandbox", "exec", kept, "echo", "on").stdout == b"on\n"


def test_exec_with_a_terminal(ringfence, kept):
    ours, theirs = pty.openpty()
    script = "tty; read line; echo got $line"
    command = ringfence.start("sandbox", "exec", "-i", kept, "--", "sh", "-c", script,
                              stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL)  # fmt: skip
    os.close(theirs)
    seen = b""
    while b"/dev/pts" not in seen:
        seen += os.read(ours, 1024)
    os.write(ours, b"words\n")
    while b"got words" not in seen:
        seen += os.read(ours, 1024)
    assert command.wait(60) == 0
    os.close(ours)


def test_snapshot_restore_fork_reset(ringfence, kept):
    assert ringfence("sandbox", "snapshot", kept, "--name", "ready").stdout == b"ready\n"
    made = ringfence.json("snapshot", "show", "--json", "ready")
    assert (made["kind"], made["runtime"], made["source"], made["secrets"]) == ("disk", "jail", kept, False)
    assert "env" not in str(made)
    copy = ringfence("sandbox", "restore", "ready", "--name", "second").stdout.decode().strip()
    forks = ringfence.json("sandbox", "fork", "--json", kept, "-n", "2")["copies"]
    names = {}
    for each in (copy, *forks):
        done = ringfence("sandbox", "exec", each, "sh", "-c", "cat file; hostname; cat /etc/machine-id")
        text, host, machine = done.stdout.decode().split()
        assert (text, host) == ("one", each)
        names[machine] = each
    assert len(names) == 3
    listed = ringfence.json("sandbox", "ls", "--json")["sandboxes"]
    assert {each["id"]: each["labels"].get("name") for each in listed}[copy] == "second"
    assert ringfence("sandbox", "reset", kept).stdout == f"reset {kept}\n".encode()
    assert ringfence("sandbox", "exec", kept, "sh", "-c", "ls; hostname").stdout.decode().split() == [kept]
    said(ringfence("snapshot", "rm", "ready"), f"in use by {copy}")
    assert [each["name"] for each in ringfence.json("snapshot", "ls", "--json")["snapshots"]] == ["ready"]
    assert ringfence.json("sandbox", "rm", "--json", kept, copy, *forks, "--grace", "0s")["stopped"]
    said(ringfence("snapshot", "rm", "ready", "raedy"), "no snapshot 'raedy'")  # and the other one stays
    assert ringfence("snapshot", "rm", "ready").stdout == b"removed ready\n"
    assert ringfence.json("snapshot", "ls", "--json") == {"snapshots": [], "damaged": {}}
    assert b"no snapshots" in ringfence("snapshot", "ls").stdout


def test_mistakes_are_told_with_their_remedy(ringfence, kept):
    said(ringfence("sandbox", "exec", kept[:-1] + "!", "true"), kept)  # a close one is named
    said(ringfence("sandbox", "snapshot", kept, "--memory"), "runtimes that have: gvisor and qemu")
    said(ringfence("sandbox", "snapshot", kept, "--name", "No/Name"), "no name of a snapshot")
    said(ringfence("sandbox", "fork", kept, "-n", "0"), "impossible")
    ringfence("sandbox", "snapshot", kept, "--name", "ready")
    said(ringfence("sandbox", "snapshot", kept, "--name", "ready"), "there is a snapshot ready already")
    said(ringfence("sandbox", "restore", "redy"), "did you mean ready?")
    said(ringfence("sandbox", "exce", kept), "did you mean exec?")
    said(ringfence("snapshot", "check"), "--all")
    if os.geteuid() == 0:
        assert ringfence("sandbox", "pause", kept).returncode == 0
        assert ringfence.json("sandbox", "ls", "--json")["sandboxes"][0]["state"] == "paused"
        said(ringfence("sandbox", "exec", kept, "true"), f"ringfence sandbox resume {kept}")
        assert ringfence("sandbox", "resume", kept).returncode == 0
    assert ringfence("sandbox", "exec", kept, "cat", "file").stdout == b"one\n"


def test_a_damaged_snapshot_is_found_refused_and_removed(ringfence, no_leaks, kept):
    for name in ("good", "bad", "worse"):
        ringfence("sandbox", "snapshot", kept, "--name", name)
    assert b"as it was made" in ringfence("snapshot", "check", "good").stdout
    (no_leaks.home / "snapshots/bad/layer/workspace/file").write_text("two\n")
    (no_leaks.home / "snapshots/worse/manifest.json").write_text("{}")
    said(ringfence("sandbox", "restore", "bad"), "'/workspace/file' is not what was saved")
    said(ringfence("sandbox", "restore", "worse"), "manifest makes no sense")
    checked = ringfence.json("snapshot", "check", "--all", "--json", code=1)["snapshots"]
    assert {each["name"]: bool(each["damaged"]) for each in checked} == {
        "good": False, "bad": True, "worse": True,
    }  # fmt: skip
    shown = ringfence("snapshot", "ls")
    assert b"worse is damaged" in shown.stderr
    assert ringfence.json("snapshot", "gc", "--json") == {"removed": []}
    assert ringfence.json("snapshot", "gc", "--damaged", "--json") == {"removed": ["worse"]}
    assert ringfence.json("snapshot", "gc", "--older-than", "1h", "--json") == {"removed": []}
    assert ringfence("snapshot", "rm", "bad", "good").returncode == 0


def test_completion_knows_the_verbs(ringfence):
    script = ringfence("completion", "bash").stdout.decode()
    for word in ("snapshot", "restore", "fork", "--memory", "gc"):
        assert word in script
    for verb in ("exec", "snapshot", "restore", "fork", "reset", "pause", "show"):
        done = ringfence("sandbox", verb, "--help")
        assert done.returncode == 0
        assert b"examples:" in done.stdout
        assert b"--json" in done.stdout
