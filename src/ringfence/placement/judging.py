"""Why commands end, of a sandbox whose commands others start: the guest says a code, the host says the cause.

Kills for memory are the kernel's count of the whole sandbox. Each is claimed by one command that ended by
SIGKILL; several may end at once and be judged in any order, so a kill waits a few seconds for its command,
and no longer: what was killed may have been a child of a command that went on.
"""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from ringfence.model.errors import RingfenceError
from ringfence.model.levels import Cause
from ringfence.model.quantities import format_size
from ringfence.model.sandbox import End

if TYPE_CHECKING:
    from ringfence.node.sandboxes import NodeSandbox

WAITS = 5.0  # seconds that a kill waits for the command that it belongs to
SOON = 1.0  # seconds until the death of a wall is reported that its commands have felt already


class Judge:
    """Of one sandbox and one wall."""

    def __init__(self, sandbox: NodeSandbox) -> None:
        self._sandbox = sandbox
        self._seen = 0
        self._unclaimed: list[float] = []  # when each kill was first seen

    async def of(self, exit_code: int, *, sent: bool = False) -> End:
        """Why a command ended that the guest says ended with this code.

        Args:
            exit_code: as a shell shows it: 128 + signal if killed.
            sent: the caller has sent it that signal.
        """
        sandbox = self._sandbox
        if sandbox.supervisor.cause is not None or sandbox.ended.done():
            done, _ = await asyncio.wait({sandbox.ended}, timeout=SOON * 10)
            if done:
                return sandbox.ended.result()
        killed = exit_code == 128 + signal.SIGKILL
        if killed and not sent:
            reported = await self._guests(exit_code)
            if self._claim():
                return self._out_of_memory(reported=False)
            if reported:
                return self._out_of_memory(reported=True)
        else:
            self._look()
        if exit_code <= 128 or exit_code - 128 > signal.SIGRTMAX:
            return End(Cause.EXITED, exit_code)
        return End(Cause.KILLED if sent else Cause.SIGNALED, exit_code, _name(exit_code - 128))

    def _out_of_memory(self, *, reported: bool) -> End:
        limit = format_size(self._sandbox.request.policy.wall.resources.memory)
        return End(Cause.OUT_OF_MEMORY, 137, f"it needed more than {limit} of memory", reported=reported)

    async def _guests(self, exit_code: int) -> bool:
        """Whether the sandbox's own kernel says that it killed for memory."""
        try:
            return await self._sandbox.guest_kills(exit_code) > 0
        except RingfenceError:
            return False

    def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        count = self._sandbox.supervisor.oom_kills()
        self._unclaimed = [at for at in self._unclaimed if now - at < WAITS]
        self._unclaimed += [now] * max(0, count - self._seen)
        self._seen = max(self._seen, count)

    def _claim(self) -> bool:
        self._look()
        if not self._unclaimed:
            return False
        self._unclaimed.pop(0)
        return True


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
