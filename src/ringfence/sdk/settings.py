"""Which service to talk to, and as whom: arguments, then the environment, then what ``ringfence login`` kept.

Only the standard library is imported here, lazily: the command line asks on the way of every verb.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ringfence.model.errors import InvalidRequest
from ringfence.model.values import dataclass

URL, KEY, FILE = "RINGFENCE_URL", "RINGFENCE_API_KEY", "RINGFENCE_LOGIN"
LOCAL = "local"  # as an address: none, whatever the login file says
SCHEMES = ("http", "https", "unix")
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MOST = 64 * 1024  # bytes of a login file


@dataclass(frozen=True, slots=True)
class Settings:
    """A service. ``url``: ``http://``, ``https://`` or ``unix:///path/of.sock``; ``key``: may be empty.

    ``insecure``: send the key over plain HTTP to another machine. ``timeout``: seconds that a call may take
    without an answer. ``retry_for``: seconds during which what is safe to repeat is repeated.
    """

    url: str
    key: str = ""
    insecure: bool = False
    timeout: float = 60.0
    retry_for: float = 30.0
    source: str = ""  # where it was found, for messages

    def __repr__(self) -> str:
        return f"Settings(url={self.url!r}, key={'…' if self.key else ''!r})"

    @property
    def socket(self) -> str | None:
        """The path of the unix socket, or ``None``."""
        if not self.url.startswith("unix:"):
            return None
        return self.url.removeprefix("unix:").removeprefix("//")

    @property
    def base(self) -> str:
        """What request paths are put behind."""
        return "http://localhost" if self.socket else self.url.rstrip("/")

    @property
    def websocket_base(self) -> str:
        """The same for WebSockets."""
        return "ws" + self.base.removeprefix("http")


def find(url: str | None = None, key: str | None = None) -> Settings | None:
    """The service that is configured, ``None`` if none is.

    Raises:
        InvalidRequest: what is configured can't be right, or the login file is open to others.
    """
    given = url or os.environ.get(URL, "")
    if given == LOCAL:
        return None
    if given:
        secret = key if key is not None else os.environ.get(KEY, "")
        if (
            not secret
            and (kept := _kept()) is not None
            and kept.get("url", "").rstrip("/") == given.rstrip("/")
        ):
            secret = kept.get("key", "")
        return check(Settings(given, secret, insecure=_insecure(), source=URL if not url else "url"))
    kept = _kept()
    if kept is None:
        return None
    secret = key or os.environ.get(KEY, "") or str(kept.get("key", ""))
    settings = Settings(
        str(kept.get("url", "")),
        secret,
        insecure=_insecure() or kept.get("insecure") is True,
        source=str(path()),
    )
    return check(settings)


def check(settings: Settings) -> Settings:
    """The same settings, if they can be right.

    Raises:
        InvalidRequest: with the remedy.
    """
    from urllib.parse import urlsplit

    hint = f"for example {URL}=http://127.0.0.1:8717, https://sandboxes.example or unix:///run/ringfence/api.sock"
    try:
        parts = urlsplit(settings.url)
        port = parts.port
    except ValueError as error:
        raise InvalidRequest(f"{settings.url!r} is no address of a service: {error}", hint=hint) from None
    if parts.scheme not in SCHEMES or (parts.scheme == "unix") != (not parts.hostname) or port == 0:
        raise InvalidRequest(f"{settings.url!r} is no address of a service", hint=hint)
    if parts.scheme == "unix" and not parts.path.startswith("/"):
        raise InvalidRequest(f"{settings.url!r}: the path of a socket begins with a slash", hint=hint)
    if not _host(parts.hostname or "host"):
        raise InvalidRequest(f"{settings.url!r} is no address of a service: no such host can be", hint=hint)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise InvalidRequest("an address has no user, query or fragment", hint=f"the key belongs into {KEY}")
    if any(not 0x21 <= ord(letter) <= 0x7E for letter in settings.key):
        raise InvalidRequest("the key has characters that no key has", hint=f"look at {KEY}")
    local = (parts.hostname or "") in LOOPBACK or (parts.hostname or "").endswith(".localhost")
    if parts.scheme == "http" and settings.key and not (local or settings.insecure):
        raise InvalidRequest(
            f"the key would go to {parts.hostname} unencrypted",
            hint="use https; or, in a network that you trust, RINGFENCE_INSECURE=1 or "
            "`ringfence login --insecure`",
        )
    return settings


def _host(name: str) -> bool:
    """Whether it can be the name or address of a host; most that is odd in it is a slip of the fingers."""
    if ":" in name:  # an IPv6 address: urlsplit wants it in brackets
        import ipaddress

        try:
            ipaddress.IPv6Address(name)
        except ValueError:
            return False
        return True
    try:
        plain = name.encode("idna").decode("ascii")
    except UnicodeError:
        return False
    return all(letter.isalnum() or letter in "-._" for letter in plain)


def path() -> Path:
    """The login file: ``$RINGFENCE_LOGIN``, else ``ringfence/login.json`` in the configuration folder."""
    if named := os.environ.get(FILE):
        return Path(named)
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(folder) / "ringfence" / "login.json"


def keep(settings: Settings) -> Path:
    """Write the login file, for this user only (0600), whole or not at all; returns its path."""
    import json

    check(settings)
    place = path()
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    value = {"url": settings.url, "key": settings.key} | ({"insecure": True} if settings.insecure else {})
    descriptor = os.open(temporary, flags, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, place)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return place


def forget() -> bool:
    """Remove the login file; whether there was one."""
    try:
        path().unlink()
    except FileNotFoundError:
        return False
    return True


def _insecure() -> bool:
    return os.environ.get("RINGFENCE_INSECURE", "") not in ("", "0")


def _kept() -> dict[str, Any] | None:
    place = path()
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    import json

    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if found.st_mode & 0o077 or found.st_uid not in (os.geteuid(), 0):
            raise InvalidRequest(
                f"{place} holds a key and is open to others", hint=f"chmod 600 {place}, and rotate the key"
            )
        data = file.read(_MOST + 1)
    try:
        value = json.loads(data)
        if len(data) > _MOST or not isinstance(value, dict) or not isinstance(value.get("url"), str):
            raise ValueError
        return value
    except ValueError:
        raise InvalidRequest(f"{place} is no login file", hint="`ringfence login` writes it anew") from None
