"""Policies by their content: those of a pool's members are all the same, and reading one costs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from ringfence.model import policies
from ringfence.model.policy import Policy
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
