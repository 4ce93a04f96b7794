"""Commands over HTTP and server-sent events."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from support.serving import Serving, eventually

Box = dict[str, Any]


def processes(box: Box) -> str:
    return f"/v1/sandboxes/{box['id']}/processes"


def events(text: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Id, name and data of each event."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append((fields.get("id", ""), fields["event"], json.loads(fields["data"])))
    return found


def test_input_output_and_causes(service: Serving, box: Box) -> None:
    run = service.run
    assert run(box["id"], "cat", stdin="hello")["stdout"] == "hello"
    binary = base64.b64encode(bytes(range(256))).decode()
    back = run(box["id"], "cat", stdin=binary, stdin_encoding="base64")
    assert (back["stdout_encoding"], back["stdout"]) == ("base64", binary)
    assert run(box["id"], "echo a; echo b >&2", merge_stderr=True)["stdout"] == "a\nb\n"
    killed = run(box["id"], "kill -TERM $$")
    assert (killed["exit_code"], killed["signal"], killed["cause"]) == (143, 15, "signaled")
    late = run(box["id"], "sleep 600", timeout=0.3)
    assert late["timed_out"] and late["cause"] == "deadline" and late["exit_code"] == 137
    big = run(box["id"], "head -c 200000 /dev/zero | tr '\\0' x")
    assert big["stdout_size"] == 200_000 and len(big["stdout"]) == 200_000 and not big["truncated"]


def test_a_waited_command_is_bounded(service: Serving) -> None:
    made = service.sandbox(policy={"limits": {"output": "64MiB"}})
    ran = service.run(made["id"], "head -c 6000000 /dev/zero | tr '\\0' x")
    assert ran["truncated"] and ran["stdout_size"] == 6_000_000 and len(ran["stdout"]) == 4 * 1024 * 1024
    service.http.delete(f"/v1/sandboxes/{made['id']}")


def test_out_of_memory_is_said_by_the_host(service: Serving) -> None:
    made = service.sandbox()
    ran = service.run(made["id"], "python3 -c 'x = bytearray(600 * 2**20)'")
    assert ran["cause"] == "out_of_memory" and ran["exit_code"] == 137, ran
    service.http.delete(f"/v1/sandboxes/{made['id']}")


def test_the_output_limit_ends_the_sandbox(service: Serving) -> None:
    made = service.sandbox(policy={"limits": {"output": 100_000}})
    answer = service.http.post(processes(made), json={"command": "yes"})
    assert answer.status_code == 200, answer.text
    ran = answer.json()
    assert ran["cause"] == "output_limit", ran
    assert ran["stdout_size"] <= 100_000
    ended = service.http.get(f"/v1/sandboxes/{made['id']}/wait", params={"state": "stopped", "timeout": 60})
    assert ended.json()["cause"] == "output_limit"


def test_an_id_is_used_once(service: Serving, box: Box) -> None:
    body = {"command": "echo x >> /tmp/count; wc -l < /tmp/count", "id": "once"}
    assert service.http.post(processes(box), json=body).json()["stdout"].strip() == "1"
    assert service.http.post(processes(box), json=body).json()["stdout"].strip() == "1"
    assert service.http.post(processes(box), json={**body, "wait": False}).json()["started"] is False


def test_detached_output_is_kept_and_read_by_offset(service: Serving, box: Box) -> None:
    command = "echo one; echo two >&2; echo three; sleep 0.2; echo four"
    started = service.http.post(
        processes(box), json={"command": command, "id": "kept", "wait": False, "detached": True}
    )
    assert started.status_code == 201 and started.json()["state"] == "running"
    one = f"{processes(box)}/kept"
    eventually(lambda: service.http.get(one).json()["state"] == "exited", "it ends")
    read = service.http.get(f"{one}/output").json()
    assert read["stdout"]["data"] == "one\nthree\nfour\n" and read["stderr"]["data"] == "two\n"
    assert read["state"] == "exited" and read["exit_code"] == 0
    rest = service.http.get(
        f"{one}/output", params={"stdout_offset": 4, "stderr_offset": 4, "limit": 6}
    ).json()
    assert rest["stdout"] == {
        "offset": 4,
        "next_offset": 10,
        "lost": 0,
        "data": "three\n",
        "encoding": "utf-8",
    }
    assert "exit_code" not in rest  # not all of it was read
    assert service.http.delete(one).status_code == 204
    assert service.http.get(one).status_code == 404


def test_what_nobody_kept_is_said(service: Serving, box: Box) -> None:
    body = {"command": "seq 1 4000", "id": "ring", "wait": False, "detached": True, "keep": 4096}
    service.http.post(processes(box), json=body)
    one = f"{processes(box)}/ring"
    eventually(lambda: service.http.get(one).json()["state"] == "exited", "it ends")
    read = service.http.get(f"{one}/output").json()["stdout"]
    assert read["lost"] > 0 and read["offset"] == read["lost"] and read["data"].endswith("4000\n")


def test_events_and_where_to_go_on(service: Serving, box: Box) -> None:
    body = {"command": "echo a; echo b >&2; sleep 0.1; echo c", "id": "sse", "wait": False}
    service.http.post(processes(box), json=body)
    stream = f"{processes(box)}/sse/stream"
    with service.http.stream("GET", stream) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = events("".join(answer.iter_text()))
    assert found[0][1] == "started" and found[-1][1] == "exit"
    text = "".join(data["data"] for _, name, data in found if name == "stdout")
    assert text == "a\nc\n" and found[-1][2]["exit_code"] == 0
    again = events(service.http.get(stream, headers={"last-event-id": "2-0"}).text)
    assert "".join(data["data"] for _, name, data in again if name == "stdout") == "c\n"
    assert "".join(data["data"] for _, name, data in again if name == "stderr") == "b\n"


def test_signals_stdin_and_terminals(service: Serving, box: Box) -> None:
    one = f"{processes(box)}/tty"
    body = {
        "argv": ["sh"],
        "id": "tty",
        "pty": True,
        "keep_stdin": True,
        "wait": False,
        "rows": 10,
        "columns": 40,
    }
    assert service.http.post(processes(box), json=body).status_code == 201
    assert service.http.post(f"{one}/resize", json={"rows": 33, "columns": 77}).status_code == 204
    assert service.http.post(f"{one}/stdin", json={"data": "stty size; exit 5\n"}).status_code == 204
    eventually(lambda: service.http.get(one).json()["state"] == "exited", "the shell ends")
    read = service.http.get(f"{one}/output").json()
    assert "33 77" in read["stdout"]["data"] and read["exit_code"] == 5
    service.http.post(processes(box), json={"argv": ["sleep", "600"], "id": "sig", "wait": False})
    assert service.http.post(f"{processes(box)}/sig/signal", json={"signal": "SIGINT"}).status_code == 204
    eventually(lambda: service.http.get(f"{processes(box)}/sig").json()["state"] == "killed", "it is killed")
    read = service.http.get(f"{processes(box)}/sig/output").json()
    assert (read["signal"], read["cause"]) == (2, "killed")  # it was us
    late = service.http.post(f"{processes(box)}/sig/signal", json={"signal": 15})
    assert late.status_code == 409 and late.json()["error"]["details"]["errno"] == "ESRCH"


def test_the_whole_tree_is_killed(service: Serving, box: Box) -> None:
    tree = "setsid sleep 4711 & sleep 4712 & sh -c 'sleep 4713; :' & wait"
    service.http.post(processes(box), json={"command": tree, "id": "tree", "wait": False})

    def alive() -> int:
        return int(
            service.run(
                box["id"],
                "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -o 'sleep 471[123]' | sort -u | wc -l",
            )["stdout"]
        )

    eventually(lambda: alive() == 3, "all run")
    assert service.http.post(f"{processes(box)}/tree/kill").status_code == 204
    eventually(lambda: alive() == 0, "none is left")


def test_a_detached_command_has_its_time_too(service: Serving, box: Box) -> None:
    body = {"argv": ["sleep", "600"], "id": "timed", "wait": False, "detached": True, "timeout": 0.5}
    service.http.post(processes(box), json=body)
    eventually(
        lambda: service.http.get(f"{processes(box)}/timed").json()["state"] == "killed", "its time is over"
    )


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({"argv": ["no-such-program"]}, 404, "No such file"),
        ({"argv": ["/etc/passwd"]}, 403, "denied"),
        ({"argv": ["true"], "cwd": "/nowhere"}, 404, "No such file"),
        ({}, 400, "one of argv and command"),
        ({"argv": ["true"], "command": "true"}, 400, "one of argv and command"),
        ({"argv": []}, 400, "argv"),
        ({"argv": ["a\0b"]}, 400, "argv"),
        ({"argv": ["true"], "env": {"A=B": "x"}}, 400, "env"),
        ({"argv": ["true"], "id": "a/b"}, 400, "id"),
        ({"argv": ["true"], "timeout": -1}, 400, "timeout"),
        ({"argv": ["cat"], "stdin": "%%%", "stdin_encoding": "base64"}, 400, "base64"),
        ({"argv": ["true"], "rows": 0}, 400, "rows"),
    ],
)
def test_what_can_not_be_right(service: Serving, box: Box, body: Box, status: int, told: str) -> None:
    answer = service.http.post(processes(box), json=body)
    assert answer.status_code == status, answer.text
    assert told in answer.json()["error"]["message"]
