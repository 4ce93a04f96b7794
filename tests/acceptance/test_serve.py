"""`ringfence serve` as an operator meets it: keys, binding, privileges, restarts, two on one store."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.apis import another
from support.postgres import postgres
from support.serving import Serving, eventually, serving

__all__ = ["postgres"]
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has privileges to give up")


def ringfence(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ringfence", *words], capture_output=True, text=True, timeout=90, check=False
    )


@pytest.fixture
def service() -> Iterator[Serving]:
    with serving("--no-egress") as made:
        yield made


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--bind", "0.0.0.0:0"], "in the clear"),
        (["--bind", "[::]:0"], "in the clear"),
        (["--bind", "192.0.2.1:80"], "in the clear"),
        (["--bind", "nowhere"], "ADDRESS:PORT"),
        (["--bind", "example:80"], "no address"),
        (["--bind", "127.0.0.1:99999"], "ADDRESS:PORT"),
        (["--tls-cert", "x"], "its key"),
        (["--no-tcp"], "nowhere to listen"),
        (["--workers", "0"], "API processes"),
        (["--domain", "not a domain"], "domain"),
        (["--service", "Not A Name"], "no name of a service"),
        (["--store", "mysql://x"], "did not start"),
    ],
)
def test_what_is_refused_before_anything_starts(tmp_path: Path, options: list[str], told: str) -> None:
    place = [] if "--bind" in options else ["--bind", "127.0.0.1:0"]
    done = ringfence("serve", *place, "--state", str(tmp_path / "state"), *options)
    assert done.returncode == 125 and told in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = ringfence("serve", "--bind", f"127.0.0.1:{port}", "--state", str(tmp_path / "state"))
    assert done.returncode == 125 and "can't listen" in done.stderr


def test_the_first_key_is_made_once(tmp_path: Path) -> None:
    file = tmp_path / "key"
    with serving("--no-egress", "--key-file", str(file)) as service:
        assert not service.key and service.lines[0] == {"key_file": str(file)}
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        service.key = file.read_text().strip()
        assert service.client(service.key).get("/v1/me").json()["operator"] is True
        assert service.client().get("/v1/me").status_code == 401
        first = len(service.lines)
        service.stop()
        service.start()
        assert [line for line in service.lines[first:] if "key" in line or "key_file" in line] == []
        assert service.http.get("/v1/me").status_code == 200


@root
def test_the_api_has_no_privileges_and_the_node_is_apart(service: Serving) -> None:
    parts = service.children()
    assert len(parts["api"]) == 1 and len(parts["node"]) == 1
    status = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{parts['api'][0]}/status").read_text().splitlines()
        if ":" in line
    )
    assert all(int(number) > 0 for number in (*status["Uid"].split(), *status["Gid"].split()))
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[name], 16) == 0, name
    assert status["Groups"].strip() == "" and status["NoNewPrivs"].strip() == "1"
    # The control: the node, started by the same process, has them.
    assert "0" in Path(f"/proc/{parts['node'][0]}/status").read_text().split("Uid:")[1].split()[0]
    # What belongs to the node the API's user can't read; what is the API's own nobody else can.
    uid = int(status["Uid"].split()[0])
    probe = "import os,sys; os.setgroups([]); os.setgid(%d); os.setuid(%d); print(os.listdir(sys.argv[1]))"
    for folder in ("sandboxes", "nodes"):
        done = subprocess.run(
            [sys.executable, "-c", probe % (uid, uid), str(service.home / folder)],
            capture_output=True,
            check=False,
        )
        assert b"PermissionError" in done.stderr, folder
    own = service.home / "services" / "test" / "api"
    assert stat.S_IMODE(own.stat().st_mode) == 0o700 and own.stat().st_uid == uid


@pytest.mark.parametrize("part", ["api", "node"])
def test_a_killed_part_comes_back_and_nothing_is_lost(service: Serving, part: str) -> None:
    boxes = [service.sandbox()["id"] for _ in range(3)]
    for box in boxes:
        body = {
            "command": "echo before; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo after",
            "id": "c",
            "wait": False,
        }
        assert service.http.post(f"/v1/sandboxes/{box}/processes", json=body).status_code == 201
    (pid,) = service.children()[part]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: service.children()[part] not in ([], [pid]), "it is started again")
    eventually(lambda: service.http.get("/readyz").status_code == 200, "it is ready")
    listed = service.http.get("/v1/sandboxes", params={"state": "running"}).json()["items"]
    assert sorted(each["id"] for each in listed) == sorted(boxes)
    for box in boxes:
        one = f"/v1/sandboxes/{box}"
        eventually(
            lambda one=one: (
                service.http.put(f"{one}/files/content?path=/tmp/go", content=b"").status_code == 201
            ),
            "it is reached again",
        )
        eventually(
            lambda one=one: service.http.get(f"{one}/processes/c").json().get("state") == "exited",
            "it went on",
        )
        told = service.http.get(f"{one}/processes/c/output").json()
        assert told["stdout"]["data"] == "before\nafter\n" and told["exit_code"] == 0
        # A node that is slow to answer has it `stopping` for a while: it is asked again.
        eventually(lambda one=one: service.http.delete(one).json().get("state") == "stopped", "it ends")
    eventually(lambda: not _left(service), "nothing is left")


def _left(service: Serving) -> list[Path]:
    return [path for path in (service.home / "sandboxes").iterdir() if path.name.startswith("sb-")]


def test_the_whole_of_it_killed_and_started_again(service: Serving) -> None:
    box = service.sandbox()["id"]
    dying = service.sandbox(timeout=3600)["id"]
    assert service.process is not None
    parts = service.children()
    service.process.kill()  # its children die with it
    service.process.wait()
    for pid in (*parts["api"], *parts["node"]):
        eventually(lambda pid=pid: not _alive(pid), "its children ended")
    service.start()
    assert service.run(box, "echo still here")["stdout"] == "still here\n"
    service.http.post(f"/v1/sandboxes/{dying}/extend", json={"timeout": 0.2})
    ended = service.http.get(f"/v1/sandboxes/{dying}/wait", params={"state": "stopped", "timeout": 60}).json()
    assert ended["cause"] == "deadline"


def _alive(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")


def test_sigterm_lets_requests_end(service: Serving) -> None:
    box = service.sandbox()["id"]
    answers: list[Any] = []
    started = threading.Event()

    def ask() -> None:
        started.set()
        answers.append(
            service.run(box, "touch /tmp/up; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo whole")
        )

    thread = threading.Thread(target=ask)
    thread.start()
    started.wait()
    one = f"/v1/sandboxes/{box}/files"
    with service.client(service.key) as other:
        eventually(lambda: other.get(f"{one}/stat?path=/tmp/up").status_code == 200, "the command runs")
        # Just before: what comes later finds the door shut.
        script = "(sleep 0.5; touch /tmp/go) >/dev/null 2>&1 </dev/null &"
        other.post(f"/v1/sandboxes/{box}/processes", json={"command": script})
    assert service.stop() == 0
    thread.join(60)
    assert answers and answers[0]["stdout"] == "whole\n"
    service.start()
    assert service.run(box, "echo lives on")["stdout"] == "lives on\n"


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with serving("--no-egress", "--uds", str(path)) as service:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(
            transport=transport, base_url="http://local", headers={"x-api-key": service.key}
        ) as client:
            assert client.get("/v1/me").json()["project"] == "default"
        second = ringfence(
            "serve", "--bind", "127.0.0.1:0", "--uds", str(path), "--state", str(tmp_path / "o")
        )
        assert second.returncode == 125 and "somebody listens" in second.stderr
    assert not path.exists()


def test_tls(tmp_path: Path) -> None:
    certificate, key = _certificate(tmp_path)
    with serving("--no-egress", "--tls-cert", str(certificate), "--tls-key", str(key)) as service:
        assert service.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(verify=context, base_url=service.url, headers={"x-api-key": service.key}) as client:
            assert client.get("/v1/me").status_code == 200
        with pytest.raises(httpx.ConnectError), httpx.Client(base_url=service.url) as client:
            client.get("/healthz")


def _certificate(folder: Path) -> tuple[Path, Path]:
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate, private = folder / "cert.pem", folder / "key.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    private.chmod(0o600)
    return certificate, private


def test_two_apis_on_one_postgresql_survive_each_other(postgres: Any) -> None:
    store = postgres.fresh()
    with serving("--no-egress", store=store) as first, another(first, "--no-egress") as second:
        box = first.sandbox()["id"]
        assert second.run(box, "echo by the other")["stdout"] == "by the other\n"
        made = second.sandbox()["id"]
        assert {each["id"] for each in first.http.get("/v1/sandboxes").json()["items"]} == {box, made}
        for killed, other in ((second, first), (first, second)):
            (pid,) = killed.children()["api"]
            os.kill(pid, signal.SIGKILL)
            for id in (box, made):
                assert other.run(id, "echo up")["stdout"] == "up\n"
            eventually(lambda k=killed: k.http.get("/readyz").status_code == 200, "it is back")
            assert killed.run(box, "echo too")["stdout"] == "too\n"
        # A key revoked at one is good for nothing at the other.
        key = first.make_key(scopes=["run"])
        assert second.client(key).get("/v1/me").status_code == 200
        id = first.client(key).get("/v1/me").json()["key_id"]
        assert first.http.delete(f"/v1/keys/{id}").status_code == 200
        eventually(lambda: second.client(key).get("/v1/me").status_code == 401, "it is revoked everywhere")
        # Deleted by one, gone for both.
        assert first.http.delete(f"/v1/sandboxes/{made}").json()["state"] == "stopped"
        eventually(lambda: second.http.get(f"/v1/sandboxes/{made}").json()["state"] == "stopped", "both know")


def test_several_workers_share_one_port() -> None:
    with serving("--no-egress", "--workers", "2") as service:
        assert len(service.children()["api"]) == 2
        box = service.sandbox()["id"]
        for _ in range(10):
            with service.client(service.key) as client:  # a connection each
                assert service.run(box, "true", client)["exit_code"] == 0
