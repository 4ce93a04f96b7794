"""How the probe judges; that it finds an open wall is shown by the acceptance test with the fake runtime."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import pytest

from ringfence.cli import inside, probe
from ringfence.cli.canaries import Canaries
from ringfence.model.levels import Boundary, Level
from ringfence.model.sandbox import EffectiveBoundary

ALL_HELD = {name: [True, "blocked"] for name in inside.ATTEMPTS}
LIMITS = {"memory": "cgroup-v1", "pids": "cgroup-v1", "disk": "tmpfs", "output": "host", "deadline": "host"}


def wall(**changes):
    values = {
        "runtime": "jail", "level": Level.L2, "boundary": Boundary.NAMESPACES, "kernel": "6",
        "namespaces": ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"), "user_namespace": True,
        "host_uid": 70000, "seccomp": "filter", "no_new_privs": True, "capabilities": (),
        "landlock": "abi 7", "lsm": "absent", "network": "none", "limits": LIMITS,
    }  # fmt: skip
    return EffectiveBoundary(**(values | changes))


class Quiet:
    """Canaries that nobody has touched."""

    def connections(self, name):
        return 0

    def process_alive(self):
        return True


def judged(answers=None, boundary=None, canaries=None, user=1000):
    findings = probe.Findings(boundary or wall(), probe._promises(answers or ALL_HELD))
    probe._judge(findings, canaries or Quiet(), user)
    return findings


def state(findings, name):
    return next(promise.state for promise in findings.promises if promise.name == name)


def test_all_held():
    assert judged().ok


@pytest.mark.parametrize(
    "answer", [None, "yes", [], [1, "x"], ["true", "x"], [True], {"ok": True}, [None, "?"]]
)
def test_an_answer_that_is_none_does_not_count_as_held(answer):
    findings = judged(ALL_HELD | {"mount": answer})
    assert state(findings, "mount") == probe.UNKNOWN
    assert not findings.ok


def test_no_answers_at_all():
    assert not probe.Findings(wall(), probe._promises({})).ok


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"seccomp": "disabled"}, "seccomp"),
        ({"no_new_privs": False}, "no-new-privileges"),
        ({"capabilities": ("CAP_SYS_ADMIN",)}, "capabilities"),
        ({"host_uid": 0}, "identity"),
        ({"namespaces": ("mnt", "pid")}, "namespaces"),
        ({"namespaces": ("mnt", "pid")}, "interfaces"),
        ({"namespaces": ("mnt", "net", "ipc", "uts")}, "host-processes"),
    ],
)
def test_what_the_host_measured_breaks_what_the_inside_says(changes, name):
    findings = judged(boundary=wall(**changes))
    assert state(findings, name) == probe.VIOLATED
    assert not findings.ok


@pytest.mark.parametrize(("name", "promise"), [("tcp", "host-loopback"), ("abstract", "host-sockets")])
def test_a_connection_to_a_canary_breaks_the_promise(name, promise):
    canaries = Quiet()
    canaries.connections = lambda asked: int(asked == name)
    assert state(judged(canaries=canaries), promise) == probe.VIOLATED


def test_the_host_can_not_mend_what_the_inside_found_open():
    findings = judged(ALL_HELD | {"seccomp": [False, "Seccomp: 0"]})
    assert state(findings, "seccomp") == probe.VIOLATED


def test_what_the_host_can_not_see_does_not_count_as_held():
    findings = judged(boundary=wall(seccomp="unknown"))
    assert state(findings, "seccomp") == probe.UNKNOWN
    assert not findings.ok
    findings = judged(ALL_HELD | {"seccomp": [False, "Seccomp: 0"]}, boundary=wall(seccomp="unknown"))
    assert state(findings, "seccomp") == probe.VIOLATED


def test_limits_and_clean_up(tmp_path):
    folder = tmp_path / "sb"
    handle = SimpleNamespace(pid=2**22, birth=0, boot_id="", folder=str(folder))
    findings = judged(boundary=wall(limits=LIMITS | {"disk": "none"}))
    probe._judge_end(findings, SimpleNamespace(handle=handle))
    assert state(findings, "limits") == probe.VIOLATED
    assert state(findings, "clean-up") == probe.HELD
    folder.mkdir()
    findings = judged()
    probe._judge_end(findings, SimpleNamespace(handle=handle))
    assert state(findings, "limits") == probe.HELD
    assert state(findings, "clean-up") == probe.VIOLATED


def test_canaries_see_who_comes_and_leave_nothing(no_leaks, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(no_leaks.tmp))
    with Canaries(root=False) as canaries:
        told = canaries.described()
        assert canaries.connections("tcp") == canaries.connections("abstract") == 0
        with socket.create_connection(("127.0.0.1", told["port"])):
            assert canaries.connections("tcp") == 1
        with socket.socket(socket.AF_UNIX) as link:
            link.connect("\0" + told["abstract"])
            assert canaries.connections("abstract") == 1
        assert canaries.process_alive()
        with open(told["files"][0]) as file:
            assert file.read() == told["token"]


def test_outside_of_a_wall_the_attempts_succeed(monkeypatch):
    # The positive control of the attempts themselves: run here, they reach what they are after.
    with Canaries(root=False) as canaries:
        told = canaries.described()
        for name in ("host-files", "environment", "host-processes", "host-loopback", "host-sockets"):
            blocked, detail = inside.ATTEMPTS[name](told)
            assert not blocked, (name, detail)
        assert not inside.ATTEMPTS["host-name"](told | {"hostname": __import__("os").uname().nodename})[0]


def test_an_attempt_that_fails_itself_is_not_blocked(monkeypatch):
    monkeypatch.setitem(inside.ATTEMPTS, "mount", lambda _: 1 // 0)
    monkeypatch.setattr(inside, "ATTEMPTS", {"mount": inside.ATTEMPTS["mount"]})
    assert inside.attempts({}) == {"mount": [None, "ZeroDivisionError: integer division or modulo by zero"]}


def test_webassembly_is_asked_for_every_promise_too():
    from ringfence.cli import inside_wasm

    assert list(inside_wasm.ATTEMPTS) == list(inside.ATTEMPTS)


def test_the_attempts_of_webassembly_find_what_is_open(tmp_path):
    # The same code on a Python that has everything: it must say so. Only what harms nobody is tried here.
    from ringfence.cli import inside_wasm

    path = tmp_path / "file"
    path.write_text("the-token")
    canary = {"files": [str(path)], "token": "the-token", "secrets": [str(path)]}
    canary["hostname"] = os.uname().nodename
    assert inside_wasm.host_files(canary)[0] is False
    assert inside_wasm.host_secrets(canary)[0] is False
    assert inside_wasm.host_name(canary)[0] is False
    assert inside_wasm.host_processes(canary)[0] is False
    assert inside_wasm.sockets(socket.AF_UNIX)[0] is False
    found = inside_wasm.refused("getppid")
    assert found[0] is False
    assert "getppid" in found[1]
    assert "ctypes" in found[1]
