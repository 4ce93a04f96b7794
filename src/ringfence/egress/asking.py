"""Questions about what no rule allows: held for a while, answered by a person or a program."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ringfence.egress.policy import Decision
from ringfence.egress.remembering import MOST_PATH, answer_rule
from ringfence.model.errors import NotFound
from ringfence.model.ids import new_id
from ringfence.model.policy import NetworkRule
from ringfence.model.policy_network import _RULE, written

if TYPE_CHECKING:
    from ringfence.egress.door import Door
    from ringfence.egress.names import Host

_MOST_OF_ONE = 32  # questions of one sandbox at once
_DENIED_FOR = 60.0  # seconds that a denial answers the same question again


class _Question:
    def __init__(
        self, door: Door, host: Host, port: int, protocol: str | None, method: str, path: str
    ) -> None:
        self.id = new_id("ask")
        self.door = door
        self.host = host
        self.port = port
        self.protocol = protocol
        self.method, self.path = method, path
        self.at = time.time()
        self.expires = self.at + door.network.ask_timeout
        self.answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def as_dict(self) -> dict[str, Any]:
        spec = self.door.spec
        found = {
            "id": self.id, "sandbox": spec.sandbox, "project": spec.project, "task": spec.task,
            "host": str(self.host), "port": self.port, "protocol": self.protocol,
            "method": self.method or None, "path": self.path[:MOST_PATH] or None, "at": round(self.at, 3),
            "expires": round(self.expires, 3),
        }  # fmt: skip
        return {key: value for key, value in found.items() if value not in (None, "")}

    def exactly(self) -> dict[str, Any]:
        """What was asked, whole."""
        return {
            "host": str(self.host), "port": self.port, "protocol": self.protocol, "method": self.method,
            "path": self.path,
        }  # fmt: skip


class Questions:
    """All that wait for an answer."""

    def __init__(self, emit: Callable[[dict[str, Any]], None]) -> None:
        self.emit = emit
        self._open: dict[str, _Question] = {}
        self._denied: dict[tuple[str, str, int, str, str], float] = {}

    def pending(self) -> list[dict[str, Any]]:
        """The open questions, oldest first."""
        return [question.as_dict() for question in self._open.values()]

    async def ask(
        self,
        door: Door,
        host: Host,
        port: int,
        protocol: str | None,
        method: str,
        path: str,
        decision: Decision,
    ) -> Decision:
        """Hold until somebody answers, at most for the policy's time. The same question is asked once."""
        key = (door.spec.sandbox, str(host), port, method, path)
        if self._denied.get(key, 0.0) > time.monotonic():
            return decision
        mine = [one for one in self._open.values() if one.door is door]
        # Whoever says yes to one thing has not said it to another protocol.
        asked = (host, port, protocol, method, path)
        question = next(
            (one for one in mine if (one.host, one.port, one.protocol, one.method, one.path) == asked), None
        )
        if question is None:
            if len(mine) >= _MOST_OF_ONE:
                return decision
            question = _Question(door, host, port, protocol, method, path)
            self._open[question.id] = question
            self.emit({"event": "egress.asked", **question.as_dict()})
        try:
            async with asyncio.timeout(max(0.0, question.expires - time.time())):
                allowed = await asyncio.shield(question.answer)
        except TimeoutError:
            if self._open.pop(question.id, None) is not None:
                self.emit({"event": "egress.unanswered", **question.as_dict()})
            return Decision(
                False, "unanswered", None, f"{decision.reason}; nobody answered in time", decision.hint
            )
        if not allowed:
            return Decision(False, "denied", None, f"{host} port {port}: somebody said no")
        return Decision(
            True, "asked", answer_rule(question.host, port, protocol, method, path, door.rules.trust)
        )

    def answer(self, number: str, allow: bool, remember: bool = False) -> dict[str, Any]:
        """Answer a question; with ``remember`` an allowance becomes a rule of the sandbox, which is returned:
        as ``remembered`` exactly, as ``rule`` in the words of a policy if it has them. One that is too long,
        or too many, is let through this once.

        Raises:
            NotFound: no such question is open (any more).
        """
        question = self._open.pop(number, None)
        if question is None:
            raise NotFound(
                f"no question {number[:40]!r} is open", hint="`ringfence egress pending` lists them"
            )
        result = question.as_dict() | {"answer": "allow" if allow else "deny"}
        door = question.door
        if allow and remember:
            remembered = question.exactly()
            rule = door.remember(remembered)
            if rule is not None:
                result["remembered"] = remembered
                if not question.path.endswith("*"):  # in a policy that is a pattern
                    result["rule"] = written(rule.source, _RULE, NetworkRule(""))
        elif not allow:
            if len(self._denied) > 4096:
                self._denied.clear()
            key = (door.spec.sandbox, str(question.host), question.port, question.method, question.path)
            self._denied[key] = time.monotonic() + _DENIED_FOR
        question.answer.set_result(allow)
        self.emit({"event": "egress.answered", **result})
        return result

    def forget(self, door: Door) -> None:
        """The door has closed: nobody waits for an answer any more."""
        for number in [number for number, question in self._open.items() if question.door is door]:
            question = self._open.pop(number)
            if not question.answer.done():
                question.answer.set_result(False)
