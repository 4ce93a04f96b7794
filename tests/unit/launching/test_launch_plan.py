"""Plans as bytes, and the errors that come of a failed step."""

from __future__ import annotations

import errno
import os
import re
import struct
from pathlib import Path

import pytest

from ringfence.model.errors import HostLimit, StartFailed
from ringfence.runtimes.launching import hints
from ringfence.runtimes.launching.plan import OPS, Plan, id_maps

ROOT = Path(__file__).parents[3]


def test_the_table_is_the_twin_of_the_native_one() -> None:
    text = (ROOT / "native/launcher/ops.def").read_text()
    native = {
        name: (int(number), signature)
        for number, name, signature in re.findall(r'^OP\(\s*(\d+),\s*(\w+),\s*"(\w*)",', text, re.MULTILINE)
    }
    assert len(native) > 30
    assert native == OPS


def test_the_bind_flags_are_those_of_the_native_header() -> None:
    from ringfence.runtimes.launching import plan

    text = (ROOT / "native/launcher/plan.h").read_text()
    native = {name: int(value) for name, value in re.findall(r"(BIND_\w+) = (\d+)", text)}
    assert native == {name: getattr(plan, name) for name in native}
    assert native == {name: getattr(plan, name) for name in dir(plan) if name.startswith("BIND_")}


def test_a_step_is_number_length_and_arguments() -> None:
    plan = Plan()
    plan.add("SYMLINK", "a", "bc")
    assert plan.encode() == struct.pack("<HHI", 20, 0, 13) + b"\2\0\0\0a\0" + b"\3\0\0\0bc\0"


def test_surrogates_become_the_bytes_they_stand_for() -> None:
    plan = Plan()
    plan.add("CHDIR", os.fsdecode(b"/\xff"))
    assert plan.encode().endswith(b"/\xff\0")


def test_a_wrong_number_of_arguments_is_noticed_at_once() -> None:
    with pytest.raises(ValueError, match="zip"):
        Plan().add("MOUNT", "a")


def test_a_descriptor_has_one_index_however_often_it_is_named() -> None:
    plan = Plan()
    assert [plan.fd(7), plan.fd(9), plan.fd(7)] == [0, 1, 0]
    assert plan.fds == [7, 9]


def test_maps_are_users_then_groups() -> None:
    assert id_maps([(0, 10, 5)], [(1, 20, 6)]) == struct.pack("<8I", 0, 0, 10, 5, 1, 1, 20, 6)


def failed(step: str, number: int, *, rootless: bool = False) -> tuple[type, str, str]:
    plan = Plan()
    if rootless:
        plan.add("MAPS", 2, b"")
    plan.add("MKDIR", "/x", 0, 0, 0)
    error = hints.failure(plan, step, 0, number)
    assert error.details["errno"] == errno.errorcode[number]
    return type(error), error.message, error.hint


def test_a_failure_names_step_and_reason() -> None:
    plan = Plan()
    plan.add("BIND", "/nowhere", "/data", 0)
    error = hints.failure(plan, "", 0, errno.ENOENT)
    assert isinstance(error, StartFailed)
    assert error.details == {"step": "bind", "errno": "ENOENT"}
    assert "/nowhere" in error.message
    assert "does not exist" in error.hint


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EAGAIN, errno.ENOMEM])
def test_a_host_that_ran_out_is_a_host_limit(number: int) -> None:
    assert failed("CLONE", number)[0] is HostLimit


@pytest.mark.parametrize(
    ("switch", "value", "word"),
    [
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "AppArmor"),
        ("kernel/unprivileged_userns_clone", "0", "unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "max_user_namespaces"),
    ],
)
def test_refused_user_namespaces_are_explained(
    monkeypatch: pytest.MonkeyPatch, switch: str, value: str, word: str
) -> None:
    monkeypatch.setattr(hints, "read_sysctl", lambda name: value if name == switch else None)
    for step in ("CLONE", "MOUNT"):
        assert word in failed(step, errno.EPERM, rootless=True)[2]
    monkeypatch.setattr(hints, "read_sysctl", lambda name: None)
    assert word not in failed("MOUNT", errno.EPERM, rootless=True)[2]


def test_a_missing_newuidmap_is_explained() -> None:
    assert "uidmap" in failed("MAPS", errno.ENOENT, rootless=True)[2]
