"""Parts of the engine drivers without an engine: addresses, answers that are no answers, layers as images."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import socket
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringfence.model.errors import RuntimeUnavailable
from ringfence.model.levels import Boundary, Level
from ringfence.model.sandbox import EffectiveBoundary
from ringfence.runtimes.contract import Handle
from ringfence.runtimes.engines import images, measuring
from ringfence.runtimes.engines.client import Client, EngineError
from ringfence.runtimes.engines.endpoints import Endpoint, find, parse


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("unix:///run/docker.sock", ("/run/docker.sock", "", 0)),
        ("tcp://10.0.0.1:2375", ("", "10.0.0.1", 2375)),
        ("tcp://[::1]:2375/", ("", "::1", 2375)),
    ],
)
def test_addresses(text: str, want: tuple[str, str, int]) -> None:
    found = parse("docker", text, ())
    assert (found.path, found.host, found.port) == want


@pytest.mark.parametrize(
    "text", ["", "unix://relative", "tcp://host", "tcp://host:99999", "npipe:////x", "fd://"]
)
def test_addresses_that_make_no_sense(text: str) -> None:
    with pytest.raises(RuntimeUnavailable) as caught:
        parse("docker", text, ())
    assert caught.value.hint


def test_ssh_and_tls_go_through_the_docker_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "docker").write_text("#!/bin/sh\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert parse("docker", "ssh://me@there", ()).command == (
        "docker",
        "-H",
        "ssh://me@there",
        "system",
        "dial-stdio",
    )
    monkeypatch.setenv("DOCKER_HOST", "tcp://there:2376")
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    assert find("docker").command == ("docker", "system", "dial-stdio")
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(RuntimeUnavailable, match="needs the docker program"):
        find("docker")


def test_the_current_context_is_followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.delenv("DOCKER_CONTEXT", raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"currentContext": "far"}))
    with pytest.raises(RuntimeUnavailable, match="context far can't be read"):
        find("docker")
    place = tmp_path / "contexts" / "meta" / hashlib.sha256(b"far").hexdigest()
    place.mkdir(parents=True)
    (place / "meta.json").write_text(json.dumps({"Endpoints": {"docker": {"Host": "unix:///far.sock"}}}))
    assert find("docker").path == "/far.sock"
    monkeypatch.setenv("DOCKER_CONTEXT", "default")
    assert find("docker").path.endswith("docker.sock")


async def test_a_stream_by_a_program(tmp_path: Path) -> None:
    found = await Endpoint("docker", "carried", command=("cat",)).connect()
    with found:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(found, b"there and back")
        assert await loop.sock_recv(found, 100) == b"there and back"


@asynccontextmanager
async def scripted(path: Path, *answers: bytes) -> AsyncIterator[Client]:
    """An engine that says the same to whatever is asked, and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.writelines(answers)
        writer.close()

    server = await asyncio.start_unix_server(serve, str(path))
    try:
        yield Client(Endpoint("docker", "scripted", path=str(path)))
    finally:
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: ten\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffff\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000,
    ],
)
async def test_answers_that_are_none(tmp_path: Path, answer: bytes) -> None:
    async with scripted(tmp_path / "e", answer) as client:
        with pytest.raises(RuntimeUnavailable):
            await client.call("GET", "/version")


async def test_a_refusal_carries_the_engine_s_words(tmp_path: Path) -> None:
    body = b'{"message":"no such thing"}'
    async with scripted(
        tmp_path / "e", b"HTTP/1.1 404 Not Found\r\nContent-Length: 27\r\n\r\n" + body
    ) as client:
        with pytest.raises(EngineError) as caught:
            await client.call("GET", "/x")
        assert (caught.value.status, caught.value.message) == (404, "no such thing")
        with pytest.raises(EngineError):
            await client.hijack("/containers/x/attach", {})


async def test_not_a_byte_of_a_stream_is_read_ahead(tmp_path: Path) -> None:
    head = b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\n\r\n"
    async with scripted(tmp_path / "e", head, b"the stream's own") as client:
        with await client.hijack("/containers/x/attach", {}) as sock:
            assert isinstance(sock, socket.socket)
            assert await asyncio.get_running_loop().sock_recv(sock, 100) == b"the stream's own"


