"""Which HTTP status says what kind of error, and the errors that only HTTP has.

Every error answer is ``{"error": {"code", "message", "hint", "details"}}``. ``code`` is stable; the status
follows from it (for ``guest_refused`` from the errno). What is not one of ours is ``internal``: its text
stays in the log, under the request's id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringfence.model.errors import InvalidRequest, RingfenceError

STATUS = {
    "invalid_request": 400,
    "invalid_policy": 400,
    "dangerous_mount": 400,
    "not_authenticated": 401,
    "not_allowed": 403,
    "egress_denied": 403,
    "not_found": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "wrong_state": 409,
    "conflict": 409,
    "idempotency_conflict": 409,
    "payload_too_large": 413,
    "unsupported_media_type": 415,
    "range_not_satisfiable": 416,
    "integrity_mismatch": 400,
    "build_failed": 422,
    "runtime_unavailable": 422,
    "quota_exceeded": 429,
    "rate_limited": 429,
    "internal": 500,
    "start_failed": 500,
    "unsupported": 501,
    "guest_error": 502,
    "link_lost": 502,
    "protocol_violation": 502,
    "host_limit": 503,
    "lease_lost": 503,
    "node_unavailable": 503,
    "store_unavailable": 503,
    "deadline_exceeded": 504,
}
# What the guest's errno means for a client; everything else is 400: the same call inside would fail as well.
_ERRNO = {
    "ENOENT": 404,
    "ESRCH": 409,
    "EACCES": 403,
    "EPERM": 403,
    "EROFS": 403,
    "EEXIST": 409,
    "EBUSY": 409,
    "ENOTEMPTY": 409,
    "ETXTBSY": 409,
    "EPIPE": 409,
    "EFBIG": 413,
    "ENOSPC": 507,
    "EDQUOT": 507,
    "EMFILE": 503,
    "ENFILE": 503,
    "EAGAIN": 503,
    "ENOMEM": 503,
    "EIO": 502,
    "ECONNREFUSED": 502,
    "ECONNRESET": 502,
}


class MethodNotAllowed(InvalidRequest):
    """The path exists, but not with this method."""

    code = "method_not_allowed"


class RequestTimeout(InvalidRequest):
    """The client began to send a request and did not go on."""

    code = "request_timeout"


class PayloadTooLarge(InvalidRequest):
    """The body has more bytes than the route takes; ``details['most']``."""

    code = "payload_too_large"


class UnsupportedMediaType(InvalidRequest):
    """The body is not of the type that the route takes."""

    code = "unsupported_media_type"


class RangeNotSatisfiable(InvalidRequest):
    """The file has none of these bytes."""

    code = "range_not_satisfiable"


class IntegrityMismatch(InvalidRequest):
    """What arrived is not what its digest says; nothing was changed."""

    code = "integrity_mismatch"


class Internal(RingfenceError):
    """A fault of the service; the log has it under the request's id."""


class ClientGone(Exception):
    """The client went away in the middle; nobody is there to be told."""


def status_of(error: RingfenceError) -> int:
    """The HTTP status of an error."""
    if error.code == "guest_refused":
        return _ERRNO.get(str(error.details.get("errno")), 400)
    return STATUS.get(error.code, 500)


def retry_after(error: RingfenceError) -> int | None:
    """Seconds after which trying again makes sense; for the header of a 429 or 503."""
    wait = error.details.get("retry_after")
    if isinstance(wait, int | float):
        return max(1, int(wait + 0.999))
    status = status_of(error)
    return 1 if status == 429 or (status == 503 and error.code != "host_limit") else None


def body_of(error: RingfenceError, request_id: str) -> dict[str, Any]:
    """The error as the API says it; ``details`` carries the request's id for server faults."""
    shown = error.as_dict()
    if status_of(error) >= 500:
        shown["details"] = {**_plain(shown["details"]), "request_id": request_id}
    return {"error": shown}


def _plain(details: Mapping[str, Any]) -> dict[str, Any]:
    return dict(details)
