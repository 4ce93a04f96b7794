"""A host that lacks something, a runtime that fails: one clear message, exit 125, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from support.commands import PATIENCE

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="root takes something from its own mount namespace")


def in_own_mounts(ringfence, script, *arguments):
    """Run ``ringfence`` after a shell script has changed a mount namespace of its own."""
    command = ("unshare", "--mount", "sh", "-ec", 'eval "$1"; shift; exec "$@"', "sh", script)
    return subprocess.run(
        [*command, sys.executable, "-m", "ringfence", *arguments],
        env=ringfence.env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE,
    )


@root_only
def test_a_full_disk(ringfence):
    script = (
        'mount -t tmpfs -o size=64k,mode=711 none "$RINGFENCE_HOME";'
        ' head -c 100000 /dev/zero > "$RINGFENCE_HOME/fill" 2>/dev/null || true'
    )
    done = in_own_mounts(ringfence, script, "run", "--", "true")
    assert done.returncode == 125, done.stderr
    message, hint, *rest = done.stderr.decode().splitlines()
    assert "the disk is full" in message
    assert "RINGFENCE_HOME" in hint
    assert not rest


@root_only
@pytest.mark.parametrize(
    "arguments",
    [("version",), ("version", "--json"), ("template", "ls"), ("template", "show", "--json", "none")],
)
def test_a_full_disk_under_our_own_output(ringfence, arguments):
    with open("/dev/full", "wb") as full:
        done = ringfence(*arguments, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 125
    assert b"Traceback" not in done.stderr
    assert done.stderr.startswith(b"ringfence: ")


def test_cgroups_that_can_not_be_written_are_polled_and_said_to_be(ringfence):
    script = "for m in $(awk '$3 ~ /^cgroup/ {print $2}' /proc/mounts); do mount -o remount,bind,ro $m; done"
    memory = ("--memory", "64M", "--", "python3", "-c", "x=bytearray(10**9)")
    done = in_own_mounts(ringfence, script, "run", "--json", *memory)
    shown = json.loads(done.stdout)
    assert (done.returncode, shown["cause"]) == (137, "out_of_memory")
    assert shown["boundary"]["limits"]["memory"] == "polled"
    assert any("not writable" in note for note in shown["boundary"]["notes"])


def faulty(ringfence, faults, *command, runtime="fake"):
    ringfence.env["RINGFENCE_FAKE_FAULTS"] = json.dumps(faults)
    return ringfence("run", "--runtime", runtime, "--", *(command or ("true",)))


@pytest.mark.parametrize(
    ("faults", "text"),
    [
        ({"start_error": "listen"}, "listen"),
        ({"start_error": "spawn"}, "spawn"),
        ({"start_error": "handle"}, "handle"),
        ({"refuse_connect": -1}, "can't be reached"),
        ({"garbage": True}, "frame"),
    ],
)
def test_a_runtime_that_fails(ringfence, faults, text):
    done = faulty(ringfence, faults)
    assert (done.returncode, done.stdout) == (125, b"")
    err = done.stderr.decode()
    assert text in err
    assert sum(line.startswith("ringfence: ") for line in err.splitlines()) == 1
    assert "Traceback" not in err


def test_a_runtime_that_hangs(ringfence):
    done = faulty(ringfence, {"start_hang": True})
    assert done.returncode == 125
    assert b"did not start" in done.stderr
    assert b"ringfence doctor" in done.stderr


def test_a_runtime_that_hangs_can_be_interrupted(ringfence, no_leaks):
    ringfence.env["RINGFENCE_FAKE_FAULTS"] = '{"start_hang": true}'
    process = ringfence.start("run", "--runtime", "fake", "--", "true")
    end = time.monotonic() + PATIENCE
    while not no_leaks.ids:  # the sandbox is being made
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert b"interrupted" in err


def test_a_wall_that_dies(ringfence):
    done = faulty(ringfence, {"die_after": 0.3}, "sleep", "60")
    assert done.returncode == 125
    assert b"without being asked to" in done.stderr


def test_a_link_that_is_cut_loses_no_output(ringfence):
    # In small pieces: every link passes some of them before it is cut, in the middle of a frame as a rule.
    script = "i=0; while [ $i -lt 60 ]; do i=$((i+1)); echo $i; sleep 0.01; done"
    done = faulty(ringfence, {"cut_after": 900}, "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"".join(b"%d\n" % number for number in range(1, 61))


@pytest.mark.parametrize("delay", [0.1, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5])
def test_killed_with_kill_9_at_any_moment(ringfence, no_leaks, delay):
    process = ringfence.start("run", "--", "sh", "-c", "sleep 600 & sleep 600", start_new_session=True)
    time.sleep(delay)  # not a synchronisation: whatever it is doing by then
    process.kill()
    process.communicate(timeout=60)
    assert ringfence("run", "--", "true").returncode == 0
    no_leaks.check()
