"""The service as a user meets it: the README's tour by shell and by Python, and every verb for real."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence.cli.quota import LIMITS
from ringfence.sdk import settings
from ringfence.sdk.background import BACKGROUND
from support.commands import Ringfence
from support.serving import Serving, needs_root_or_users, serving

from .test_readme import README, ROOT, pattern

BAD = os.fsdecode(b"\xff.txt")
SMALL = ("--memory", "128M", "--disk", "32M", "--runtime", "jail")


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    needs_root_or_users()
    with serving("--no-egress") as made:
        yield made


@pytest.fixture
def ringfence(served: Serving, tmp_path: Path) -> Ringfence:
    """The command line of a user who has logged in."""
    login = tmp_path / "login.json"
    env = {name: value for name, value in os.environ.items() if not name.startswith("RINGFENCE_")}
    found = Ringfence(env | {"RINGFENCE_LOGIN": str(login)})
    done = found("login", served.url, input=served.key.encode())
    assert done.returncode == 0, done.stderr
    assert login.stat().st_mode & 0o777 == 0o600
    assert served.key.encode() not in done.stdout + done.stderr
    return found


@pytest.fixture
def box(ringfence: Ringfence) -> Iterator[str]:
    """A sandbox of the test's own."""
    done = ringfence("sandbox", "create", *SMALL)
    assert done.returncode == 0, done.stderr
    name = done.stdout.decode().strip()
    yield name
    ringfence("sandbox", "kill", name)


def section() -> str:
    return README.read_text(encoding="utf-8").partition("## As a service")[2].partition("\n## ")[0]


def test_the_tour_by_shell(ringfence: Ringfence, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    script = programs / "ringfence"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m ringfence "$@"\n')
    script.chmod(0o755)
    env = ringfence.env | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    (block,) = re.findall(r"```console\n(.*?)```", section(), re.DOTALL)
    steps = [part.partition("\n")[::2] for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    assert len(steps) >= 7
    for command, shown in steps:
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=env, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=180, check=False,
        )  # fmt: skip
        if not re.fullmatch(pattern(shown), done.stdout.strip() + "\n", re.DOTALL):
            pytest.fail(f"$ {command}\nprinted:\n{done.stdout}\nthe README shows:\n{shown}")


def test_the_tour_by_python(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.URL, served.url)
    monkeypatch.setenv(settings.KEY, served.key)
    (block,) = re.findall(r"```python\n(.*?)```", section(), re.DOTALL)
    wanted = [line.partition("  # ")[2] for line in block.splitlines() if "print(" in line]
    assert len(wanted) >= 4
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(block, "README.md", "exec"), {})
    finally:
        BACKGROUND.end()
    assert printed.getvalue().splitlines() == wanted


def test_commands_pass_through(ringfence: Ringfence, box: str) -> None:
    done = ringfence("sandbox", "exec", box, "--", "sh", "-c", "cat; echo bad >&2; exit 7", input=b"in\0put")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"in\0put", b"bad\n")
    missing = ringfence("sandbox", "exec", box, "--", "no-such-program")
    assert missing.returncode == 127
    told = ringfence.json("sandbox", "exec", "--json", box, "--", "sh", "-c", "echo x; exit 3", code=3)
    assert (told["stdout"], told["exit_code"], told["cause"]) == ("x\n", 3, "exited")
    assert (
        ringfence("sandbox", "exec", "-e", "A=b", "-w", "/tmp", box, "--", "sh", "-c", "echo $A; pwd").stdout
        == b"b\n/tmp\n"
    )


def test_an_interrupt_goes_to_the_command(ringfence: Ringfence, box: str) -> None:
    code = "trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.1; done"
    running = ringfence.start("sandbox", "exec", box, "--", "sh", "-c", code)
    assert running.stdout is not None
    assert running.stdout.readline() == b"ready\n"
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=120)
    assert (running.returncode, out) == (9, b"caught\n")
    ended = ringfence.start("sandbox", "exec", box, "--", "sh", "-c", "echo ready; exec sleep 600")
    assert ended.stdout is not None
    assert ended.stdout.readline() == b"ready\n"
    ended.send_signal(signal.SIGTERM)
    _, err = ended.communicate(timeout=120)
    assert ended.returncode == 143
    assert b"is gone" not in err  # it is not
    assert ringfence("sandbox", "exec", box, "--", "echo", "alive").stdout == b"alive\n"


