"""Policies and owners as they come over the wire. Policies are kept: a pool's members all have the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from ringfence.model import policies
from ringfence.model.errors import InvalidRequest
from ringfence.model.policy import Policy
from ringfence.model.sandbox import Owner
from ringfence.placement.values import dumps

MOST = 256
_known: OrderedDict[str, Policy] = OrderedDict()


def policy_of(value: Mapping[str, Any]) -> Policy:
    """The policy that ``Policy.to_dict`` gave.

    Raises:
        PolicyError: it says something wrong.
    """
    key = dumps(value)
    found = _known.get(key)
    if found is None:
        found = policies.from_dict(dict(value)) if value else Policy()
        _known[key] = found
        if len(_known) > MOST:
            _known.popitem(last=False)
    else:
        _known.move_to_end(key)
    return found


def same_wall(stands: Policy, wanted: Policy) -> Policy:
    """The wanted policy, if the wall that stands is its.

    Raises:
        InvalidRequest: it is not, or the network's mode is another.
    """
    if wanted.wall != stands.wall and wanted.wall.digest() != stands.wall.digest():
        raise InvalidRequest(
            "the policy has another wall than the one that stands", hint="start another sandbox for it"
        )
    if wanted.door.network.mode != stands.door.network.mode:
        raise InvalidRequest(
            f"the network mode is {stands.door.network.mode} since the start", hint="start another sandbox"
        )
    return wanted


def owner_of(value: Mapping[str, Any]) -> Owner:
    """The owner that a mapping names.

    Raises:
        InvalidRequest: it names something that owners don't have.
    """
    try:
        return Owner(**value)
    except TypeError:
        raise InvalidRequest(f"an owner has no {', '.join(sorted(value))}") from None
