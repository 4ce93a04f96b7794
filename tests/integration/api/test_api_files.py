"""Files through the API: ranges, atomic and checked uploads, archives, watching, signed URLs, path tricks."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import socket
import tarfile
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from support.serving import Serving, eventually

Box = dict[str, Any]


def files(box: Box) -> str:
    return f"/v1/sandboxes/{box['id']}/files"


def put(service: Serving, box: Box, path: str, data: bytes, **headers: str) -> httpx.Response:
    return service.http.put(
        f"{files(box)}/content", params={"path": path}, content=data,
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )  # fmt: skip


def get(service: Serving, box: Box, path: str, **headers: str) -> httpx.Response:
    return service.http.get(f"{files(box)}/content", params={"path": path}, headers=headers)


def test_up_and_down_with_digests(service: Serving, box: Box) -> None:
    data = os.urandom(3_000_000)
    digest = hashlib.sha256(data)
    field = f"sha-256=:{base64.b64encode(digest.digest()).decode()}:"
    written = put(service, box, "/workspace/d/e/big", data, content_digest=field)
    assert written.status_code == 201 and written.json()["sha256"] == digest.hexdigest()
    read = get(service, box, "/workspace/d/e/big")
    assert read.content == data and read.headers["content-length"] == str(len(data))
    assert read.headers["content-disposition"] == "attachment"
    told = service.http.get(f"{files(box)}/digest", params={"path": "/workspace/d/e/big"}).json()
    assert told == {"path": "/workspace/d/e/big", "size": len(data), "sha256": digest.hexdigest()}
    assert put(service, box, "/workspace/empty", b"").json()["size"] == 0
    assert get(service, box, "/workspace/empty").content == b""
    assert b"Linux version" in get(service, box, "/proc/version").content  # says 0 bytes, has more


def test_ranges(service: Serving, box: Box) -> None:
    put(service, box, "/workspace/r", b"0123456789")

    def part(text: str) -> tuple[int, bytes, str]:
        answer = get(service, box, "/workspace/r", range=text)
        return answer.status_code, answer.content, answer.headers.get("content-range", "")

    assert part("bytes=2-4") == (206, b"234", "bytes 2-4/10")
    assert part("bytes=7-") == (206, b"789", "bytes 7-9/10")
    assert part("bytes=-3") == (206, b"789", "bytes 7-9/10")
    assert part("bytes=5-999") == (206, b"56789", "bytes 5-9/10")
    assert part("lines=1-2")[:2] == (200, b"0123456789")
    status, body, _ = part("bytes=10-")
    assert status == 416 and json.loads(body)["error"]["code"] == "range_not_satisfiable"
    head = service.http.head(f"{files(box)}/content", params={"path": "/workspace/r"})
    assert (head.status_code, head.headers["content-length"], head.content) == (200, "10", b"")
    etag = head.headers["etag"]
    put(service, box, "/workspace/r", b"abcdefghij")
    other = get(service, box, "/workspace/r", **{"range": "bytes=0-1", "if-range": etag})
    assert (other.status_code, other.content) == (200, b"abcdefghij")


@pytest.mark.parametrize("where", ["header", "trailer"])
def test_a_wrong_digest_leaves_the_old_file(service: Serving, box: Box, where: str) -> None:
    put(service, box, "/workspace/w", b"old")
    wrong, right = hashlib.sha256(b"other").hexdigest(), hashlib.sha256(b"new!").hexdigest()
    if where == "header":
        answer = put(service, box, "/workspace/w", b"new!", x_content_sha256=wrong)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "integrity_mismatch"
    else:
        assert b"400 Bad Request" in chunked(service, box, "/workspace/w", b"new!", wrong)
    assert get(service, box, "/workspace/w").content == b"old"
    names = [e["path"] for e in service.http.get(files(box), params={"path": "/workspace"}).json()["items"]]
    assert not [name for name in names if name != "w" and "w" in name and "tmp" in name], names
    if where == "header":
        assert put(service, box, "/workspace/w", b"new!", x_content_sha256=right).status_code == 201
    else:
        assert b"201 Created" in chunked(service, box, "/workspace/w", b"new!", right)
    assert get(service, box, "/workspace/w").content == b"new!"
    for bad in ("xyz", "00"):
        assert put(service, box, "/workspace/w", b"new!", x_content_sha256=bad).status_code == 400


def test_a_request_behind_a_download_is_served(service: Serving, box: Box) -> None:
    """Its head is there before the answer of the one before has ended, its body comes later."""
    put(service, box, "/workspace/p", b"first")
    place = urlsplit(service.url)
    fields = f"?path=/workspace/p HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {service.key}\r\n"
    with socket.create_connection((place.hostname, place.port), 60) as sock:
        sock.sendall(
            f"GET {files(box)}/content{fields}\r\n"
            f"PUT {files(box)}/content{fields}Content-Length: 6\r\nConnection: close\r\n\r\n".encode()
        )
        told = b""
        while not told.endswith(b"\r\n\r\nfirst"):
            told += (more := sock.recv(65536))
            assert more, told
        sock.sendall(b"second")
        told = b"".join(iter(lambda: sock.recv(65536), b""))
    assert told.startswith(b"HTTP/1.1 201 "), told
    assert get(service, box, "/workspace/p").content == b"second"


def chunked(service: Serving, box: Box, path: str, data: bytes, digest: str) -> bytes:
    """An upload of unknown length, its digest behind it."""
    place = urlsplit(service.url)
    with socket.create_connection((place.hostname, place.port), 60) as sock:
        sock.sendall(
            f"PUT {files(box)}/content?path={path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Authorization: Bearer {service.key}\r\nTransfer-Encoding: chunked\r\n"
            f"Trailer: X-Content-SHA256\r\n\r\n".encode()
        )
        sock.sendall(b"%x\r\n%s\r\n0\r\nX-Content-SHA256: %s\r\n\r\n" % (len(data), data, digest.encode()))
        return b"".join(iter(lambda: sock.recv(65536), b""))


def test_an_upload_in_pieces_of_any_size_is_whole(service: Serving, box: Box) -> None:
    """Single bytes and large pieces in turn, in one go: each is added to those that nobody took yet."""
    place = urlsplit(service.url)
    sizes = [200_000, *[1] * 3000, 100_000, *[7] * 2000, 70_000, 1, 300_000, *[2, 65_536] * 20]
    pieces = [os.urandom(size) for size in sizes]
    with socket.create_connection((place.hostname, place.port), 60) as sock:
        head = (
            f"PUT {files(box)}/content?path=/workspace/pieces HTTP/1.1\r\nHost: localhost\r\n"
            f"Authorization: Bearer {service.key}\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        sock.sendall(head.encode() + body + b"0\r\n\r\n")
        told = b"".join(iter(lambda: sock.recv(65536), b""))
    assert told.startswith(b"HTTP/1.1 201 "), told
    assert hashlib.sha256(b"".join(pieces)).hexdigest().encode() in told
    assert get(service, box, "/workspace/pieces").content == b"".join(pieces)


def test_an_upload_that_breaks_off_changes_nothing(service: Serving, box: Box) -> None:
    put(service, box, "/workspace/b", b"old")
    place = urlsplit(service.url)
    with socket.create_connection((place.hostname, place.port), 60) as sock:
        head = f"PUT {files(box)}/content?path=/workspace/b HTTP/1.1\r\nHost: localhost\r\n"
        sock.sendall(f"{head}Authorization: Bearer {service.key}\r\nContent-Length: 1000000\r\n\r\n".encode())
        sock.sendall(b"n" * 500_000)
    left = "ls -A /workspace | grep -c rf- || true"
    eventually(lambda: service.run(box["id"], left)["stdout"].strip() == "0", "nothing half is left")
    assert get(service, box, "/workspace/b").content == b"old"


def test_names_kinds_and_moves(service: Serving, box: Box) -> None:
    http, base = service.http, files(box)
    assert http.post(f"{base}/mkdir", json={"path": "/workspace/n/deep/er"}).status_code == 204
    put(service, box, "/workspace/n/ä ö", b"umlaut")
    service.run(box["id"], "ln -s 'ä ö' /workspace/n/link; touch /workspace/n/$(printf 'x\\377')")
    listed = http.get(base, params={"path": "/workspace/n", "depth": 2}).json()["items"]
    by_name = {each["path"]: each for each in listed}
    assert by_name["ä ö"]["size"] == 6 and by_name["deep"]["type"] == "directory"
    assert by_name["link"]["type"] == "symlink" and by_name["link"]["target"] == "ä ö"
    assert "deep/er" in by_name
    raw = next(each for each in listed if "path_base64" in each)
    assert base64.b64decode(raw["path_base64"]) == b"x\xff"
    one = http.get(f"{base}/stat", params={"path": "/workspace/n/link"}).json()
    assert one["type"] == "file"
    same = http.get(f"{base}/stat", params={"path": "/workspace/n/link", "follow": "false"}).json()
    assert same["type"] == "symlink"
    moved = http.post(f"{base}/move", json={"source": "/workspace/n/ä ö", "target": "/workspace/n/plain"})
    assert moved.status_code == 204 and get(service, box, "/workspace/n/plain").content == b"umlaut"
    put(service, box, "/workspace/n/other", b"x")
    body = {"source": "/workspace/n/plain", "target": "/workspace/n/other", "exclusive": True}
    assert http.post(f"{base}/move", json=body).status_code == 409
    assert http.delete(base, params={"path": "/workspace/n"}).status_code == 409  # not empty
    assert http.delete(base, params={"path": "/workspace/n", "recursive": "true"}).status_code == 204
    assert http.delete(base, params={"path": "/workspace/n"}).status_code == 404
    assert http.delete(base, params={"path": "/workspace/n", "missing_ok": "true"}).status_code == 204


def test_archives(service: Serving, box: Box) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in (("a", b"1"), ("sub/b", b"22")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    base = f"{files(box)}/archive"
    sent = service.http.put(base, params={"path": "/workspace/t"}, content=buffer.getvalue())
    assert sent.status_code == 200 and sent.json()["entries"] == 2, sent.text
    back = service.http.get(base, params={"path": "/workspace/t", "exclude": "a"})
    with tarfile.open(fileobj=io.BytesIO(back.content)) as tar:
        names = [member.name for member in tar]
    assert any(name.endswith("sub/b") for name in names) and not any(name.endswith("/a") for name in names)
    evil = io.BytesIO()
    with tarfile.open(fileobj=evil, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("../../escape"))
    refused = service.http.put(base, params={"path": "/workspace/t"}, content=evil.getvalue())
    assert refused.status_code == 400, refused.text
    assert (
        service.run(box["id"], "ls /escape /workspace/../escape 2>/dev/null | wc -l")["stdout"].strip() == "0"
    )


def events(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])


def test_watching(service: Serving, box: Box) -> None:
    service.run(box["id"], "mkdir -p /workspace/watched")
    query = {"path": "/workspace/watched", "recursive": "true"}
    with service.http.stream("GET", f"{files(box)}/watch", params=query) as answer:
        found = events(answer.iter_lines())
        assert next(found)[0] == "watching"
        put(service, box, "/workspace/watched/new", b"x")
        for name, data in found:
            if name == "change" and data["path"] == "new":
                break


def test_signed_urls(service: Serving, box: Box) -> None:
    put(service, box, "/workspace/s", b"signed")
    base = f"{files(box)}/sign"
    made = service.http.post(base, json={"path": "/workspace/s", "seconds": 60}).json()
    bare = service.client()
    assert bare.get(made["url"]).content == b"signed"
    assert bare.get(made["url"], headers={"range": "bytes=0-1"}).content == b"si"
    for changed in (
        made["url"].replace("/workspace/s", "/etc/passwd"),
        made["url"].replace(box["id"], "sb-00000000000000000000"),
        made["url"].replace(f"expires={made['expires_at']}", f"expires={made['expires_at'] + 1}"),
        made["url"][:-1] + ("A" if made["url"][-1] != "A" else "B"),
        made["url"] + "x",
    ):
        assert bare.get(changed).status_code == 401, changed
    assert bare.put(made["url"], content=b"no").status_code == 401  # of another method
    up = service.http.post(base, json={"path": "/workspace/up", "method": "PUT"}).json()
    assert bare.put(up["url"], content=b"by url").status_code == 201
    assert bare.get(up["url"]).status_code == 401
    assert get(service, box, "/workspace/up").content == b"by url"
    past = made["url"].replace(f"expires={made['expires_at']}", "expires=1")
    assert bare.get(past).status_code == 401
    bare.close()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/workspace/nothing", 404),
        ("/workspace", 400),  # a folder
        ("", 400),
        ("a\0b", 400),
        ("/" + "x" * 300, 400),  # longer than a name can be
        ("/" + "x/" * 3000, 400),  # longer than a path can be
        ("/proc/1/mem", 403),
        ("/dev/zero", 400),  # no end
        ("../../../../../../etc/shadow", 404),
    ],
)
def test_paths_that_lead_nowhere(service: Serving, box: Box, path: str, status: int) -> None:
    answer = get(service, box, path)
    assert answer.status_code == status, (answer.status_code, answer.text[:300])
    assert answer.json()["error"]["hint"] is not None


def test_paths_never_mean_the_host(service: Serving, box: Box) -> None:
    secret = service.home / "secret"
    secret.write_text("of the host")
    secret.chmod(0o644)
    for path in (str(secret), f"../../../..{secret}", f"/proc/self/root{secret}", f"/proc/1/root{secret}"):
        answer = get(service, box, path)
        assert answer.status_code in (403, 404) and b"of the host" not in answer.content, (path, answer.text)
    service.run(box["id"], f"ln -s {secret} /workspace/out")
    assert get(service, box, "/workspace/out").status_code == 404
    assert put(service, box, str(secret), b"changed").status_code in (201, 403, 404)
    assert secret.read_text() == "of the host"


# Whether anybody has a file open: the kernel gives a lease to write to its only user.
OPEN = """import fcntl
file = open('/workspace/huge', 'r+')
try:
    fcntl.fcntl(file, 1024, fcntl.F_WRLCK)
except BlockingIOError:
    print('open')
"""


def test_a_digest_ends_with_its_client(service: Serving, box: Box) -> None:
    """A file of holes is as large as it says, and nobody waits for it any more."""

    def run(*argv: str) -> str:
        path = f"/v1/sandboxes/{box['id']}/processes"
        return str(service.http.post(path, json={"argv": argv, "timeout": 60}).json()["stdout"])

    run("truncate", "-s", "1T", "/workspace/huge")
    assert run("python3", "-c", OPEN) == ""  # control
    place = urlsplit(service.url)
    with socket.create_connection((place.hostname, place.port), 60) as sock:
        head = f"GET {files(box)}/digest?path=/workspace/huge HTTP/1.1\r\nHost: x\r\n"
        sock.sendall(f"{head}Authorization: Bearer {service.key}\r\n\r\n".encode())
        eventually(lambda: run("python3", "-c", OPEN) == "open\n", "somebody reads it")
    eventually(lambda: run("python3", "-c", OPEN) == "", "nobody reads it any more")
