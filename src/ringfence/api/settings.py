"""What an operator can set about the API."""

from __future__ import annotations

from ringfence.model.values import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """Times in seconds, sizes in bytes.

    ``domain``: ports are served on ``<port>-<sandbox>.<domain>``. ``public_url``: what signed URLs begin
    with; empty: what the client itself called. ``secret``: signs URLs, tokens and cursors; every API process
    of a service has the same.
    """

    secret: bytes
    domain: str = "localhost"
    public_url: str = ""
    body_timeout: float = 30.0  # for the next piece of a body
    most_wait: float = 120.0  # of a create or a command that is waited for
    most_output: int = 4 * 1024 * 1024  # bytes of output in the answer of a command that is waited for
    sse_interval: float = 15.0  # a comment, so that nobody in between thinks the stream is dead
    port_timeout: float = 60.0  # for the first byte of an answer from inside