def test_files_go_in_and_out(ringfence: Ringfence, box: str, tmp_path: Path) -> None:
    source = tmp_path / "in"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "file").write_bytes(os.urandom(200_000))
    assert ringfence("sandbox", "cp", str(source), f"{box}:here").returncode == 0
    names = ringfence("sandbox", "ls-files", "-R", box, "here").stdout.decode().split()
    assert names == ["deep/", "deep/file"]
    assert ringfence("sandbox", "cp", f"{box}:here", str(tmp_path / "out")).returncode == 0
    assert (tmp_path / "out/deep/file").read_bytes() == (source / "deep/file").read_bytes()
    assert ringfence("sandbox", "cp", "-", f"{box}:piped", input=b"by pipe").returncode == 0
    assert ringfence("sandbox", "cp", f"{box}:piped", "-").stdout == b"by pipe"
    listed = ringfence.json("sandbox", "ls-files", "--json", box)["files"]
    assert {each["path"] for each in listed} == {"here", "piped"}
    changed = ringfence.json("sandbox", "changes", "--json", box)["changes"]
    assert "/workspace/piped" in {each["path"] for each in changed}
    both = ringfence("sandbox", "cp", "a", "b")
    assert both.returncode == 125
    assert b"ID:PATH" in both.stderr


def test_code_keeps_its_variables(ringfence: Ringfence, box: str) -> None:
    assert ringfence("sandbox", "code", box, "x = 6").returncode == 0
    assert ringfence("sandbox", "code", box, "-", input=b"print('said'); x * 7").stdout == b"said\n42\n"
    failed = ringfence("sandbox", "code", box, "1/0")
    assert failed.returncode == 1
    assert b"ZeroDivisionError" in failed.stderr
    told = ringfence.json("sandbox", "code", "--json", box, "x")
    assert told["results"][0]["text"] == "6"


def test_a_port_is_forwarded_until_the_interrupt(ringfence: Ringfence, box: str) -> None:
    import urllib.request

    told = ringfence.json("sandbox", "port", "--json", box, "8000")
    server = ringfence.start("sandbox", "exec", box, "--", "python3", "-u", "-m", "http.server", "8000")
    running = ringfence.start("sandbox", "port", "--json", box, "8000", "--forward")
    try:
        assert running.stdout is not None
        local = json.loads(running.stdout.readline())["local"]
        request = urllib.request.Request(told["direct"], headers=told["headers"])
        for address in (f"http://127.0.0.1:{local}/", request):
            end = time.monotonic() + 90
            while True:
                try:
                    with urllib.request.urlopen(address, timeout=60) as answer:
                        assert b"Directory listing" in answer.read()
                    break
                except OSError:
                    assert time.monotonic() < end
                    time.sleep(0.1)
    finally:
        running.send_signal(signal.SIGINT)
        server.send_signal(signal.SIGTERM)
        out, err = running.communicate(timeout=120)
        server.communicate(timeout=120)
    assert (running.returncode, err) == (130, b""), out


def test_a_life(ringfence: Ringfence) -> None:
    id = ringfence.json("sandbox", "create", "--json", *SMALL, "--name", "alive", "--label", "team=blue")[
        "id"
    ]
    assert ringfence("sandbox", "wait", "alive").returncode == 0
    assert [
        s["id"] for s in ringfence.json("sandbox", "ls", "--json", "--label", "team=blue")["sandboxes"]
    ] == [id]
    assert ringfence.json("sandbox", "show", "--json", "alive")["boundary"]["runtime"] == "jail"
    assert b"L2 (namespaces)" in ringfence("sandbox", "show", id).stdout
    assert ringfence.json("sandbox", "pause", "--json", id)["state"] == "paused"
    assert ringfence.json("sandbox", "resume", "--json", id)["state"] == "running"
    assert ringfence("sandbox", "extend", id, "2h").returncode == 0
    (copy,) = ringfence.json("sandbox", "fork", "--json", id)["copies"]
    assert ringfence("sandbox", "reset", id).returncode == 0
    logged = ringfence("sandbox", "logs", "--json", id).stdout.decode().splitlines()
    assert [json.loads(line)["name"] for line in logged][:2] == ["sandbox.created", "sandbox.running"]
    following = ringfence.start("sandbox", "logs", "-f", id)
    assert ringfence.json("sandbox", "kill", "--json", id, copy)["stopped"] == [id, copy]
    out, _ = following.communicate(timeout=120)
    assert b"sandbox.stopped" in out
    assert ringfence("sandbox", "wait", id, "--state", "running", "--timeout", "5s").returncode == 1
    shown = [
        s["state"]
        for s in ringfence.json("sandbox", "ls", "--json", "--all", "--label", "team=blue")["sandboxes"]
    ]
    assert "stopped" in shown


