"""``--file`` and ``--out`` through the real guest agent."""

from __future__ import annotations

import os

import pytest


def test_in_and_out(ringfence, tmp_path):
    (tmp_path / "job.sh").write_text("#!/bin/sh\nwc -l < data/list > report\nexit 4\n")
    (tmp_path / "job.sh").chmod(0o755)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "list").write_text("1\n2\n3\n")
    done = ringfence(
        "run", "--file", "job.sh", "--file", "data", "--out", "report", "--", "./job.sh", cwd=tmp_path
    )
    assert done.returncode == 4, done.stderr
    assert (tmp_path / "report").read_text().strip() == "3"


def test_a_folder_out(ringfence, tmp_path):
    script = "mkdir -p o/sub; echo a > o/a; echo b > o/sub/b; ln -s a o/link; ln -s /etc/passwd o/evil"
    shown = ringfence.json("run", "--json", "--out", f"o:{tmp_path}/o", "--", "sh", "-c", script)
    assert (tmp_path / "o/sub/b").read_text() == "b\n"
    assert not os.path.lexists(tmp_path / "o/evil")
    (out,) = shown["files_out"]
    assert out["files"] == 2
    assert out["skipped"][0]["path"].endswith("evil")


def test_what_is_not_there_is_an_error_after_the_command(ringfence, tmp_path):
    done = ringfence("run", "--out", f"nosuch:{tmp_path}/x", "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (125, b"ran\n")
    assert done.stderr.count(b"No such file") == 1
    assert f"--out nosuch:{tmp_path}/x: No such file or directory\n".encode() in done.stderr
    assert os.listdir(tmp_path) == []


def test_one_that_fails_keeps_no_other_from_coming(ringfence, tmp_path):
    done = ringfence(
        "run",
        "--out",
        f"nosuch:{tmp_path}/x",
        "--out",
        f"f:{tmp_path}/f",
        "--",
        "sh",
        "-c",
        "echo x > f; exit 3",
    )
    assert done.returncode == 3
    assert (tmp_path / "f").read_text() == "x\n"


def test_a_symlink_inside_is_not_followed(ringfence, tmp_path):
    done = ringfence("run", "--out", f"l:{tmp_path}/l", "--", "ln", "-s", "/etc/passwd", "l")
    assert done.returncode == 125
    assert os.listdir(tmp_path) == []


def test_a_pipe_inside_does_not_hang(ringfence, tmp_path):
    done = ringfence("run", "--out", f"p:{tmp_path}/p", "--", "mkfifo", "p")
    assert done.returncode == 125
    assert os.listdir(tmp_path) == []


def test_after_the_deadline_the_reason_is_said(ringfence, tmp_path):
    script = "echo x > f; sleep 60"
    done = ringfence("run", "--timeout", "1s", "--out", f"f:{tmp_path}/f", "--", "sh", "-c", script)
    assert done.returncode == 124
    assert b"the sandbox has ended (deadline)" in done.stderr
    assert os.listdir(tmp_path) == []


def test_after_out_of_memory_files_still_come_out(ringfence, tmp_path):
    code = "open('f','w').write('x'); bytearray(10**9)"
    out = ("--out", f"f:{tmp_path}/f")
    shown = ringfence.json("run", "--json", "--memory", "64M", *out, "--", "python3", "-c", code, code=137)
    if shown["boundary"]["limits"]["memory"] == "polled":
        # The watchdog kills the whole sandbox: nothing is left to copy from, and that is said.
        assert "the sandbox has ended (out_of_memory)" in shown["files_out"][0]["error"]["message"]
        assert os.listdir(tmp_path) == []
    else:
        assert (tmp_path / "f").read_text() == "x"


@pytest.mark.parametrize("place", ["/etc/shadow", "/usr/bin/new", "/proc/1/x"])
def test_in_to_a_place_that_can_not_be_written(ringfence, tmp_path, place):
    (tmp_path / "f").touch()
    done = ringfence(
        "run", "--readonly", "--runtime", "jail", "--file", f"{tmp_path}/f:{place}", "--", "true"
    )
    assert done.returncode == 125
    assert place.encode() in done.stderr


def test_hostile_names_in_a_folder(ringfence, tmp_path):
    script = (
        'mkdir o; cd o; touch "$(printf \'a\\nb\')" "$(printf \'\\377\')" -- -rf "..." " ";'
        ' touch "$(head -c 255 /dev/zero | tr "\\0" n)"'
    )
    done = ringfence("run", "--out", f"o:{tmp_path}/o", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    names = os.listdir(os.fsencode(tmp_path / "o"))
    assert sorted(names) == sorted([b"a\nb", b"\xff", b"-rf", b"...", b" ", b"n" * 255])
