"""The service's errors as Python's: the classes of ``ringfence.model.errors``, found by their stable codes.

::

    {"error": {"code": "wrong_state", "message": …, "hint": …, "details": {…}}}   →   raise WrongState(…)

An error keeps ``status`` (HTTP) and ``request_id`` in its details, so that a report can name the request.
"""

from __future__ import annotations

import errno as _errno
from collections.abc import Mapping
from typing import Any

from ringfence.model import errors
from ringfence.model.errors import GuestRefused, RingfenceError


class ServiceUnreachable(errors.NodeUnavailable):
    """The service does not answer: it is not running, or not at this address. Nothing is known about what
    it did with the request.
    """

    code = "service_unreachable"


# What a status means if whoever answered is not the service (a proxy in between, an older version).
BY_STATUS: dict[int, type[RingfenceError]] = {
    400: errors.InvalidRequest,
    401: errors.NotAuthenticated,
    403: errors.NotAllowed,
    404: errors.NotFound,
    405: errors.InvalidRequest,
    408: errors.InvalidRequest,
    409: errors.Conflict,
    413: errors.InvalidRequest,
    415: errors.InvalidRequest,
    416: errors.InvalidRequest,
    422: errors.InvalidRequest,
    429: errors.RateLimited,
    501: errors.Unsupported,
    502: errors.NodeUnavailable,
    503: errors.NodeUnavailable,
    504: errors.DeadlineExceeded,
}
# Worth another try with the same request: nothing is wrong with it.
PASSING = frozenset(
    {"node_unavailable", "store_unavailable", "link_lost", "lease_lost", "service_unreachable"}
)


CLASSES = errors.by_code() | {ServiceUnreachable.code: ServiceUnreachable}


def not_utf8(error: UnicodeEncodeError) -> errors.InvalidRequest:
    """The error for text that can't be sent: it has bytes that are none of UTF-8, as names of files and
    arguments may, which Python holds as lone surrogates.
    """
    import re

    text = error.object
    ends = re.compile(r"""[\s"'/&=?\\]""")  # of a word, in JSON and in addresses
    word = ends.split(text[: error.start])[-1][-80:] + ends.split(text[error.start :])[0][:80]
    shown = re.sub("[\ud800-\udfff]", lambda found: f"\\x{ord(found[0]) & 0xFF:02x}", word)
    return errors.InvalidRequest(
        f"'{shown}' is not UTF-8", hint="a service is told text in UTF-8 only: give it another name"
    )


def from_object(
    value: object, *, status: int = 0, request_id: str = "", retry_after: float | None = None
) -> RingfenceError:
    """The error that a wire object (``{"code", "message", "hint", "details"}``) describes."""
    given: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
    code = str(given.get("code", ""))
    kind = CLASSES.get(code) or BY_STATUS.get(status, RingfenceError)
    message = str(given.get("message", "")) or f"the service answered {status}"
    hint = str(given.get("hint", ""))
    details = given.get("details")
    facts: dict[str, Any] = {str(k): v for k, v in details.items()} if isinstance(details, Mapping) else {}
    facts.pop("message", None)
    facts.pop("hint", None)
    if status:
        facts["status"] = status
    if request_id:
        facts["request_id"] = request_id
    if retry_after is not None:
        facts.setdefault("retry_after", retry_after)
    if kind is GuestRefused:
        return _refused(message, hint, facts)
    error = kind(message, hint=hint, **facts)
    if code and code != kind.code:
        error.details.setdefault("code", code)  # one that this version does not know
    return error


def _refused(message: str, hint: str, facts: dict[str, Any]) -> GuestRefused:
    name = str(facts.pop("errno", "EIO"))
    number = getattr(_errno, name, _errno.EIO)
    error = GuestRefused(number)
    error.message, error.hint = message, hint
    error.args = (message,)
    error.details |= facts
    return error


def from_response(status: int, headers: Mapping[str, str], body: bytes) -> RingfenceError:
    """The error of an HTTP answer that is none of success."""
    import json

    value: object = None
    try:
        parsed = json.loads(body)
        value = parsed.get("error") if isinstance(parsed, dict) else None
    except ValueError:
        value = None
    if value is None:
        text = body[:200].decode("utf-8", "replace").strip()
        value = {
            "message": f"the service answered {status}" + (f": {text}" if text.isprintable() and text else "")
        }
    try:
        wait: float | None = float(headers["retry-after"])
    except (KeyError, ValueError):
        wait = None
    return from_object(value, status=status, request_id=headers.get("x-request-id", ""), retry_after=wait)