def test_keys_and_quotas(ringfence: Ringfence) -> None:
    made = ringfence.json("key", "create", "--json", "--name", "reader", "--scope", "read", "--expires", "1h")
    assert made["id"] in {key["id"] for key in ringfence.json("key", "ls", "--json")["keys"]}
    reader = Ringfence(ringfence.env | {"RINGFENCE_API_KEY": made["secret"]})
    assert reader.json("sandbox", "ls", "--json") is not None
    refused = reader.json("sandbox", "create", "--json", code=125)["error"]
    assert refused["code"] == "not_allowed"
    assert refused["hint"]
    turned = ringfence.json("key", "rotate", "--json", made["id"])
    assert ringfence("key", "revoke", turned["id"]).returncode == 0
    assert reader.json("sandbox", "ls", "--json", code=125)["error"]["code"] == "not_authenticated"
    before = ringfence.json("quota", "show", "--json")["limits"]["alive"]
    assert ringfence.json("quota", "set", "--json", "default", "--alive", "0")["limits"]["alive"] == 0
    full = ringfence.json("sandbox", "create", "--json", *SMALL, code=125)["error"]
    assert full["code"] == "quota_exceeded"
    assert (
        ringfence.json("quota", "set", "--json", "default", "--alive", str(before))["limits"]["alive"]
        == before
    )
    # Every limit that a project has can be set from here, is explained, and comes back as it was typed.
    names = list(ringfence.json("quota", "show", "--json")["limits"])
    assert set(names) == set(LIMITS)
    limits = ringfence.json(
        "quota", "set", "--json", "default", "--bandwidth", "10000000", "--egress-bytes", "50GiB",
        "--egress-rate", "1.5",
    )["limits"]  # fmt: skip
    assert (limits["bandwidth"], limits["egress_bytes"], limits["egress_rate"]) == (10**7, 50 * 2**30, 1.5)
    plain = ringfence("quota", "show").stdout.decode()
    assert re.search(r"^bandwidth .* 10000000$", plain, re.MULTILINE)
    assert re.search(r"^egress_bytes .* 50GiB$", plain, re.MULTILINE)
    again = ("--bandwidth", "none", "--egress-bytes", "none", "--egress-rate", "none")
    limits = ringfence.json("quota", "set", "--json", "default", *again)["limits"]
    assert limits["bandwidth"] is limits["egress_bytes"] is limits["egress_rate"] is None


