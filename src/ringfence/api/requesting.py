"""What a body asks for, as values of the orchestrator: policies, files, volumes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ringfence.api.commands import bytes_of
from ringfence.api.types import Attached, Content, CreateSandbox, UpdateSandbox
from ringfence.control import records
from ringfence.model import policies, quantities
from ringfence.model.errors import InvalidRequest, NotFound
from ringfence.model.policy import Policy
from ringfence.placement.contract import VolumeMount

_MOST_DOCUMENT = 256 * 1024  # bytes of a policy as JSON
_MOST_ENTRIES = 1000  # of one list in it


def policy(given: str | Mapping[str, Any] | None, **single: Any) -> Policy:
    """A preset's name or a policy document, with single values (those that are not ``None``) over it.

    Raises:
        InvalidRequest, PolicyError: what is wrong, by field. Host folders can't be mounted from here: what is
        on the node's disk is nobody's of the service's.
    """
    _bounded(given, single.get("network"))
    if given is None:
        made = Policy()
    elif isinstance(given, str):
        try:
            made = policies.preset(given)
        except NotFound as error:
            raise InvalidRequest(error.message, hint=error.hint) from None
    else:
        document = {"apiVersion": policies.API_VERSION, "kind": "Policy", **given}
        try:
            made = policies.from_dict(document)
        except RecursionError:
            raise InvalidRequest("a policy that is nested too deep") from None
    values = {name: value for name, value in single.items() if value is not None}
    if values:
        made = _override(made, values)
    if made.wall.filesystem.mounts:
        raise InvalidRequest(
            "a service mounts no folders of its hosts",
            hint="send files with the request, or attach a volume",
            field="filesystem.mounts",
        )
    return policies.check(made)


def _bounded(*documents: object) -> None:
    """Judging a policy takes time that belongs to everybody: one of a million rules is nobody's.

    Raises:
        InvalidRequest: too large, or nested too deep.
    """
    left = _MOST_DOCUMENT
    waiting = [document for document in documents if isinstance(document, Mapping)]
    while waiting:
        found: Any = waiting.pop()
        if isinstance(found, Mapping):
            left -= sum(len(str(name)) + 4 for name in found)
            waiting.extend(found.values())
        elif isinstance(found, list | tuple):
            if len(found) > _MOST_ENTRIES:
                raise InvalidRequest(
                    f"a policy with a list of {len(found)} entries", hint=f"at most {_MOST_ENTRIES}"
                )
            waiting.extend(found)
        else:
            left -= len(found) + 4 if isinstance(found, str) else 4
        if left < 0:
            raise InvalidRequest(
                f"a policy of more than {_MOST_DOCUMENT // 1024} KiB", hint="patterns make rules fewer"
            )


def _override(base: Policy, values: dict[str, Any]) -> Policy:
    document = base.to_dict()
    isolation = document.setdefault("isolation", {})
    if "runtime" in values:
        isolation["runtime"] = values["runtime"]
    if "level" in values:
        isolation["minimum"] = values["level"]
    limits = document.setdefault("limits", {})
    for name, key in (("timeout", "timeout"), ("idle", "idle"), ("on_idle", "onIdle")):
        if name in values:
            limits[key] = values[name]
    if "network" in values:
        network = values["network"]
        document["network"] = {"mode": network} if isinstance(network, str) else network
    made = policies.from_dict(document)
    if values.keys() & {"size", "cpus", "memory", "disk"}:
        sizes = {name: quantities.parse_size(values[name]) for name in ("memory", "disk") if name in values}
        resources = policies.resize(made.wall.resources, values.get("size"), values.get("cpus"), **sizes)
        made = made.with_wall(resources=resources)
    return made


def files(given: Mapping[str, str | Content]) -> dict[str, bytes]:
    """Contents by path. Raises InvalidRequest: not base64."""
    return {
        path: content.encode("utf-8", "surrogatepass")
        if isinstance(content, str)
        else bytes_of(content.content, content.encoding)
        for path, content in given.items()
    }


def volumes(given: tuple[Attached, ...]) -> tuple[VolumeMount, ...]:
    """What is attached."""
    return tuple(VolumeMount(each.volume, each.path, each.read_only) for each in given)


def create(body: CreateSandbox, key: str, raw: bytes) -> records.CreateSandbox:
    """The orchestrator's request.

    Raises:
        InvalidRequest, PolicyError.
    """
    made = policy(
        body.policy,
        runtime=body.runtime,
        level=body.level,
        size=body.size,
        cpus=body.cpus,
        memory=body.memory,
        disk=body.disk,
        timeout=body.timeout,
        idle=body.idle,
        on_idle=body.on_idle,
        network=body.network,
    )
    if body.secrets and any("/" in name or name in (".", "..") for name in body.secrets):
        raise InvalidRequest("the name of a secret is that of a file", hint="letters, digits, . _ -")
    return records.CreateSandbox(
        policy=made,
        template=body.template,
        snapshot=body.snapshot,
        env=dict(body.env),
        labels=dict(body.labels),
        secrets={name: value.encode("utf-8", "surrogatepass") for name, value in body.secrets.items()},
        files=files(body.files),
        volumes=volumes(body.volumes),
        pool=body.pool,
        wait=body.wait,
        start_timeout=body.start_timeout,
        idempotency_key=key,
        digest=hashlib.sha256(raw).hexdigest() if key else "",
        agent=body.agent,
        parent_agent=body.parent_agent,
        agent_class=body.agent_class,
        task=body.task,
    )


def changed_door(document: Mapping[str, Any], body: UpdateSandbox) -> Policy | None:
    """The sandbox's policy with the changes of its door; ``None`` if there are none."""
    values = {
        name: getattr(body, name)
        for name in ("timeout", "idle", "on_idle", "network")
        if getattr(body, name) is not None
    }
    if not values:
        return None
    _bounded(values.get("network"))
    base = policies.from_dict(dict(document))
    return policies.check(replace(_override(base, values), wall=base.wall))
