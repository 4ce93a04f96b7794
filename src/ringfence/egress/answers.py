"""What the proxy itself says to a program inside, in words and in JSON."""

from __future__ import annotations

import json
from typing import Any

from ringfence.egress.door import Door, Refused
from ringfence.egress.http1 import BadMessage, Headers, ResponseHead
from ringfence.egress.upstream import Unreachable

_REASONS = {400: "Bad Request", 403: "Forbidden", 408: "Request Timeout", 413: "Content Too Large",
            415: "Unsupported Media Type", 414: "URI Too Long", 417: "Expectation Failed",
            421: "Misdirected Request", 429: "Too Many Requests",
            431: "Request Header Fields Too Large", 500: "Internal Server Error",
            501: "Not Implemented", 502: "Bad Gateway", 503: "Service Unavailable",
            504: "Gateway Timeout"}  # fmt: skip


def answer(door: Door, error: Refused | Unreachable | BadMessage) -> tuple[ResponseHead, bytes]:
    """The response to a request that was not forwarded."""
    headers: Headers = [("Content-Type", "application/json"), ("Cache-Control", "no-store")]
    details: dict[str, Any] = {"sandbox": door.spec.sandbox}
    hint = ""
    if isinstance(error, Refused):
        decision = error.decision
        status, code, message, hint = error.status, decision.code, decision.reason, decision.hint
        details["rule"] = None if decision.rule is None else decision.rule.label
        if error.retry is not None:
            headers.append(("Retry-After", str(max(1, round(error.retry)))))
        name = (
            "egress_denied" if status in (403, 400, 421) else "egress_over_budget" if status == 429 else code
        )
    else:
        status, code, message = error.status, error.code, str(error)
        name, hint = ("egress_failed", error.hint) if isinstance(error, Unreachable) else ("bad_request", "")
    details["code"] = code
    body = {"error": {"code": name, "message": message, "hint": hint, "details": details}}
    data = json.dumps(body).encode() + b"\n"
    headers.append(("X-Ringfence-Egress", code))
    return ResponseHead(status, _REASONS.get(status, "Error"), headers, len(data), True), data
