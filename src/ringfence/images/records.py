"""How templates and layers are written down, and read again."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

from ringfence.images.contract import Layer, TemplateConfig
from ringfence.model.errors import WrongState

LARGEST = 4 << 20  # bytes of a record; more is not one of ours
_LISTS = ("entrypoint", "cmd", "start", "ready")


def config_as_json(config: TemplateConfig) -> dict[str, Any]:
    """JSON-able."""
    return {
        "env": [list(pair) for pair in config.env],
        "user": config.user,
        "uid": config.uid,
        "gid": config.gid,
        "workdir": config.workdir,
        **{name: list(getattr(config, name)) for name in _LISTS},
        "labels": [list(pair) for pair in config.labels],
    }


def config_from_json(value: dict[str, Any]) -> TemplateConfig:
    """The configuration again.

    Raises:
        KeyError, TypeError, ValueError: not one.
    """
    return TemplateConfig(
        env=tuple((str(name), str(text)) for name, text in value["env"]),
        user=value["user"],
        uid=value["uid"],
        gid=value["gid"],
        workdir=value["workdir"],
        labels=tuple((str(name), str(text)) for name, text in value["labels"]),
        **{name: tuple(map(str, value[name])) for name in _LISTS},
    )


def template_digest(layers: tuple[Layer, ...], config: TemplateConfig, architecture: str) -> str:
    """What the template is called: over content only, so it is the same on every machine."""
    import hashlib

    content = {
        "layers": [layer.digest for layer in layers],
        "config": config_as_json(config),
        "architecture": architecture,
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def read(path: Path | str) -> dict[str, Any]:
    """A record.

    Raises:
        FileNotFoundError: there is none.
        WrongState: it is damaged.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(file, "rb") as stream:
        text = stream.read(LARGEST + 1)
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict) or len(text) > LARGEST:
        raise WrongState(
            f"the template store's record {path} is damaged",
            hint="remove the file, and add the template again",
        )
    return value


def write(path: Path | str, value: dict[str, Any], *, aside: Path | str) -> None:
    """Write a record whole or not at all; ``aside`` is a folder of the same file system, the writer's own.

    Raises:
        OSError: the disk is full, or can't be written.
    """
    text = json.dumps(value, separators=(",", ":")).encode("utf-8", "surrogatepass")
    temporary = f"{aside}/record.{secrets.token_hex(8)}"  # threads of one writer share the folder
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(file, "wb") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(os.path.dirname(path))


def sync_folder(path: Path | str) -> None:
    """A name that was made in this folder outlives a loss of power."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
