"""What egress doors tell, where a sandbox's owner looks: among its events; and the pause of a budget."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from ringfence.model.errors import RingfenceError

if TYPE_CHECKING:
    from ringfence.control.records import Sandbox
    from ringfence.control.service import Control
    from ringfence.egress.client import Doors

_log = logging.getLogger("ringfence.serving")
# Single refusals are in the connection log; these want somebody's attention.
_TOLD = {
    "egress.alarm": "egress_alarm",
    "egress.asked": "egress_asked",
    "egress.answered": "egress_answered",
    "egress.unanswered": "egress_unanswered",
    "egress.over_budget": "egress_over_budget",
}
_DATA = ("alarm", "where", "host", "port", "protocol", "method", "path", "expires", "answer", "scope",
         "limit", "reason")  # fmt: skip
_BURST, _RATE = 30.0, 0.5  # events of one sandbox that are written down: at once, and a second
_MOST_SANDBOXES = 4096


class DoorEvents:
    """Listens to the doors of one API process. ``keep``: writes an answer down that holds from now on."""

    def __init__(
        self, doors: Doors, control: Control, keep: Callable[[Mapping[str, Any]], Awaitable[None]]
    ) -> None:
        self._keep = keep
        self._doors = doors
        self._control = control
        self._pausing: set[str] = set()
        self._levels: dict[str, tuple[float, float]] = {}  # what a sandbox may have written down, and when

    async def run(self) -> None:
        """Listen, until the doors are stopped."""
        async for event in self._doors.events():
            name = _TOLD.get(str(event.get("event")))
            if name is None:
                continue
            try:
                await self._tell(name, event)
            except RingfenceError as error:
                _log.warning("%s of %s: %s", name, event.get("sandbox"), error.message)

    async def _tell(self, name: str, event: Mapping[str, Any]) -> None:
        core = self._control.core
        sandbox = await core.get(str(event.get("sandbox")))
        await self._keep(event)
        if self._few(sandbox.id):
            data = {key: event[key] for key in _DATA if key in event}
            if "id" in event:
                data["question"] = event["id"]
            await core.commit(core.event(name, sandbox.id, sandbox.project, **data))
        # What is inside may have its pause take long: others' events don't wait for it.
        if event.get("pause") and sandbox.id not in self._pausing:
            self._pausing.add(sandbox.id)
            core.task(self._pause(sandbox))

    async def _pause(self, sandbox: Sandbox) -> None:
        try:
            await self._control.powers.pause(sandbox)
        except RingfenceError as error:
            _log.warning("the pause of %s: %s", sandbox.id, error.message)
        finally:
            self._pausing.discard(sandbox.id)

    def _few(self, sandbox: str) -> bool:
        """Whether one more may be written down: code inside decides how many there are."""
        now = time.monotonic()
        level, at = self._levels.get(sandbox, (_BURST, now))
        level = min(_BURST, level + (now - at) * _RATE)
        if len(self._levels) >= _MOST_SANDBOXES:
            self._levels.clear()
        self._levels[sandbox] = (level - 1 if level >= 1 else level, now)
        return level >= 1