def test_pools_and_top(ringfence: Ringfence) -> None:
    name = "acceptance"
    made = ringfence.json("pool", "create", "--json", name, "--min", "1", "--max", "1", *SMALL)
    taken = ringfence.json("sandbox", "create", "--json", "--pool", name)
    assert taken["pool"] == made["id"]
    assert ringfence.json("pool", "queue", "--json", name)["running"] == 1
    assert name in {pool["name"] for pool in ringfence.json("pool", "ls", "--json")["pools"]}
    assert ringfence("pool", "set", name, "--max", "2").returncode == 0
    shown = ringfence("pool", "show", name).stdout.decode()
    assert re.search(r"^created_at +20\d\d-\d\d-\d\d \d\d:\d\d:\d\d$", shown, re.MULTILINE)
    seen = ringfence.json("top", "--json")
    assert taken["id"] in {each["id"] for each in seen["sandboxes"]}
    plain = ringfence("top").stdout.decode()
    assert taken["id"] in plain
    assert "\x1b" not in plain
    assert ringfence("pool", "rm", name).returncode == 0
    assert ringfence("sandbox", "kill", taken["id"]).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("sandbox", "show", "sb-00000000000000000000"), "not_found", ""),
        (("sandbox", "exec", "nobody", "--", "true"), "not_found", "sandbox ls"),
        (("sandbox", "create", "--memory", "lots"), "invalid_request", ""),
        (("sandbox", "create", "--template", "no-such"), "not_found", ""),
        (("sandbox", "create", "--label", "x"), "invalid_request", "--label"),
        (("sandbox", "kill"), "invalid_request", "sandbox ls"),
        (("pool", "show", "nobody"), "not_found", ""),
        (("quota", "set", "default"), "invalid_request", "--alive"),
        (("quota", "set", "default", "--alive", "many"), "invalid_request", "number"),
        (("key", "revoke", "nobody"), "not_found", ""),
        (("quota", "set", "default", "--burst", "none"), "invalid_request", "--burst"),
        (("snapshot", "show", "nobody"), "not_found", "snapshot ls"),
        (("snapshot", "rm", "nobody"), "not_found", "snapshot ls"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_errors_name_cause_and_remedy(
    ringfence: Ringfence, arguments: tuple[str, ...], code: str, said: str
) -> None:
    error: dict[str, Any] = ringfence.json(*arguments[:2], "--json", *arguments[2:], code=125)["error"]
    assert error["code"] == code
    assert said in error["message"] + error["hint"]


def test_text_that_is_not_utf8(ringfence: Ringfence, box: str) -> None:
    for arguments in (
        ("sandbox", "show", BAD),
        ("sandbox", "create", "--name", BAD),
        ("sandbox", "exec", box, "--", "echo", BAD),
        ("sandbox", "exec", box, "-e", f"A={BAD}", "--", "true"),
        ("sandbox", "cp", "-", f"{box}:{BAD}"),
        ("sandbox", "code", box, f"'{BAD}'"),
        ("job", "run", "--", "echo", BAD),
        ("volume", "create", BAD),
        ("snapshot", "show", BAD),
        ("egress", "log", "--sandbox", BAD),
    ):
        done = ringfence(*arguments)
        assert done.returncode == 125, arguments
        assert b"\\xff.txt' is not UTF-8" in done.stderr, arguments
        assert b"fault" not in done.stderr, arguments


def test_snapshots_of_a_service(ringfence: Ringfence, box: str) -> None:
    made = ringfence.json("sandbox", "snapshot", "--json", box, "--name", "kept-here")
    assert made["id"] in {each["id"] for each in ringfence.json("snapshot", "ls", "--json")["snapshots"]}
    row = [line for line in ringfence("snapshot", "ls").stdout.decode().splitlines() if "kept-here" in line]
    assert len(row) == 1
    assert row[0].split()[0] == made["id"]
    assert ringfence.json("snapshot", "show", "--json", "kept-here")["sandbox"] == box
    assert re.search(
        rf"^id +{made['id']}$", ringfence("snapshot", "show", "kept-here").stdout.decode(), re.MULTILINE
    )
    refused = ringfence("snapshot", "rm", "kept-here", "nobody")
    assert refused.returncode == 125  # and nothing is removed
    assert ringfence.json("snapshot", "show", "--json", made["id"])["state"] == "ready"
    assert ringfence.json("snapshot", "rm", "--json", "kept-here")["removed"] == ["kept-here"]
    assert made["id"] not in {each["id"] for each in ringfence.json("snapshot", "ls", "--json")["snapshots"]}


def test_a_service_that_is_not_there(tmp_path: Path) -> None:
    env = {**os.environ, "RINGFENCE_URL": "http://127.0.0.1:9", "RINGFENCE_LOGIN": str(tmp_path / "none")}
    error = Ringfence(env).json("sandbox", "ls", "--json", code=125)["error"]
    assert error["code"] == "service_unreachable"
    assert "ringfence serve" in error["hint"]


def test_verbs_of_a_service_without_one(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RINGFENCE_")}
    alone = Ringfence(env | {"RINGFENCE_LOGIN": str(tmp_path / "none"), "RINGFENCE_HOME": str(tmp_path)})
    for arguments in (("top",), ("key", "ls"), ("pool", "ls"), ("quota", "show"), ("sandbox", "create")):
        error = alone.json(*arguments, "--json", code=125)["error"]
        assert "ringfence login" in error["hint"]
    assert alone("login", "--show").returncode == 1


def test_logging_in_checks_the_key(served: Serving, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RINGFENCE_")}
    new = Ringfence(env | {"RINGFENCE_LOGIN": str(tmp_path / "login.json")})
    wrong = new("login", served.url, input=b"rf_wrong")
    assert wrong.returncode == 125
    assert not (tmp_path / "login.json").exists()
    far = new("login", "http://far.example", "--no-check", input=b"key")
    assert b"unencrypted" in far.stderr
    assert new("login", served.url, input=served.key.encode()).returncode == 0
    assert new.json("login", "--show", "--json")["url"] == served.url
    assert new.json("login", "--forget", "--json")["forgotten"]


EXAMPLES = {
    "tour": [
        "command: 3 exited out err",
        "stream: 2",
        "code: 42",
        "sum: 6",
        "port: ['1', '2', '3']",
        "again: ['1', '2', '3']",
    ],
    "many": ["20 results: 332833500 … 2666466670000"],
}


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_the_examples(name: str, served: Serving) -> None:
    env = {**os.environ, settings.URL: served.url, settings.KEY: served.key, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, f"examples/service/{name}.py"], cwd=ROOT, env=env, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for line in EXAMPLES[name]:
        assert line in done.stdout.splitlines()
