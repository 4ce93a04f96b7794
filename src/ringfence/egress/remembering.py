"""Answers that hold from now on: one question each, exactly, as text that a store can keep.

A rule of a policy can't say everything that a program may ask for (a path that ends with ``*`` is a pattern
there), so an answer is kept as the question was, and never as something wider.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ringfence.egress.names import BadHost, Host, parse_host
from ringfence.egress.policy import Rule
from ringfence.model.errors import InvalidRequest
from ringfence.model.policy import NetworkRule

if TYPE_CHECKING:
    from ringfence.egress.policy import Trust

MOST_PATH = 2000  # letters of a path: no more of one are shown to whoever answers
_MOST = 32 * 1024  # letters of one sandbox's answers
_FIELDS = ("host", "port", "protocol", "method", "path")


def answer_rule(
    host: Host, port: int, protocol: str | None, method: str, path: str, trust: Any, origin: str = "answer"
) -> Rule:
    """The narrowest rule for one destination: exactly this host and port, protocol, method, path."""
    if protocol not in (None, "http", "tls", "tcp"):
        raise InvalidRequest(f"{protocol!r} is no protocol")
    source = NetworkRule(
        str(host),
        (port,),
        methods=(method,) if method else (),
        paths=(path,) if path and path != "*" else (),
        protocol="tcp" if protocol == "tcp" else None,
    )
    rule = Rule(0, source, trust, origin)
    rule.protocol = protocol  # type: ignore[assignment]  # who said yes to TLS has not said it to what can be read on the way
    if path:  # a star in it is a star
        rule.exact, rule.prefixes = frozenset((path,)), ()
    return rule


def as_text(answer: Mapping[str, Any]) -> str:
    """One answer as the store keeps it; the same text for the same question."""
    return json.dumps({key: answer[key] for key in _FIELDS}, sort_keys=True, separators=(",", ":"))


def rule_of(text: str, trust: Trust) -> Rule:
    """The rule that an answer is.

    Raises:
        InvalidRequest: it is no answer.
    """
    try:
        answer = json.loads(text)
        host = parse_host(str(answer["host"]))
        protocol, method, path = answer["protocol"], str(answer["method"]), str(answer["path"])
        return answer_rule(host, int(answer["port"]), protocol, method, path, trust)
    except (BadHost, KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"this is no remembered answer: {error}") from None


def fits(answers: Iterable[str], more: str) -> bool:
    """Whether one more can be kept beside those of the same sandbox."""
    return sum(map(len, answers)) + len(more) <= _MOST
