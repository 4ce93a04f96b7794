"""What crosses the connection, as JSON: specs, sandboxes, errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ringfence.model.errors import InvalidRequest, RingfenceError
from ringfence.placement.contract import Placed, PlacedSpec, VolumeMount

VERSION = 1
dumps = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def encode(value: Any) -> bytes:
    """JSON bytes. Surrogates (names of files that are not UTF-8) survive."""
    return dumps(value).encode("utf-8", "surrogatepass")


def decode(data: bytes) -> Any:
    """The value again.

    Raises:
        InvalidRequest: not JSON.
    """
    try:
        return json.loads(data.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"not JSON: {error}") from None


def spec_as_json(spec: PlacedSpec) -> dict[str, Any]:
    """A spec as it is sent."""
    value = {field.name: getattr(spec, field.name) for field in fields(spec)}
    value["volumes"] = [[each.volume, each.path, each.read_only] for each in spec.volumes]
    return value


def spec_from_json(value: Mapping[str, Any]) -> PlacedSpec:
    """A spec as it came, every type looked at.

    Raises:
        InvalidRequest: it is not one; the message names the field.
    """
    known = {field.name for field in fields(PlacedSpec)}
    for name in value:
        if name not in known:
            raise InvalidRequest(f"a sandbox has no {name!r}")
    given = dict(value)
    for name, kinds in _TYPES.items():
        if name in given and not isinstance(given[name], kinds):
            raise InvalidRequest(f"{name} is a {type(given[name]).__name__}")
    for name in ("env", "labels"):
        texts(given.get(name, {}), name)
    texts({key: each for key, each in given.get("owner", {}).items() if each is not None}, "owner")
    try:
        volumes = tuple(
            VolumeMount(str(volume), str(path), bool(ro)) for volume, path, ro in given.pop("volumes", ())
        )
        return PlacedSpec(**given, volumes=volumes)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"not a sandbox: {error}") from None


_TYPES: dict[str, tuple[type, ...]] = {
    "id": (str,), "policy": (dict,), "template": (str,), "owner": (dict,), "env": (dict,), "labels": (dict,),
    "volumes": (list,), "snapshot": (str,), "secrets": (bool,), "deadline": (int, float, type(None)),
    "hold": (bool,),
}  # fmt: skip


def texts(value: Any, name: str) -> dict[str, str]:
    """A mapping of texts to texts.

    Raises:
        InvalidRequest: it is not.
    """
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise InvalidRequest(f"{name} is not a mapping of texts")
    for key, text in value.items():
        if not (key.isascii() and text.isascii()):
            try:
                (key + text).encode()
            except UnicodeEncodeError:
                raise InvalidRequest(f"{name}: half a character in {key!r}") from None
    return value


def placed_as_json(placed: Placed) -> dict[str, Any]:
    """A sandbox as it is sent."""
    return {field.name: getattr(placed, field.name) for field in fields(placed)}


def placed_from_json(value: Mapping[str, Any]) -> Placed:
    """A sandbox as it came."""
    return Placed(**value)


def error_as_json(error: RingfenceError) -> dict[str, Any]:
    """An error as it is sent; what is not JSON in its details becomes text."""
    return json.loads(json.dumps(error.as_dict(), default=str))  # type: ignore[no-any-return]
