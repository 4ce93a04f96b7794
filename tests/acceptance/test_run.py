"""``ringfence run`` as a user runs it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest


def test_output_and_exit_code_are_the_commands(ringfence):
    done = ringfence("run", "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"out\n", b"err\n")


def test_dashes_are_not_needed(ringfence):
    assert ringfence("run", "echo", "--", "--json").stdout == b"-- --json\n"


@pytest.mark.parametrize("runtime", ["jail", "bubblewrap", "fake"])
def test_every_runtime_runs_a_command(ringfence, runtime):
    done = ringfence("run", "--runtime", runtime, "--", "sh", "-c", "echo hello; exit 7")
    assert (done.returncode, done.stdout) == (7, b"hello\n"), done.stderr


def test_the_default_is_a_wall(ringfence):
    shown = ringfence.json("run", "--json", "--", "true")
    assert shown["level"] == "L2"
    assert shown["runtime"] in ("jail", "bubblewrap")
    assert shown["boundary"]["seccomp"] == "filter"


def test_input_is_passed_byte_for_byte(ringfence):
    data = os.urandom(300_000)
    done = ringfence("run", "--", "cat", input=data)
    assert done.stdout == data


def test_fifty_megabytes_of_input(ringfence):
    data = os.urandom(1 << 20) * 50
    done = ringfence("run", "--", "sha256sum", input=data)
    assert done.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()


def test_fifty_megabytes_of_output(ringfence):
    done = ringfence("run", "--output", "100M", "--", "head", "-c", "50000000", "/dev/zero")
    assert done.returncode == 0, done.stderr
    assert done.stdout == bytes(50_000_000)


def test_input_from_a_file_and_output_to_one(ringfence, tmp_path):
    data = os.urandom(100_000)
    (tmp_path / "in").write_bytes(data)
    with open(tmp_path / "in", "rb") as source, open(tmp_path / "out", "wb") as target:
        ringfence("run", "--", "cat", stdin=source, stdout=target, stderr=subprocess.DEVNULL)
    assert (tmp_path / "out").read_bytes() == data


def test_streams_that_are_closed(ringfence):
    script = f"exec {sys.executable} -m ringfence run -- sh -c 'cat; echo x; exit 5' <&- >&- 2>&-"
    done = subprocess.run(["sh", "-c", script], env=ringfence.env, timeout=60)
    assert done.returncode == 5


def test_sockets_as_streams(ringfence):
    ours, theirs = socket.socketpair()
    with ours:
        process = ringfence.start("run", "--", "tr", "a", "b", stdin=theirs, stdout=theirs)
        theirs.close()
        ours.sendall(b"aaa")
        ours.shutdown(socket.SHUT_WR)
        assert ours.recv(100) == b"bbb"
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_command_that_reads_no_input_is_not_waited_for(ringfence):
    process = ringfence.start("run", "--", "echo", "done")
    out, _ = process.stdout.read(), process.wait(60)  # its input is still open
    process.stdin.close()
    process.stderr.close()
    process.stdout.close()
    assert (out, process.returncode) == (b"done\n", 0)


def test_a_reader_that_goes_away_ends_the_command_as_in_a_shell(ringfence):
    process = ringfence.start("run", "--", "yes")
    assert process.stdout.readline() == b"y\n"
    process.stdout.close()
    assert process.wait(60) == 128 + signal.SIGPIPE
    assert process.stderr.read() == b""
    process.stderr.close()
    process.stdin.close()


def test_a_slow_reader_loses_nothing(ringfence):
    process = ringfence.start("run", "--output", "50M", "--", "seq", "1000000")
    time.sleep(0.5)  # not a synchronisation: every pipe on the way is full long before
    out = process.stdout.read()
    for stream in (process.stdin, process.stdout, process.stderr):
        stream.close()
    assert process.wait(60) == 0
    assert out == b"".join(b"%d\n" % number for number in range(1, 1_000_001))


def test_a_deadline_is_kept_even_if_nobody_reads(ringfence):
    process = ringfence.start("run", "--timeout", "1s", "--output", "1G", "--", "yes")
    assert process.wait(60) == 124
    assert b"deadline" in process.stderr.read()
    for stream in (process.stdin, process.stdout, process.stderr):
        stream.close()


# -- causes


def test_out_of_memory(ringfence):
    done = ringfence("run", "--memory", "64M", "--", "python3", "-c", "x=bytearray(10**9)")
    assert done.returncode == 137
    assert b"ringfence: killed: out of memory (limit 64MiB); raise it with --memory" in done.stderr


def test_deadline(ringfence, no_leaks):
    done = ringfence("run", "--timeout", "2s", "--", "sleep", "60")
    assert done.returncode == 124
    assert b"killed: deadline (limit 2s); raise it with --timeout" in done.stderr
    no_leaks.check()


def test_deadline_kills_the_whole_tree(ringfence, no_leaks):
    script = "setsid sleep 61 & (sleep 62 & sleep 63) & trap '' TERM INT HUP; sleep 64"
    done = ringfence("run", "--timeout", "1s", "--", "sh", "-c", script)
    assert done.returncode == 124
    no_leaks.check()


def test_output_limit(ringfence):
    done = ringfence("run", "--output", "100K", "--", "yes")
    assert done.returncode == 137
    assert len(done.stdout) <= 100 * 1024
    assert b"too much output (limit 100KiB); raise it with --output" in done.stderr


def test_cpu_time(ringfence):
    done = ringfence("run", "--cpu-time", "1s", "--", "sh", "-c", "while :; do :; done")
    assert done.returncode == 137
    assert b"CPU time used up (limit 1s); raise it with --cpu-time" in done.stderr


def test_a_signal_of_its_own(ringfence):
    done = ringfence("run", "--", "sh", "-c", "kill -SEGV $$")
    assert done.returncode == 139
    assert b"SIGSEGV" in done.stderr


def test_quiet(ringfence):
    done = ringfence("run", "-q", "--timeout", "1s", "--", "sleep", "60")
    assert (done.returncode, done.stderr) == (124, b"")


def test_processes_are_limited(ringfence):
    script = """
