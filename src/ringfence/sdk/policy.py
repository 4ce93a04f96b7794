"""Policies as the SDK's users write them: a preset, a file, or keywords; checked before anything is sent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ringfence.model import policies
from ringfence.model.errors import InvalidRequest

_HEAD = {"apiVersion": policies.API_VERSION, "kind": "Policy"}
_SECTIONS = ("isolation", "filesystem", "process", "resources", "limits", "network", "audit")


class Policy:
    """What a sandbox may do (docs/policy.md has every key).

    >>> Policy(resources={"memory": "256MiB"}, limits={"timeout": "5m"}).to_dict()["resources"]["memory"]
    268435456
    >>> Policy.preset("controlled").name
    'controlled'

    Raises:
        PolicyError: a value is wrong; ``details['field']`` names it.
    """

    def __init__(self, preset: str | None = None, *, name: str = "", **sections: Mapping[str, Any]) -> None:
        for section in sections:
            if section not in _SECTIONS:
                raise InvalidRequest(
                    f"a policy has no section {section!r}", hint=f"sections: {', '.join(_SECTIONS)}"
                )
        document: dict[str, Any] = {key: dict(value) for key, value in sections.items()}
        if preset:
            document["preset"] = preset
        if name:
            document["metadata"] = {"name": name}
        # A preset without changes is sent by name: the service's own meaning of it counts.
        self._preset = preset if preset and not sections and not name else None
        self._policy = (
            policies.preset(preset) if self._preset and preset else policies.from_dict(_HEAD | document)
        )

    @classmethod
    def preset(cls, name: str) -> Policy:
        """A built-in policy: untrusted, controlled or trusted.

        Raises:
            NotFound: there is no such preset.
        """
        policies.preset(name)
        return cls(name)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """A policy file. Raises PolicyError, with file, line and field."""
        return cls._of(policies.load(path))

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Policy:
        """The document of a policy file."""
        return cls._of(policies.from_dict(_HEAD | dict(document)))

    @classmethod
    def _of(cls, policy: Any) -> Policy:
        made = cls.__new__(cls)
        made._policy, made._preset = policy, None
        return made

    @property
    def name(self) -> str:
        """Its name."""
        return self._policy.name or self._preset or ""

    @property
    def digest(self) -> str:
        """Of its wall: sandboxes with the same one may come from the same pool."""
        return str(self._policy.wall.digest())

    def to_dict(self) -> dict[str, Any]:
        """As its file would say it, in plain numbers."""
        return policies.to_dict(self._policy)

    def to_wire(self) -> str | dict[str, Any]:
        """As the service takes it."""
        return self._preset or self.to_dict()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and self._policy == other._policy

    def __hash__(self) -> int:
        return hash(repr(self.to_dict()))

    def __repr__(self) -> str:
        return f"Policy({self.name!r})"
