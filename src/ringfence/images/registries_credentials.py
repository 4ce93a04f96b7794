"""Credentials for registries, from the files and helpers that ``docker login`` and ``podman login`` use.

A helper is a program ``docker-credential-NAME``: it gets a registry on its stdin and answers in JSON. Nothing
that it or a file says is ever printed.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from ringfence.model.errors import InvalidRequest

LARGEST = 1 << 20
HELPER_TIME = 30.0  # seconds that a helper may take: it may ask a password manager
_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io", "https://index.docker.io/v1/")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)
_TOKEN = "<token>"  # noqa: S105 - a helper's word for: the secret is an identity token
_HELPER_ENV = ("PATH", "HOME", "USER", "LOGNAME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME",
               "DBUS_SESSION_BUS_ADDRESS", "GNUPGHOME", "PASSWORD_STORE_DIR", "LANG", "LC_ALL")  # fmt: skip


def find(registry: str, file: str = "") -> dict[str, str] | None:
    """The entry of an ``auths`` for a registry; None if there are no credentials.

    Args:
        registry: with its port.
        file: in the form of Docker's ``config.json``; by default Docker's and podman's own files, in which
            the first that has something counts.

    Raises:
        InvalidRequest: a file or a helper's answer makes no sense, or a helper is missing or fails.
    """
    for path in (file,) if file else default_files():
        config = _read(path, needed=bool(file))
        found = _in(config, registry, path)
        if found is not None:
            return found
    return None


def default_files() -> tuple[str, ...]:
    """Where logins are kept on this machine, for this user; the first one counts most."""
    home = os.path.expanduser("~")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    found = [os.environ.get("REGISTRY_AUTH_FILE", "")]
    if runtime:
        found.append(f"{runtime}/containers/auth.json")
    found.append(f"{os.environ.get('XDG_CONFIG_HOME') or home + '/.config'}/containers/auth.json")
    found.append(f"{os.environ.get('DOCKER_CONFIG') or home + '/.docker'}/config.json")
    return tuple(path for path in found if path)


def _in(config: dict[str, Any], registry: str, path: str) -> dict[str, str] | None:
    helpers = _mapping(config, "credHelpers", path)
    for key in _keys(registry):
        if key in helpers:
            return _ask(helpers[key], _server(registry), path)
    auths = _mapping(config, "auths", path)
    entry = next(
        (auths[key] for key in auths for wanted in _keys(registry) if _host(str(key)) == _host(wanted)), None
    )
    if isinstance(entry, dict) and (entry.get("auth") or entry.get("identitytoken") or entry.get("username")):
        return _entry(entry, path)
    store = config.get("credsStore")
    if store:
        return _ask(store, _server(registry), path)
    return None


def _entry(entry: dict[str, Any], path: str) -> dict[str, str]:
    token, auth = entry.get("identitytoken"), entry.get("auth")
    if not auth and isinstance(entry.get("username"), str) and isinstance(entry.get("password"), str):
        auth = base64.b64encode(f"{entry['username']}:{entry['password']}".encode()).decode()
    try:
        if auth and b":" not in base64.b64decode(str(auth), validate=True):
            raise ValueError
    except (binascii.Error, ValueError):
        raise InvalidRequest(
            f"{path}: an entry of auths makes no sense", hint="log in again: docker login, or skopeo login"
        ) from None
    found = {"auth": str(auth or base64.b64encode(b"token:").decode())}
    if isinstance(token, str) and token:
        found["identitytoken"] = token
    return found


def _ask(name: Any, server: str, path: str) -> dict[str, str] | None:
    """Ask a helper. What it says is never part of a message: it may be a secret."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(f"{path}: a credential helper with an impossible name")
    program = shutil.which(f"docker-credential-{name}")
    if program is None:
        raise InvalidRequest(
            f"{path} names the credential helper docker-credential-{name}, which is not here",
            hint="install it, or name another file with --authfile",
        )
    try:
        done = subprocess.run(
            [program, "get"],
            input=server.encode(),
            capture_output=True,
            timeout=HELPER_TIME,
            env={key: os.environ[key] for key in _HELPER_ENV if key in os.environ},
        )
    except subprocess.TimeoutExpired:
        raise InvalidRequest(
            f"the credential helper docker-credential-{name} did not answer within {HELPER_TIME:.0f} seconds"
        ) from None
    except OSError as error:
        raise InvalidRequest(
            f"the credential helper docker-credential-{name} can't be run: {error.strerror}"
        ) from None
    if done.returncode:
        if b"credentials not found" in done.stdout.lower() + done.stderr.lower():
            return None
        raise InvalidRequest(
            f"the credential helper docker-credential-{name} failed with {done.returncode}",
            hint=f"try it: echo {server} | docker-credential-{name} get",
        )
    try:
        if len(done.stdout) > LARGEST:
            raise ValueError
        value = json.loads(done.stdout)
        user, secret = value["Username"], value["Secret"]
        if not isinstance(user, str) or not isinstance(secret, str):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InvalidRequest(f"the answer of docker-credential-{name} makes no sense") from None
    if user == _TOKEN:
        return {"auth": base64.b64encode(b"token:").decode(), "identitytoken": secret}
    return {"auth": base64.b64encode(f"{user}:{secret}".encode()).decode()}


def _keys(registry: str) -> tuple[str, ...]:
    return _HUB if registry in _HUB else (registry, f"https://{registry}", f"http://{registry}")


def _server(registry: str) -> str:
    return _HUB[-1] if registry in _HUB else registry


def _host(key: str) -> str:
    return re.sub(r"^https?://", "", key).partition("/")[0]


def _mapping(config: dict[str, Any], key: str, path: str) -> dict[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path}: {key} makes no sense")
    return value


def _read(path: str, *, needed: bool) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        if not needed and isinstance(error, FileNotFoundError | NotADirectoryError):
            return {}
        raise InvalidRequest(f"credentials: {path} can't be read: {error.strerror}") from None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or len(data) > LARGEST:
        raise InvalidRequest(f"credentials: {path} is not what `docker login` writes", hint="log in again")
    return value
