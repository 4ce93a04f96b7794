"""Volumes of a service as a user starts it."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator

import pytest

from support.serving import Serving, eventually, serving

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="volumes need a node that runs as root")
QUOTA = "32MiB"


@pytest.fixture(scope="module")
def service() -> Iterator[Serving]:
    with serving("--no-egress") as made:
        yield made


def _attach(service: Serving, name: str, read_only: bool = False) -> str:
    mounts = [{"volume": name, "path": "/data", "read_only": read_only}]
    return str(service.sandbox(volumes=mounts)["id"])


def _end(service: Serving, *sandboxes: str) -> None:
    for sandbox in sandboxes:
        assert service.http.delete(f"/v1/sandboxes/{sandbox}").status_code in (200, 204)


def test_files_outlive_the_sandbox(service: Serving) -> None:
    http = service.http
    made = http.post("/v1/volumes", json={"name": "notes", "quota": QUOTA, "labels": {"a": "b"}})
    assert made.status_code == 201, made.text
    assert made.json()["state"] == "ready" and made.json()["quota"] == 32 << 20
    assert http.post("/v1/volumes", json={"name": "notes", "quota": QUOTA}).status_code == 409
    one = _attach(service, "notes")
    assert service.run(one, "echo kept > /data/one")["exit_code"] == 0
    assert http.get("/v1/volumes/notes").json()["writer"] is True
    _end(service, one)
    two = _attach(service, made.json()["id"], read_only=True)
    assert service.run(two, "cat /data/one; echo more > /data/two")["stdout"] == "kept\n"
    assert http.get("/v1/volumes/notes").json()["readers"] == 1
    assert [each["name"] for each in http.get("/v1/volumes").json()["items"]] == ["notes"]
    _end(service, two)
    assert http.delete("/v1/volumes/notes").status_code == 204
    assert http.get("/v1/volumes/notes").status_code == 404
    assert http.post("/v1/volumes", json={"name": "notes", "quota": QUOTA}).status_code == 201
    assert http.delete("/v1/volumes/notes").status_code == 204


def test_one_writes_or_many_read(service: Serving) -> None:
    http = service.http
    assert http.post("/v1/volumes", json={"name": "shared", "quota": QUOTA}).status_code == 201
    readers = [_attach(service, "shared", read_only=True) for _ in range(2)]
    body = {"runtime": "jail", "volumes": [{"volume": "shared", "path": "/data", "read_only": False}]}
    refused = http.post("/v1/sandboxes", json=body)
    assert refused.status_code == 409 and "in use" in refused.json()["error"]["message"], refused.text
    refused = http.delete("/v1/volumes/shared")
    assert refused.status_code == 409
    assert "volume shared is attached to a sandbox" in refused.json()["error"]["message"]
    _end(service, *readers)
    writer = _attach(service, "shared")
    for read_only in (True, False):
        body["volumes"][0]["read_only"] = read_only  # type: ignore[index]
        assert http.post("/v1/sandboxes", json=body).status_code == 409
    _end(service, writer)
    assert http.get("/v1/volumes/shared").json()["writer"] is False
    assert http.delete("/v1/volumes/shared").status_code == 204


def test_its_quota_holds_inside(service: Serving) -> None:
    http = service.http
    assert http.post("/v1/volumes", json={"name": "little", "quota": "16MiB"}).status_code == 201
    one = _attach(service, "little")
    ran = service.run(
        one, "head -c 40000000 /dev/zero > /data/big; stat -c %s /data/big; echo x > /tmp/other && echo fine"
    )
    assert "No space left" in ran["stderr"] and ran["stdout"].endswith("fine\n")
    assert int(ran["stdout"].split()[0]) < 16 << 20
    _end(service, one)
    assert http.delete("/v1/volumes/little").status_code == 204


def test_tar_out_and_in(service: Serving) -> None:
    http = service.http
    for name in ("from", "into"):
        assert http.post("/v1/volumes", json={"name": name, "quota": QUOTA}).status_code == 201
    one = _attach(service, "from")
    assert service.run(one, "mkdir /data/d && seq 1000 > /data/d/f && ln -s d/f /data/l")["exit_code"] == 0
    _end(service, one)
    tar = http.get("/v1/volumes/from/export")
    assert tar.status_code == 200 and tar.headers["content-type"] == "application/x-tar"
    with tarfile.open(fileobj=io.BytesIO(tar.content)) as archive:
        names = archive.getnames()
    assert {name.removeprefix("./") for name in names} >= {"d", "d/f", "l"}
    assert http.put("/v1/volumes/into/import", content=tar.content).status_code == 204
    two = _attach(service, "into", read_only=True)
    assert service.run(two, "tail -n1 /data/l; echo x > /data/d/g")["stdout"] == "1000\n"
    _end(service, two)
    for name in ("from", "into"):
        assert http.delete(f"/v1/volumes/{name}").status_code == 204


def test_a_hostile_tar_stays_inside(service: Serving) -> None:
    http = service.http
    assert http.post("/v1/volumes", json={"name": "evil", "quota": QUOTA}).status_code == 201
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        link = tarfile.TarInfo("out")
        link.type, link.linkname = tarfile.SYMTYPE, "/tmp"
        tar.addfile(link)
        entry = tarfile.TarInfo("out/rf-volume-escape")
        entry.size = 3
        tar.addfile(entry, io.BytesIO(b"bad"))
    answer = http.put("/v1/volumes/evil/import", content=data.getvalue())
    assert not os.path.exists("/tmp/rf-volume-escape")
    assert answer.status_code in (204, 400, 422), answer.text
    for junk in (b"", b"no tar at all" * 100, b"x" * 3_000_000, data.getvalue()[:700]):
        assert http.put("/v1/volumes/evil/import", content=junk).status_code in (400, 422)
    assert http.delete("/v1/volumes/evil").status_code == 204


def test_a_tar_larger_than_its_volume(service: Serving) -> None:
    http = service.http
    assert http.post("/v1/volumes", json={"name": "small", "quota": QUOTA}).status_code == 201
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for number in range(3):  # each by itself fits
            entry = tarfile.TarInfo(f"part-{number}")
            entry.size = 20 << 20
            tar.addfile(entry, io.BytesIO(os.urandom(entry.size)))
    answer = http.put("/v1/volumes/small/import", content=data.getvalue())
    assert answer.status_code == 507, answer.text
    assert "does not fit into the volume" in answer.json()["error"]["message"]
    assert http.delete("/v1/volumes/small").status_code == 204


def test_one_that_goes_with_its_sandbox(service: Serving) -> None:
    http = service.http
    assert http.post("/v1/volumes", json={"name": "brief", "quota": QUOTA, "keep": False}).status_code == 201
    one = _attach(service, "brief")
    assert service.run(one, "echo x > /data/f")["exit_code"] == 0
    assert http.get("/v1/volumes/brief").status_code == 200
    _end(service, one)
    eventually(lambda: http.get("/v1/volumes/brief").status_code == 404, "the volume is removed")


def test_wrong_requests(service: Serving) -> None:
    http = service.http
    for body in (
        {"name": "../x"},
        {"name": "a", "quota": 0},
        {"name": "a", "quota": "1K"},
        {"name": "vol-x"},
        {},
    ):
        assert http.post("/v1/volumes", json=body).status_code in (400, 422), body
    assert http.get("/v1/volumes").json()["items"] == []
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/export"), ("PUT", "/import")):
        assert http.request(method, f"/v1/volumes/none{path}").status_code == 404
    missing = {"runtime": "jail", "volumes": [{"volume": "none", "path": "/data"}]}
    assert http.post("/v1/sandboxes", json=missing).status_code == 404


def test_nobody_reaches_anothers(service: Serving) -> None:
    http = service.http
    made = http.post("/v1/volumes", json={"name": "mine", "quota": QUOTA}).json()
    project = http.post("/v1/projects", json={"name": "others"})
    assert project.status_code == 201, project.text
    key = http.post("/v1/keys", json={"name": "k", "project": project.json()["id"], "scopes": ["run"]})
    assert key.status_code == 201, key.text
    with service.client(key.json()["secret"]) as other:
        for name in ("mine", made["id"]):
            for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/export"), ("PUT", "/import")):
                assert other.request(method, f"/v1/volumes/{name}{path}").status_code == 404
            body = {"runtime": "jail", "volumes": [{"volume": name, "path": "/data"}]}
            assert other.post("/v1/sandboxes", json=body).status_code == 404
        assert other.get("/v1/volumes").json()["items"] == []
        assert other.post("/v1/volumes", json={"name": "mine", "quota": QUOTA}).status_code == 201
        assert other.delete("/v1/volumes/mine").status_code == 204
    assert http.delete("/v1/volumes/mine").status_code == 204