import os
children = 0
try:
    while children < 500:
        if os.fork() == 0:
            os.read(0, 1)
            os._exit(0)
        children += 1
except OSError:
    print(children)
"""
    shown = ringfence.json("run", "--json", "--pids", "20", "--", "python3", "-c", script)
    assert 0 < int(shown["stdout"]) < 20


def test_a_full_disk_is_enospc_and_not_out_of_memory(ringfence):
    script = "head -c 100000000 /dev/zero > f; echo $?; stat -c %s f"
    done = ringfence("run", "--memory", "64M", "--disk", "16M", "--", "sh", "-c", script)
    status, size = done.stdout.split()
    assert status != b"0"
    assert 0 < int(size) <= 16 << 20
    assert b"No space left" in done.stderr


# -- signals


def started(process):
    """Wait until the command inside runs: it says so."""
    assert process.stdout.readline() == b"ready\n"


def finish(process):
    code = process.wait(60)
    rest = process.stdout.read(), process.stderr.read()
    for stream in (process.stdin, process.stdout, process.stderr):
        stream.close()
    return code, *rest


def test_ctrl_c_interrupts_the_command_which_may_handle_it(ringfence):
    process = ringfence.start(
        "run", "--", "sh", "-c", "trap 'echo caught; exit 9' INT; echo ready; sleep 60 & wait"
    )
    started(process)
    process.send_signal(signal.SIGINT)
    code, out, _ = finish(process)
    assert (code, out) == (9, b"caught\n")


def test_ctrl_c_that_is_not_handled(ringfence):
    process = ringfence.start(
        "run", "--", "python3", "-c", "import time; print('ready', flush=True); time.sleep(60)"
    )
    started(process)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130
    assert b"KeyboardInterrupt" in err


def test_a_second_ctrl_c_kills(ringfence):
    process = ringfence.start(
        "run", "--", "sh", "-c", "trap 'echo again' INT; echo ready; while :; do sleep 1; done"
    )
    started(process)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == b"again\n"
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 137
    assert b"killed on request" in err


def test_sigterm_lets_the_command_clean_up(ringfence):
    process = ringfence.start(
        "run", "--", "sh", "-c", "trap 'echo bye; exit 4' TERM; echo ready; sleep 60 & wait"
    )
    started(process)
    process.send_signal(signal.SIGTERM)
    code, out, _ = finish(process)
    assert out == b"bye\n"
    assert code in (4, 137, 143)


def test_other_signals_are_passed_on(ringfence):
    process = ringfence.start(
        "run", "--", "sh", "-c", "trap 'echo one; exit 1' USR1; echo ready; sleep 60 & wait"
    )
    started(process)
    process.send_signal(signal.SIGUSR1)
    code, out, _ = finish(process)
    assert (code, out) == (1, b"one\n")


def test_stop_and_continue(ringfence):
    script = "echo ready; read line; echo over"
    process = ringfence.start("run", "--", "sh", "-c", script, start_new_session=True)
    started(process)
    process.send_signal(signal.SIGTSTP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    process.send_signal(signal.SIGCONT)
    process.stdin.write(b"on\n")
    process.stdin.flush()
    code, out, _ = finish(process)
    assert (code, out) == (0, b"over\n")


def test_interrupted_before_the_command_runs(ringfence, no_leaks):
    for delay in (0.05, 0.15, 0.3):
        process = ringfence.start("run", "--", "sleep", "60")
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        code, _, err = finish(process)
        assert code != 0
        # Before our first line Python itself is interrupted, and says so in its own way (exit code 1).
        assert code == 130 or b"KeyboardInterrupt" in err or code == -signal.SIGINT, (code, err)
        no_leaks.check()


def test_killed_with_kill_9_leaves_nothing_after_the_next_run(ringfence, no_leaks):
    process = ringfence.start("run", "--", "sh", "-c", "echo ready; sleep 600")
    started(process)
    process.kill()
    finish(process)
    assert ringfence("run", "--", "true").returncode == 0
    no_leaks.check()


# -- the document


def test_json(ringfence):
    shown = ringfence.json(
        "run", "--json", "--changes", "--name", "n", "--task", "T", "--agent", "a", "--",
        "sh", "-c", "echo text; printf '\\377' >&2; echo data > f; exit 3", code=3,
    )  # fmt: skip
    assert shown["id"].startswith("sb-")
    assert (shown["cause"], shown["exit_code"], shown["command_exit_code"]) == ("exited", 3, 3)
    assert (shown["stdout"], shown["stdout_encoding"]) == ("text\n", "utf-8")
    assert (shown["stderr"], shown["stderr_encoding"]) == ("/w==", "base64")
    changes = {change["path"]: change for change in shown["changes"]}
    assert changes["/workspace/f"]["kind"] == "added"
    assert changes["/workspace/f"]["digest"] == "sha256:" + hashlib.sha256(b"data\n").hexdigest()
    assert shown["usage"]["output_bytes"] == 6
    assert shown["usage"]["wall_seconds"] > 0
    assert (shown["owner"]["task"], shown["owner"]["agent"], shown["labels"]) == ("T", "a", {"name": "n"})
    assert shown["boundary"]["limits"]["deadline"] == "host"


def test_json_of_a_killed_command(ringfence):
    shown = ringfence.json("run", "--json", "--timeout", "1s", "--", "sleep", "60", code=124)
    assert (shown["cause"], shown["command_exit_code"]) == ("deadline", None)
    assert "--timeout" in shown["message"]


def test_json_while_streaming(ringfence):
    done = ringfence("run", "--json", "--stream", "--", "sh", "-c", "echo out; echo err >&2")
    shown = json.loads(done.stdout)
    assert shown["stdout"] is None
    assert sorted(done.stderr.split()) == [b"err", b"out"]


# -- what the command sees


def test_environment_and_workdir(ringfence, tmp_path):
    file = tmp_path / "env"
    file.write_text("ONE=1\nTWO=2\n")
    ringfence.env["SECRET_OF_MINE"] = "x"
    script = "echo $ONE $TWO $THREE; pwd; env | grep -c SECRET_OF_MINE"
    done = ringfence(
        "run",
        "--env-file",
        str(file),
        "--env",
        "TWO=deux",
        "-e",
        "THREE=a b",
        "-w",
        "/tmp",
        "--",
        "sh",
        "-c",
        script,
    )
    assert done.stdout == b"1 deux a b\n/tmp\n0\n"


def test_who_it_is(ringfence):
    assert ringfence("run", "--", "id", "-u").stdout == b"1000\n"
    assert ringfence("run", "--user", "0", "--", "id", "-u").stdout == b"0\n"


def test_readonly(ringfence):
    script = "echo x > /workspace/f && echo x > /tmp/f && echo both; echo x > /home/agent/f"
    done = ringfence("run", "--readonly", "--runtime", "jail", "--", "sh", "-c", script)
    assert done.stdout == b"both\n"
    assert b"Read-only" in done.stderr


def test_mounts(ringfence, tmp_path):
    tmp_path.chmod(0o755)
    folder = tmp_path / "data"
    folder.mkdir(mode=0o755)
    (folder / "f").write_text("content")
    script = "cat /data/f; echo x > /data/new"
    done = ringfence("run", "--mount", f"{folder}:/data", "--", "sh", "-c", script)
    assert done.stdout == b"content"
    assert b"Read-only" in done.stderr
    assert os.listdir(folder) == ["f"]


def test_changes_are_shown_safely(ringfence):
    script = "touch 'plain' \"$(printf 'forged\\nA etc')\" \"$(printf '\\377\\033[2J')\"; mkdir d"
    done = ringfence("run", "--changes", "--", "sh", "-c", script)
    lines = done.stderr.decode().splitlines()
    assert all(line.isprintable() for line in lines)
    assert any(line.endswith("/workspace/plain") for line in lines)
    assert any("forged\\nA etc" in line for line in lines)
    assert any("\\xff\\x1b[2J" in line for line in lines)
    assert not any(line.startswith("A etc") for line in lines)


# -- kept sandboxes


def test_a_kept_sandbox_is_listed_and_stopped(ringfence):
    done = ringfence("run", "--keep", "--name", "mine", "--", "true")
    assert done.returncode == 0, done.stderr
    listed = ringfence.json("list", "--json")["sandboxes"]
    assert len(listed) == 1
    assert listed[0]["id"] in done.stderr.decode()
    assert listed[0]["labels"] == {"name": "mine"}
    assert b"mine" in ringfence("list").stdout
    assert ringfence("stop", "sb-00000000000000000000").returncode == 125
    assert ringfence.json("stop", "--json", listed[0]["id"]) == {"stopped": [listed[0]["id"]]}
    assert ringfence.json("list", "--json") == {"sandboxes": []}
