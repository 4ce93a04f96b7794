"""What crosses the connection; judging; graves; policies by content; what not everybody may read."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.model import errors
from ringfence.model.errors import (
    GuestRefused,
    InvalidRequest,
    NotFound,
    PolicyError,
    QuotaExceeded,
    RingfenceError,
    Unsupported,
)
from ringfence.model.levels import Cause
from ringfence.model.policy import Limits, Network, Policy, Process
from ringfence.placement import judging, templating, values
from ringfence.placement.contract import Placed, PlacedSpec, VolumeMount
from ringfence.placement.graves import Graves, noted_cause, service_folder
from ringfence.placement.judging import Judge
from ringfence.placement.policies import policy_of, same_wall

ID = "sb-00000000000000000000"


def test_specs_and_sandboxes_come_back_as_they_went() -> None:
    spec = PlacedSpec(
        id=ID,
        policy=Policy().to_dict(),
        owner={"project": "p"},
        env={"A": "\u00e4"},
        labels={"x": ""},
        volumes=(VolumeMount("vo-1", "/data", read_only=False), VolumeMount("vo-2", "/more")),
        deadline=1.5,
    )
    assert values.spec_from_json(values.decode(values.encode(values.spec_as_json(spec)))) == spec
    end, able = {"cause": "deadline"}, {"pause": True}
    placed = Placed(ID, "ended", "jail", "n", 1.0, 2.0, end=end, capabilities=able)
    assert values.placed_from_json(values.decode(values.encode(values.placed_as_json(placed)))) == placed


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("m", hint="h", a=1),
        PolicyError("m", file="f", line=3, field="x.y"),
        NotFound("m"),
        GuestRefused(2, "open"),
        QuotaExceeded("m", counter="c", most=3),
        Unsupported("m", capability="pause", odd=Path("/x")),
    ],
)
def test_errors_come_back_as_they_went(error: RingfenceError) -> None:
    again = errors.from_dict(json.loads(json.dumps(values.error_as_json(error))))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert (again.message, again.hint) == (error.message, error.hint)
    assert again.details.keys() == error.details.keys()
    if isinstance(error, GuestRefused):
        assert isinstance(again, GuestRefused)
        assert again.errno == 2


def test_every_error_has_a_code_of_its_own() -> None:
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RingfenceError)
    ]
    assert len({kind.code for kind in kinds}) == len(kinds)
    for kind in kinds:
        assert type(errors.from_dict({"code": kind.code, "message": "x"})) is kind
    assert type(errors.from_dict({"code": "of a later version", "message": "x"})) is RingfenceError


# -- judging


class Sandbox:
    """As much of one as a judge looks at."""

    def __init__(self) -> None:
        self.kills = 0
        self.guests = 0
        self.ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.supervisor = SimpleNamespace(cause=None, oom_kills=lambda: self.kills)
        self.request = SimpleNamespace(policy=Policy())

    async def guest_kills(self, status: int) -> int:
        found, self.guests = self.guests, 0
        return found


async def cause(judge: Judge, code: int, *, sent: bool = False) -> Cause:
    return (await judge.of(code, sent=sent)).cause


async def test_kills_belong_to_one_command_each() -> None:
    sandbox = Sandbox()
    judge = Judge(sandbox)  # type: ignore[arg-type]
    assert await cause(judge, 137) is Cause.SIGNALED  # the control: nothing was killed for memory
    sandbox.kills = 2
    assert await cause(judge, 0) is Cause.EXITED  # another one, judged in between, claims none
    assert await cause(judge, 137, sent=True) is Cause.KILLED
    assert await cause(judge, 137) is Cause.OUT_OF_MEMORY
    assert await cause(judge, 137) is Cause.OUT_OF_MEMORY
    assert await cause(judge, 137) is Cause.SIGNALED


async def test_a_kill_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = Sandbox()
    judge = Judge(sandbox)  # type: ignore[arg-type]
    sandbox.kills = 1
    assert await cause(judge, 1) is Cause.EXITED  # a child of it was killed, and it went on to fail
    monkeypatch.setattr(judging, "WAITS", 0.0)
    assert await cause(judge, 137) is Cause.SIGNALED


async def test_what_a_kernel_of_its_own_says_is_reported() -> None:
    sandbox = Sandbox()
    sandbox.guests = 1
    end = await Judge(sandbox).of(137)  # type: ignore[arg-type]
    assert (end.cause, end.reported) == (Cause.OUT_OF_MEMORY, True)


async def test_codes_that_are_no_signals() -> None:
    judge = Judge(Sandbox())  # type: ignore[arg-type]
    for code in (1, 128, 255):
        assert await cause(judge, code) is Cause.EXITED
    assert (await judge.of(139)).detail == "SIGSEGV"


# -- graves


def test_graves_stay_until_filled(tmp_path: Path) -> None:
    graves = Graves.open(tmp_path, "s")
    placed = {"id": ID, "end": {"cause": "deadline"}}
    graves.dig(ID, placed, {"wall_seconds": 1})
    graves.dig(ID, {"id": ID, "end": {"cause": "killed"}}, {})  # the first one stands
    again = Graves.open(tmp_path, "s")
    grave = again.get(ID)
    assert grave is not None
    assert grave["end"]["cause"] == "deadline"
    assert again.all().keys() == {ID}
    again.fill(ID)
    again.fill(ID)
    assert Graves.open(tmp_path, "s").all() == {}
    assert Graves.open(tmp_path, "other").all() == {}


def test_damaged_graves_are_none(tmp_path: Path) -> None:
    folder = service_folder(tmp_path, "s") / "ended"
    (folder / f"{ID}.json").write_text('{"placed": 1')
    (folder / "sb-11111111111111111111.json").write_text("[]")
    (folder / f"{ID}.part").write_text("half")
    assert Graves.open(tmp_path, "s").all() == {}
    assert not (folder / f"{ID}.part").exists()


def test_causes_that_were_noted() -> None:
    assert noted_cause({"cause": ["output_limit", "x"]}) == (Cause.OUTPUT_LIMIT, "x")
    for value in (None, [], ["no such cause", ""], "x", {"cause": 1}):
        assert noted_cause({"cause": value}) is None
    assert noted_cause({}) is None


# -- policies


def test_policies_are_known_by_their_content() -> None:
    policy = Policy().with_wall(process=Process(max_processes=77))
    first = policy_of(policy.to_dict())
    assert first == policy
    assert policy_of(json.loads(json.dumps(policy.to_dict()))) is first
    assert policy_of({}) == Policy()
    with pytest.raises(PolicyError):
        policy_of({"apiVersion": "ringfence/v1", "kind": "Policy", "nonsense": 1})


def test_the_door_may_change_and_the_wall_may_not() -> None:
    stands = Policy()
    door = stands.with_door(limits=Limits(output=5))
    assert same_wall(stands, door) is door
    with pytest.raises(InvalidRequest):
        same_wall(stands, stands.with_wall(process=Process(max_processes=5)))
    with pytest.raises(InvalidRequest):
        same_wall(stands, stands.with_door(network=Network("open")))


# -- templates


def test_only_what_everybody_may_read(tmp_path: Path) -> None:
    place = Path("/tmp") / f"rf-public-{os.getpid()}"
    place.mkdir(0o755)
    try:
        place.chmod(0o755)
        file = place / "x.tar"
        file.write_bytes(b"")
        file.chmod(0o644)
        templating._public(str(file))  # the control
        link = place / "link"
        link.symlink_to("/etc/shadow")
        for path in (str(link), "/etc/shadow", "relative.tar"):
            with pytest.raises((InvalidRequest, NotFound)):
                templating._public(path)
        file.chmod(0o640)
        with pytest.raises(InvalidRequest):
            templating._public(str(file))
        file.chmod(0o644)
        place.chmod(0o700)
        with pytest.raises(InvalidRequest):
            templating._public(str(file))
        with pytest.raises(NotFound):
            templating._public("/tmp/no-such-file-here")
    finally:
        place.chmod(0o755)
        for each in place.iterdir():
            each.unlink()
        place.rmdir()
