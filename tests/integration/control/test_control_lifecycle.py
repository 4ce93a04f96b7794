from __future__ import annotations

import pytest

from ringfence.control.service import Control
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import NotFound
from ringfence.model.states import State
from support.services import ALICE, MALLORY, asked


async def test_a_sandbox_is_made_used_and_removed(control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked(labels={"team": "a"}, env={"NAME": "value"}))
    assert made.state is State.RUNNING
    assert made.boundary["runtime"] == "jail"
    assert made.boundary["no_new_privs"] is True
    assert [each.id for each in await control.sandboxes.list(ALICE, labels={"team": "a"})] == [made.id]
    link = await control.link(ALICE, made.id)
    process = await link.start(ProcessSpec(("/bin/sh", "-c", "echo $NAME")))
    output = b"".join([piece.data async for piece in process])
    assert output == b"value\n"
    ended = await control.sandboxes.delete(ALICE, made.id)
    assert ended.state is State.STOPPED
    assert (ended.cause, ended.killed_by) == ("killed", "alice")
    assert not [each for each in await control.placement.list() if each.id == made.id]
    again = await control.sandboxes.delete(ALICE, made.id)
    assert again.revision == ended.revision


async def test_other_projects_see_and_reach_nothing(control: Control) -> None:
    made = await control.sandboxes.create(ALICE, asked())
    assert await control.sandboxes.list(MALLORY) == []
    for attempt in (
        control.sandboxes.get(MALLORY, made.id),
        control.sandboxes.delete(MALLORY, made.id),
        control.sandboxes.pause(MALLORY, made.id),
        control.link(MALLORY, made.id),
        control.new_link(MALLORY, made.id),
    ):
        with pytest.raises(NotFound):
            await attempt
    assert (await control.sandboxes.get(ALICE, made.id)).state is State.RUNNING
