"""``ringfence template build``, ``scan``, ``refresh`` and ``warm`` as users meet them; killed, too."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from support import images
from support.commands import Ringfence
from support.leaks import Leaks

PATIENCE = 120.0
PLACED = "images/private-*/layers/*/fs/big"


@pytest.fixture
def context(tmp_path: Path, ringfence: Ringfence) -> Path:
    """A folder to build from; the template busybox:1 is there."""
    done = ringfence("template", "add", f"rootfs:{images.busybox()}", "--name", "busybox:1")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "context"
    folder.mkdir()
    (folder / "hello").write_text("hello\n")
    return folder


def define(context: Path, text: str) -> Path:
    (context / "Dockerfile").write_text("FROM busybox:1\n" + text)
    return context


def until(condition: object, what: str) -> None:
    assert callable(condition)
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def sound(ringfence: Ringfence, home: Path) -> None:
    """What the next start finds: a store that collects without failures and has no half-made thing."""
    collected = ringfence.json("template", "gc", "--json")
    assert collected["failures"] == []
    assert os.listdir(home / "images/tmp") == []
    for template in ringfence.json("template", "ls", "--all", "--json")["templates"]:
        assert "ringfence.building" not in template["config"]["labels"]
    assert [name for name in os.listdir(home / "snapshots") if name != ".lock"] == []
    assert ringfence.json("template", "gc", "--json")["removed"] == []


def test_build_and_run(ringfence: Ringfence, context: Path) -> None:
    define(context, 'COPY hello /srv/\nRUN echo built >> /srv/hello\nCMD ["cat", "/srv/hello"]\n')
    done = ringfence("template", "build", str(context), "-t", "app:1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"app:1  sha256:")
    assert b"[2/3] RUN echo built" in done.stderr
    assert ringfence("run", "--template", "app:1").stdout == b"hello\nbuilt\n"
    again = ringfence.json("template", "build", str(context), "-t", "app:2", "--json")
    assert (again["steps"], again["cached"]) == (3, 2)
    first = ringfence.json("template", "show", "app:1", "--json")["template"]
    assert again["template"]["digest"] == first["digest"]
    fresh = ringfence.json("template", "build", str(context), "-t", "app:3", "--no-cache", "--json")
    assert fresh["cached"] == 0 and fresh["template"]["digest"] == first["digest"]


def test_a_definition_by_itself_and_arguments(ringfence: Ringfence, context: Path, tmp_path: Path) -> None:
    file = tmp_path / "elsewhere"
    file.write_text("FROM busybox:1\nARG WHO\nCOPY hello /\nRUN echo $WHO > /who\n")
    done = ringfence(
        "template", "build", str(context), "--file", str(file), "-t", "app", "--build-arg", "WHO=me", "-q"
    )
    assert done.returncode == 0 and done.stderr == b""
    assert ringfence("run", "--template", "app", "--", "cat", "/who").stdout == b"me\n"


@pytest.mark.parametrize(
    ("text", "arguments", "message", "hint"),
    [
        (
            "RUN echo sorry; exit 3\n",
            [],
            "Dockerfile line 2, RUN: its command ended with 3:\n  sorry",
            "as it was",
        ),
        ("RUNN x\n", [], "Dockerfile line 2, RUNN: no such instruction", "did you mean RUN?"),
        ("COPY helo /\n", [], "line 2, COPY: there is no helo in the context", "did you mean hello?"),
        (
            "RUN head -c 90000000 /dev/zero > /x\n",
            ["--disk", "16M"],
            "the step's disk of 16MiB is full",
            "--disk",
        ),
        ("RUN wget http://x.example/y\n", [], "line 2, RUN", "build steps have no network"),
        (
            'RUN ["/nope"]\n',
            [],
            "2, RUN: '/nope' can't be started: No such file or directory",
            "name a program",
        ),
        ("", ["--build-arg", "X=1"], "has no ARG of that name", "declared"),
        ("", ["--runtime", "jale"], "jale", ""),
        ("", ["--epoch", "-1"], "not a time", "1970"),
    ],
)
def test_mistakes(
    ringfence: Ringfence, context: Path, text: str, arguments: list[str], message: str, hint: str
) -> None:
    if "--runtime" in arguments:
        text = "RUN true\n"
    define(context, text)
    done = ringfence("template", "build", str(context), "-t", "app", *arguments)
    words = done.stderr.decode()
    assert done.returncode in (1, 125) and "Traceback" not in words
    assert message in words and hint in words
    assert ringfence("template", "show", "app").returncode != 0


def test_an_error_as_json(ringfence: Ringfence, context: Path) -> None:
    define(context, "RUN printf 'a\\033[2Jb'; exit 3\n")
    error = ringfence.json("template", "build", str(context), "-t", "app", "--json", code=1)["error"]
    assert error["code"] == "build_failed"
    assert error["details"] | {"output": ""} == {
        "file": "Dockerfile", "line": 2, "instruction": "RUN", "cause": "exited", "exit_code": 3,
        "output": "",
    }  # fmt: skip
    plain = ringfence("template", "build", str(context), "-t", "app")
    assert b"\x1b" not in plain.stderr and b"a\\x1b[2Jb" in plain.stderr  # what a step prints moves no cursor


def test_definitions_that_are_not_there(ringfence: Ringfence, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        done = ringfence("template", "build", str(path), "-t", "app")
        assert done.returncode == 125 and b"definition" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_build_cleanly(
    ringfence: Ringfence, context: Path, no_leaks: Leaks, number: signal.Signals
) -> None:
    define(context, "RUN echo begun; sleep 1000\n")
    build = ringfence.start("template", "build", str(context), "-t", "app")
    assert build.stderr is not None
    _wait_for(build, b"begun")
    build.send_signal(number)
    _, rest = build.communicate(timeout=PATIENCE)
    assert build.returncode == 128 + number and b"Traceback" not in rest
    assert no_leaks.home is not None
    sound(ringfence, no_leaks.home)


def test_ctrl_c_on_a_terminal(ringfence: Ringfence, context: Path, no_leaks: Leaks) -> None:
    define(context, "RUN echo begun; sleep 1000\n")
    ours, theirs = pty.openpty()
    build = ringfence.start(
        "template", "build", str(context), "-t", "app", stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, preexec_fn=_controlling_terminal,
    )  # fmt: skip
    os.close(theirs)
    said = b""
    end = time.monotonic() + PATIENCE
    while b"    begun" not in said:
        assert time.monotonic() < end, said
        if select.select([ours], [], [], 0.5)[0]:
            said += os.read(ours, 4096)
    os.write(ours, b"\x03")
    assert build.wait(PATIENCE) == 130
    os.close(ours)
    assert no_leaks.home is not None
    sound(ringfence, no_leaks.home)


def _controlling_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _wait_for(build: subprocess.Popen[bytes], word: bytes) -> None:
    assert build.stderr is not None
    said = b""
    end = time.monotonic() + PATIENCE
    while b"    " + word not in said:
        assert time.monotonic() < end and build.poll() is None, said
        if select.select([build.stderr], [], [], 0.5)[0]:
            said += os.read(build.stderr.fileno(), 4096)


def test_killed_while_a_step_runs(ringfence: Ringfence, context: Path, no_leaks: Leaks) -> None:
    define(context, "COPY hello /\nRUN echo begun; sleep 1000\n")
    build = ringfence.start("template", "build", str(context), "-t", "app")
    _wait_for(build, b"begun")
    build.kill()
    build.communicate(timeout=PATIENCE)
    assert no_leaks.home is not None
    # The sandbox dies with its node; the next start removes what is left of it.
    assert ringfence("run", "--", "true").returncode == 0
    sound(ringfence, no_leaks.home)
    define(context, "COPY hello /\nRUN cp /hello /made\n")
    assert ringfence("template", "build", str(context), "-t", "app", "-q").returncode == 0
    assert ringfence("run", "--template", "app", "--", "cat", "/made").stdout == b"hello\n"


def there(home: Path, pattern: str) -> bool:
    try:
        return any(home.glob(pattern))
    except OSError:  # it went while it was looked at
        return False


@pytest.mark.parametrize("moment", ["images/tmp/*/new*/fs/big", PLACED, "snapshots/.*/layer"])
def test_killed_while_a_step_is_saved(
    ringfence: Ringfence, context: Path, no_leaks: Leaks, moment: str
) -> None:
    """Killed at the moment when something of it appears: copied from the wall, being unpacked, in place."""
    home = no_leaks.home
    assert home is not None
    define(context, "RUN head -c 30000000 /dev/urandom > /big && echo begun\nRUN sleep 1000\n")
    build = ringfence.start(
        "template", "build", str(context), "-t", "app", "--disk", "64M", "--memory", "512M"
    )
    # A quick machine may be past the moment when we look: then it is killed in the next step.
    until(lambda: there(home, moment) or there(home, PLACED), f"{moment} never appeared")
    build.kill()
    build.communicate(timeout=PATIENCE)
    assert ringfence("run", "--", "true").returncode == 0
    sound(ringfence, home)
    define(context, "RUN echo small > /small\n")
    assert ringfence("template", "build", str(context), "-t", "app", "-q").returncode == 0
    assert ringfence("run", "--template", "app", "--", "cat", "/small").stdout == b"small\n"


def test_a_full_disk_of_the_host(ringfence: Ringfence, context: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a small file system")
    small = tmp_path / "small"
    small.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24M,mode=711", "none", small], capture_output=True
    )
    if made.returncode:
        pytest.skip(f"no tmpfs: {made.stderr.decode()}")
    try:
        env = ringfence.env | {"RINGFENCE_HOME": str(small / "home")}
        define(context, "COPY big /\n")
        (context / "big").write_bytes(os.urandom(40_000_000))
        assert (
            ringfence(
                "template", "add", f"rootfs:{images.busybox()}", "--name", "busybox:1", env=env
            ).returncode
            == 0
        )
        before = len(list((small / "home/images").rglob("layers/*")))
        done = ringfence("template", "build", str(context), "-t", "app", env=env)
        words = done.stderr.decode()
        assert done.returncode == 125 and "the disk is full" in words and "template gc" in words
        assert len(list((small / "home/images").rglob("layers/*"))) == before
        assert os.listdir(small / "home/images/tmp") == []
        (context / "big").write_text("little")
        assert ringfence("template", "build", str(context), "-t", "app", env=env).returncode == 0
    finally:
        subprocess.run(["umount", small], check=True)


def test_scan(ringfence: Ringfence, context: Path, tmp_path: Path) -> None:
    define(
        context,
        "COPY <<EOF /var/lib/dpkg/status\nPackage: curl\nStatus: install ok installed\nVersion: 8\nEOF\n"
        'COPY <<EOF /app/node_modules/x/package.json\n{"name": "x", "version": "1"}\nEOF\n',
    )
    assert ringfence("template", "build", str(context), "-t", "app", "-q").returncode == 0
    document = ringfence.json("template", "scan", "app", "--json")
    assert document["packages"] == {"deb": 1, "pypi": 0, "npm": 1} and document["scanner"] is None
    assert {each["purl"] for each in document["sbom"]["components"]} >= {"pkg:npm/x@1"}
    sbom = tmp_path / "sbom.json"
    done = ringfence("template", "scan", "app", "-o", str(sbom))
    assert done.returncode == 0 and b"2 packages: 1 deb, 1 npm" in done.stdout
    assert json.loads(sbom.read_text())["bomFormat"] == "CycloneDX"


def test_scan_with_a_scanner(ringfence: Ringfence, context: Path, tmp_path: Path) -> None:
    scanner = tmp_path / "scanner"
    scanner.write_text('#!/bin/sh\ngrep -q CycloneDX "$2" && printf "CVE-1 \\033[2J\\n"; exit 4\n')
    scanner.chmod(0o755)
    env = ringfence.env | {"RINGFENCE_SCANNER": f"{scanner} --file {{sbom}}"}
    document = ringfence.json("template", "scan", "busybox:1", "--json", env=env, code=1)
    assert document["scanner"]["exit_code"] == 4 and document["scanner"]["stdout"].startswith("CVE-1")
    done = ringfence("template", "scan", "busybox:1", env=env)
    assert done.returncode == 1 and b"CVE-1 \\x1b[2J" in done.stdout and b"ended with 4" in done.stderr
    assert ringfence("template", "scan", "busybox:1", "--no-scanner", env=env).returncode == 0
    for command, message in (
        ("not-there {sbom}", b"is not here"),
        ("'", b"can't be read"),
        (" ", b"is empty"),
    ):
        done = ringfence("template", "scan", "busybox:1", "--scanner", command)
        assert done.returncode == 125 and message in done.stderr
    slow = ringfence(
        "template", "scan", "busybox:1", "--scanner", "sh -c 'sleep 1000'", "--scanner-timeout", "1s"
    )
    assert slow.returncode == 125 and b"did not end within 1 seconds" in slow.stderr


def test_refresh_and_the_policy_that_asks_for_it(
    ringfence: Ringfence, context: Path, no_leaks: Leaks, tmp_path: Path
) -> None:
    define(context, "COPY hello /\n")
    assert ringfence("template", "build", str(context), "-t", "app", "-q").returncode == 0
    assert no_leaks.home is not None
    for path in (no_leaks.home / "images/names").iterdir():
        record = json.loads(path.read_text())
        for key in ("made_at", "base_made_at"):
            record[key] -= 40 * 86400
        path.write_text(json.dumps(record))
    policy = tmp_path / "policy.yaml"
    policy.write_text("apiVersion: ringfence/v1\nkind: Policy\nlimits: {maxTemplateAge: 30d}\n")
    run = ("run", "--policy", str(policy), "--template", "app", "--", "cat", "/hello")
    refused = ringfence(*run)
    assert refused.returncode == 125 and b"ringfence template refresh app:latest" in refused.stderr
    assert ringfence("run", "--template", "app", "--", "cat", "/hello").stdout == b"hello\n"  # the control
    document = ringfence.json("template", "refresh", "--all", "--older-than", "30d", "--json")
    assert {each["name"] for each in document["refreshed"]} == {"app:latest", "busybox:1"}
    assert ringfence.json("template", "refresh", "app", "--json")["refreshed"][0]["changed"] is False
    assert ringfence(*run).stdout == b"hello\n"
    assert ringfence.json("template", "refresh", "--all", "--older-than", "30d", "--json")["refreshed"] == []
    for wrong in ((), ("app", "--all")):
        assert b"which templates?" in ringfence("template", "refresh", *wrong).stderr


def test_warm(ringfence: Ringfence, context: Path) -> None:
    warmed = ringfence.json("template", "warm", "busybox:1", "--runtime", "jail", "--json")["warmed"]
    assert [(each["template"], each["runtime"], each["what"]) for each in warmed] == [
        ("busybox:1", "jail", "fittings")
    ]
    missing = ringfence("template", "warm", "nothing:1")
    assert missing.returncode == 125 and b"no template" in missing.stderr