def test_layers_become_an_archive(tmp_path: Path) -> None:
    top, bottom = tmp_path / "top", tmp_path / "bottom"
    for folder in (top, bottom):
        (folder / "etc").mkdir(parents=True)
    (bottom / "etc" / "a").write_text("a")
    os.link(bottom / "etc" / "a", bottom / "etc" / "b")
    (bottom / "link").symlink_to("/etc/a")
    (top / "etc" / "a").write_text("changed")
    if os.geteuid() == 0:
        os.mknod(top / "etc" / "b", 0o20000, 0)  # a whiteout
    name = images.name_of("host", (str(top), str(bottom)))
    assert name == images.name_of("host", (str(top), str(bottom)))
    assert name != images.name_of("host", (str(bottom),))
    data = b"".join(images._archive(name, "host", (str(top), str(bottom))))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        (manifest,) = json.load(tar.extractfile("manifest.json"))  # type: ignore[arg-type]
        config = json.load(tar.extractfile(manifest["Config"]))  # type: ignore[arg-type]
        assert manifest["RepoTags"] == [name]
        assert config["config"] == {"Labels": {images.LABEL: "host"}}
        layers = [tar.extractfile(path).read() for path in manifest["Layers"]]  # type: ignore[union-attr]
    assert config["rootfs"]["diff_ids"] == ["sha256:" + hashlib.sha256(layer).hexdigest() for layer in layers]
    with tarfile.open(fileobj=io.BytesIO(layers[0])) as lower:
        assert lower.getmember("etc/b").linkname == "etc/a"
        assert lower.getmember("link").linkname == "/etc/a"
    with tarfile.open(fileobj=io.BytesIO(layers[1])) as upper:
        assert upper.extractfile("etc/a").read() == b"changed"  # type: ignore[union-attr]
        if os.geteuid() == 0:
            assert "etc/.wh.b" in upper.getnames()


def _measured(
    host: dict[str, object], *, boundary: Boundary = Boundary.NAMESPACES, nested: bool = True, pid: int = 0
) -> EffectiveBoundary:
    """What is made of an engine's words."""
    driver = SimpleNamespace(name="docker", level=Level.L2, boundary=boundary)
    data = {"nested": nested, "uid": 70_000, "local": False, "capabilities": 0}
    handle = Handle("docker", 1, "sb", "/nowhere", 1, 1, "boot", data)
    container = {"HostConfig": {"NetworkMode": "none", "SecurityOpt": ["no-new-privileges"], **host}}
    info = {"KernelVersion": "6.1", "SecurityOptions": []}
    return measuring.from_engine(driver, handle, container, info, pid)


def test_of_a_filter_that_can_not_be_seen_nothing_is_claimed() -> None:
    found = _measured({})
    assert (found.seccomp, found.level, found.boundary) == ("unknown", Level.L2, Boundary.NAMESPACES)
    assert any("seccomp is unknown" in note for note in found.notes)
    machine = _measured({}, boundary=Boundary.HARDWARE, pid=os.getpid())
    assert (machine.seccomp, machine.kernel) == ("unknown", "unknown")


@pytest.mark.parametrize(
    ("host", "nested", "why"),
    [
        ({"SecurityOpt": []}, True, "can gain privileges"),
        ({"Privileged": True}, True, "privileged"),
        ({}, False, "user namespace"),
    ],
)
def test_a_wall_that_is_none_is_said_to_be_none(host: dict[str, object], nested: bool, why: str) -> None:
    found = _measured(host, nested=nested)
    assert (found.level, found.boundary) == (Level.L1, Boundary.NONE)
    assert any(why in note for note in found.notes)


def test_a_filter_that_is_not_there_is_seen() -> None:
    seen = Path("/proc/self/status").read_text()
    if "\nSeccomp:\t0" not in seen:
        pytest.skip("this process has a filter of its own")
    found = _measured({}, pid=os.getpid())
    assert (found.seccomp, found.boundary) == ("disabled", Boundary.NONE)
