"""Every error that Ringfence raises on purpose.

::

    RingfenceError                 something went wrong, and the message names cause and remedy
    ├── InvalidRequest             the caller asked for something that can't be right
    │   ├── PolicyError            a policy value is wrong; carries file, line and field
    │   └── DangerousMount         a mount would hand the sandbox the host; must be named to be allowed
    ├── NotFound                   no such sandbox, process, file, runtime or template
    ├── WrongState                 the object exists but can't do this in its present state
    ├── Unsupported                the runtime lacks the capability that was asked for
    ├── RuntimeUnavailable         no healthy runtime meets the request (says which, why, remedy)
    ├── StartFailed                a wall could not be started; carries the step and errno
    ├── HostLimit                  the host lacks what is needed (disk full, no cgroup, no user namespaces)
    ├── BuildFailed                a command of a template's definition failed; carries line and instruction
    ├── DeadlineExceeded           an operation of Ringfence itself took too long
    ├── Conflict                   somebody else changed it meanwhile, or the name is taken
    │   ├── LeaseLost              another process acts on it now
    │   └── IdempotencyConflict    the same idempotency key with another request
    ├── QuotaExceeded              a quota or limit of the project is reached; a 429 says when to try again
    │   └── RateLimited            too many requests a minute
    ├── NotAuthenticated           no key, or none that is valid (unknown, expired, revoked)
    ├── NotAllowed                 the key's scope does not allow this
    ├── EgressDenied               the network policy does not allow a connection
    ├── NodeUnavailable            the node that has it does not answer; try again
    ├── StoreUnavailable           the state store does not answer; try again
    └── GuestError                 the guest agent, or the link to it, failed
        ├── LinkLost               the byte stream ended; the sandbox may live on: dial again
        ├── ProtocolViolation      the peer sent bytes that the link protocol does not allow
        └── GuestRefused           the guest answered with an errno (file not found, permission …)
"""

from __future__ import annotations

import errno as _errno
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, ClassVar


class RingfenceError(Exception):
    """Something went wrong; ``message`` names the cause, ``hint`` the remedy.

    ``code`` is stable: programs may match it. ``details`` is JSON-able.
    """

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, *, hint: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details

    def as_dict(self) -> dict[str, Any]:
        """The error as the API and ``--json`` print it: code, message, hint, details."""
        return {"code": self.code, "message": self.message, "hint": self.hint, "details": self.details}


class InvalidRequest(RingfenceError):
    """The caller asked for something that can't be right."""

    code = "invalid_request"


class PolicyError(InvalidRequest):
    """A policy value is wrong. ``details`` has ``file``, ``line`` (1-based) and ``field``."""

    code = "invalid_policy"


class DangerousMount(InvalidRequest):
    """A mount would hand the sandbox the host; ``--allow-dangerous-mount`` must name it."""

    code = "dangerous_mount"


class NotFound(RingfenceError):
    """No such sandbox, process, file, runtime or template."""

    code = "not_found"


class WrongState(RingfenceError):
    """The object exists but can't do this in its present state."""

    code = "wrong_state"


class Unsupported(RingfenceError):
    """The runtime lacks the capability; ``details['capability']`` names it."""

    code = "unsupported"


class RuntimeUnavailable(RingfenceError):
    """No healthy runtime meets the request."""

    code = "runtime_unavailable"


class StartFailed(RingfenceError):
    """A wall could not be started; ``details`` has ``step`` and, if the kernel said no, ``errno``."""

    code = "start_failed"


class HostLimit(RingfenceError):
    """The host lacks what is needed: disk full, no writable cgroup, no user namespaces."""

    code = "host_limit"


class BuildFailed(RingfenceError):
    """A command that a template's definition runs has failed: its own fault, not Ringfence's.

    ``details`` has ``file``, ``line``, ``instruction``, ``cause``, ``exit_code`` and ``output`` (its end).
    """

    code = "build_failed"
    exit_code = 1


class DeadlineExceeded(RingfenceError):
    """An operation of Ringfence itself (start, stop, probe) took too long."""

    code = "deadline_exceeded"


class Conflict(RingfenceError):
    """Somebody else changed it meanwhile, or the name is taken."""

    code = "conflict"


class LeaseLost(Conflict):
    """Another process acts on it now."""

    code = "lease_lost"


class IdempotencyConflict(Conflict):
    """The same idempotency key came with another request before."""

    code = "idempotency_conflict"


class QuotaExceeded(RingfenceError):
    """A quota is reached; ``details``: ``counter``, ``most`` and, where known, ``retry_after`` (s)."""

    code = "quota_exceeded"


class RateLimited(QuotaExceeded):
    """Too many requests; ``details['retry_after']`` says for how many seconds."""

    code = "rate_limited"


class NotAuthenticated(RingfenceError):
    """No key, or none that is valid: unknown, expired or revoked."""

    code = "not_authenticated"


class NotAllowed(RingfenceError):
    """The key's scope does not allow this."""

    code = "not_allowed"


class EgressDenied(RingfenceError):
    """The network policy does not allow a connection; ``details['rule']`` names what decided."""

    code = "egress_denied"


class NodeUnavailable(RingfenceError):
    """The node that has the sandbox does not answer; nothing is known about what it did."""

    code = "node_unavailable"


class StoreUnavailable(RingfenceError):
    """The state store does not answer."""

    code = "store_unavailable"


class GuestError(RingfenceError):
    """The guest agent, or the link to it, failed."""

    code = "guest_error"


class LinkLost(GuestError):
    """The byte stream to the guest ended. The sandbox may live on: dial again and resume."""

    code = "link_lost"


class ProtocolViolation(GuestError):
    """The peer sent bytes that docs/PROTOCOL.md does not allow; the link is closed."""

    code = "protocol_violation"


class GuestRefused(GuestError):
    """The guest answered with an errno. ``errno`` is the number, the message says what for."""

    code = "guest_refused"

    def __init__(self, number: int, message: str = "", **details: Any) -> None:
        name = _errno.errorcode.get(number, str(number))
        text = f"{message}: {os.strerror(number)}" if message else os.strerror(number)
        super().__init__(text, errno=name, **details)
        self.errno = number


def by_code() -> dict[str, type[RingfenceError]]:
    """The errors of this module by their codes: what another process's error is made into again."""
    kinds = [each for each in globals().values() if isinstance(each, type)]
    return {kind.code: kind for kind in kinds if issubclass(kind, RingfenceError)}


def from_dict(value: Mapping[str, Any]) -> RingfenceError:
    """What :meth:`RingfenceError.as_dict` gave, in another process; of an unknown code a plain one."""
    kind = by_code().get(str(value.get("code")), RingfenceError)
    error = kind.__new__(kind)
    message = str(value.get("message", ""))
    Exception.__init__(error, message)
    error.message, error.hint = message, str(value.get("hint", ""))
    error.details = dict(value.get("details") or {})
    if isinstance(error, GuestRefused):
        error.errno = getattr(_errno, str(error.details.get("errno")), 0)
    return error
