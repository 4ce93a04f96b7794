"""Commands over a WebSocket."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import struct
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from support.serving import Serving, eventually

Box = dict[str, Any]


@contextlib.contextmanager
def dial(service: Serving, path: str, key: str | None = None) -> Iterator[ClientConnection]:
    headers = {"authorization": f"Bearer {key or service.key}"}
    url = service.url.replace("http", "ws") + path
    with connect(url, additional_headers=headers, open_timeout=60, proxy=None, max_size=None) as socket:
        yield socket


@contextlib.contextmanager
def execute(service: Serving, box: Box, **first: Any) -> Iterator[ClientConnection]:
    with dial(service, f"/v1/sandboxes/{box['id']}/execute") as socket:
        send(socket, type="execute", **first)
        yield socket


def send(socket: ClientConnection, **frame: Any) -> None:
    socket.send(json.dumps(frame))


def receive(socket: ClientConnection) -> dict[str, Any]:
    raw = socket.recv(60)
    assert isinstance(raw, str)
    return dict(json.loads(raw))


def to_the_end(socket: ClientConnection) -> list[dict[str, Any]]:
    found = []
    with contextlib.suppress(ConnectionClosed):
        while True:
            found.append(receive(socket))
    return found


def text(frames: list[dict[str, Any]], stream: str = "stdout") -> str:
    return "".join(frame["data"] for frame in frames if frame["type"] == stream)


def test_streams_and_the_end(service: Serving, box: Box) -> None:
    with execute(service, box, command="echo out; echo err >&2; exit 4") as socket:
        frames = to_the_end(socket)
    assert frames[0]["type"] == "started" and frames[0]["pid"] > 1 and frames[0]["fresh"]
    assert (text(frames), text(frames, "stderr")) == ("out\n", "err\n")
    end = {"type": "exit", "exit_code": 4, "signal": None, "cause": "exited", "detail": ""}
    assert frames[-1] == end
    assert socket.close_code == 1000


def test_input_as_text_base64_and_bytes(service: Serving, box: Box) -> None:
    with execute(service, box, argv=["cat"], keep_stdin=True, binary=True) as socket:
        assert receive(socket)["type"] == "started"
        send(socket, type="input", data="text ")
        send(socket, type="input", data=base64.b64encode(b"\xff ").decode(), encoding="base64")
        socket.send(b"bytes")
        send(socket, type="eof")
        got, end = b"", None
        with contextlib.suppress(ConnectionClosed):
            while True:
                raw = socket.recv(60)
                if isinstance(raw, bytes):
                    stream, offset = struct.unpack_from(">BQ", raw)
                    assert (stream, offset) == (1, len(got))
                    got += raw[9:]
                else:
                    end = json.loads(raw)
    assert got == b"text \xff bytes" and end is not None and end["exit_code"] == 0


def test_reconnecting_loses_nothing_and_starts_nothing(service: Serving, box: Box) -> None:
    command = "echo $$ >> /tmp/starts; for i in 1 2 3; do echo $i; read x; done; echo done"
    with execute(service, box, command=command, command_id="re", keep_stdin=True) as socket:
        first = receive(socket)
        assert first["command_id"] == "re"
        seen = receive(socket)
        assert (seen["data"], seen["offset"]) == ("1\n", 0)
    with execute(service, box, command=command, command_id="re", stdout_offset=2, stderr_offset=0) as socket:
        assert receive(socket)["fresh"] is False
        for _ in range(3):
            send(socket, type="input", data="\n")
        frames = to_the_end(socket)
    assert text(frames) == "2\n3\ndone\n" and frames[0]["offset"] == 2
    with execute(service, box, command_id="re", stdout_offset=0) as socket:  # after its end, by the id alone
        frames = to_the_end(socket)
    assert text(frames) == "1\n2\n3\ndone\n" and frames[-1]["exit_code"] == 0
    assert service.run(box["id"], "wc -l < /tmp/starts")["stdout"].strip() == "1"


def test_attach_by_path(service: Serving, box: Box) -> None:
    body = {"command": "echo 0123456789", "id": "att", "wait": False, "detached": True}
    service.http.post(f"/v1/sandboxes/{box['id']}/processes", json=body)
    with dial(service, f"/v1/sandboxes/{box['id']}/processes/att/attach?stdout_offset=4") as socket:
        frames = to_the_end(socket)
    assert text(frames) == "456789\n" and frames[-1]["type"] == "exit"
    with (
        pytest.raises(InvalidStatus) as refused,
        dial(service, f"/v1/sandboxes/{box['id']}/processes/nothing/attach"),
    ):
        pass
    assert refused.value.response.status_code == 404
    assert json.loads(refused.value.response.body)["error"]["details"]["errno"] == "ENOENT"


def test_terminal_resize_signal_and_kill(service: Serving, box: Box) -> None:
    with execute(service, box, argv=["sh"], pty=True, keep_stdin=True) as socket:
        receive(socket)
        send(socket, type="resize", rows=21, columns=99)
        send(socket, type="input", data="stty size; exit\n")
        assert "21 99" in text(to_the_end(socket))
    with execute(
        service, box, command="trap 'echo caught; exit 7' TERM; echo up; while :; do sleep 0.05; done"
    ) as socket:
        receive(socket)
        assert receive(socket)["data"] == "up\n"
        send(socket, type="signal", signal="TERM", scope="process")
        frames = to_the_end(socket)
        assert text(frames) == "caught\n" and frames[-1]["exit_code"] == 7
    with execute(service, box, argv=["sleep", "600"]) as socket:
        receive(socket)
        send(socket, type="resize", rows=5, columns=5)  # no terminal: told, and goes on
        refused = receive(socket)
        assert (refused["type"], refused["fatal"]) == ("error", False)
        send(socket, type="ping")
        assert receive(socket) == {"type": "pong"}
        send(socket, type="kill")
        end = to_the_end(socket)[-1]
        assert (end["signal"], end["cause"]) == (9, "killed")


def test_a_slow_reader_stops_the_command_not_the_service(service: Serving) -> None:
    made = service.sandbox(policy={"limits": {"output": "1GiB"}})
    command = "i=0; while [ $i -lt 400 ]; do head -c 65536 /dev/zero; i=$((i+1)); echo $i > /tmp/at; done"
    with execute(service, made, command=command, command_id="slow", binary=True) as socket:
        receive(socket)
        at = 0
        still = 0

        def stands() -> bool:
            # Where it is does not change between looks that take a command each.
            nonlocal at, still
            now = int(service.run(made["id"], "cat /tmp/at 2>/dev/null || echo 0")["stdout"].strip() or 0)
            still = still + 1 if now == at and now else 0  # it may begin late
            at = now
            return still >= 20

        eventually(stands, "the command waits for its reader")
        assert 0 < at < 400
        total = 0
        with contextlib.suppress(ConnectionClosed):
            while True:
                raw = socket.recv(60)
                total += len(raw) - 9 if isinstance(raw, bytes) else 0
    assert total == 400 * 65536
    service.http.delete(f"/v1/sandboxes/{made['id']}")


def test_a_command_may_die_with_its_client(service: Serving, box: Box) -> None:
    for options, dies in (
        ({"kill_on_disconnect": True}, True),
        ({}, False),
        ({"idle_timeout_seconds": 0.3}, True),
    ):
        id = f"d{uuid.uuid4().hex[:8]}"
        with execute(service, box, argv=["sleep", "600"], command_id=id, **options) as socket:
            receive(socket)
        one = f"/v1/sandboxes/{box['id']}/processes/{id}"
        if dies:
            eventually(lambda one=one: service.http.get(one).json()["state"] == "killed", "it dies")
        else:
            assert service.http.get(one).json()["state"] == "running"
            service.http.delete(one)


def test_a_command_that_is_waited_for_may_die_with_its_client(service: Serving, box: Box) -> None:
    id = f"d{uuid.uuid4().hex[:8]}"
    path = f"/v1/sandboxes/{box['id']}/processes"
    body = json.dumps({"id": id, "argv": ["sleep", "600"], "kill_on_disconnect": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {service.key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    place = urlsplit(service.url)
    with socket.create_connection((place.hostname, place.port), 60) as sock:
        sock.sendall(head.encode() + body)
        eventually(lambda: service.http.get(f"{path}/{id}").json().get("state") == "running", "it runs")
    eventually(lambda: service.http.get(f"{path}/{id}").json().get("state") == "killed", "it dies")


def test_output_is_forgotten_after_its_time(service: Serving, box: Box) -> None:
    with execute(service, box, command="echo x", command_id="ttl", ttl_seconds=0.2) as socket:
        to_the_end(socket)
    one = f"/v1/sandboxes/{box['id']}/processes/ttl"
    eventually(lambda: service.http.get(one).status_code == 404, "it is forgotten")


def test_the_end_of_the_sandbox_is_the_end_of_its_commands(service: Serving) -> None:
    made = service.sandbox()
    with execute(service, made, argv=["sleep", "600"]) as socket:
        receive(socket)
        service.http.delete(f"/v1/sandboxes/{made['id']}")
        end = to_the_end(socket)[-1]
    assert end["type"] == "exit" and end["cause"] == "killed" and end["exit_code"] in (None, 137)


@pytest.mark.parametrize(
    ("frame", "told"),
    [
        ("no json", "no JSON object"),
        ("[1]", "no JSON object"),
        ('{"type": "execute"}', "neither a command"),
        ('{"type": "execute", "argv": ["true"], "colour": 1}', "colour: unknown field"),
        ('{"type": "execute", "argv": "true"}', "argv"),
        ('{"type": "execute", "command_id": "a b", "argv": ["true"]}', "command_id"),
    ],
)
def test_frames_that_can_not_be_right(service: Serving, box: Box, frame: str, told: str) -> None:
    with dial(service, f"/v1/sandboxes/{box['id']}/execute") as socket:
        socket.send(frame)
        error = receive(socket)
        assert error["type"] == "error" and error["error_type"] == "invalid_request"
        assert told in error["message"]
        with pytest.raises(ConnectionClosed):
            socket.recv(60)
    assert socket.close_code == 1008


def test_who_may_not_gets_no_socket(service: Serving, box: Box) -> None:
    path = f"/v1/sandboxes/{box['id']}/execute"
    reader = service.make_key(scopes=["read"])
    _, foreign = service.tenant(f"t{uuid.uuid4().hex[:8]}")
    for key, status in (("rf_nothing", 401), (reader, 403), (foreign, 404)):
        with pytest.raises(InvalidStatus) as refused, dial(service, path, key):
            pass
        assert refused.value.response.status_code == status
