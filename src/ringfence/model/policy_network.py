"""The ``network`` part of a policy file: its keys, read and written.

The rest of the file is read by ``policy_file``; what no network part may say is in ``policy_network_checks``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ringfence.model.errors import InvalidRequest
from ringfence.model.policy import Budget, Inference, Network, NetworkRule
from ringfence.model.policy_network_checks import INJECTIONS, SECRET
from ringfence.model.policy_reader import Field, Reader, one_of, values_of
from ringfence.model.yaml_marks import Node


def _ports(reader: Reader, node: Node, field: str) -> tuple[int, ...]:
    return tuple(reader.integer(*item) for item in reader.items(node, field, "[443]"))


def _some(reader: Reader, node: Node, field: str) -> tuple[str, ...]:
    """A list that narrows a rule. An empty one would narrow nothing, which nobody means."""
    found = reader.texts(node, field)
    if not found:
        raise reader.error(field, "is empty", "leave it out to allow all, or name some")
    return found


def _upper(reader: Reader, node: Node, field: str) -> tuple[str, ...]:
    return tuple(method.upper() for method in _some(reader, node, field))


def _inject(reader: Reader, node: Node, field: str) -> dict[str, str]:
    known = tuple(dict.fromkeys(key for keys in INJECTIONS.values() for key in keys))
    parts = reader.mapping(node, field, known)
    return {key: reader.text(part, f"{field}.{key}") for key, part in parts.items()}


def _host(reader: Reader, node: Node, field: str) -> str:
    return reader.text(node, field).lower()


def _requests(reader: Reader, node: Node, field: str) -> float:
    """Requests a second, from ``10/s``, ``600/m``, ``1000/h`` or a number."""
    if isinstance(node.value, str):
        count, slash, unit = node.value.partition("/")
        seconds = {"s": 1, "m": 60, "h": 3600, "d": 86400}.get(unit.strip())
        try:
            if slash and seconds is not None:
                return float(count) / seconds
        except ValueError:
            pass
        raise reader.error(
            field, f"{node.value[:30]!r} is not a rate of requests", "write e.g. 10/s or 600/m"
        )
    return reader.number(node, field)


def _budget(reader: Reader, node: Node, field: str) -> Budget:
    return Budget(**values_of(reader, node, field, _BUDGET))


def _inference(reader: Reader, node: Node, field: str) -> Inference:
    values = values_of(reader, node, field, _INFERENCE)
    if "upstream" not in values:
        raise reader.error(f"{field}.upstream", "missing", "write the URL of the model API")
    return Inference(**values)


def _rules(reader: Reader, node: Node, field: str) -> tuple[NetworkRule, ...]:
    rules = []
    for part, place in reader.items(node, field, "[{host: api.example.com, ports: [443]}]"):
        values = values_of(reader, part, place, _RULE)
        if "host" not in values:
            raise reader.error(f"{place}.host", "missing", "a rule names one host, or *.domain")
        rules.append(NetworkRule(**values))
    return tuple(rules)


_RECORD = one_of("none", "metadata", "headers", "bodies")
_BUDGET: dict[str, Field] = {
    "rate": ("rate", _requests),
    "maxRequests": ("max_requests", Reader.integer),
    "maxBytes": ("max_bytes", Reader.size),
    "maxSpend": ("max_spend", Reader.number),
    "price": ("price", Reader.number),
    "tokenPrice": ("token_price", Reader.number),
    "pause": ("pause", Reader.boolean),
}
_RULE: dict[str, Field] = {
    "host": ("host", _host),
    "ports": ("ports", _ports),
    "methods": ("methods", _upper),
    "paths": ("paths", _some),
    "inject": ("inject", _inject),
    "protocol": ("protocol", one_of("http", "tls", "tcp")),
    "tls": ("tls", one_of("pass", "inspect")),
    "addresses": ("addresses", _some),
    "budget": ("budget", _budget),
    "record": ("record", _RECORD),
}
_INFERENCE: dict[str, Field] = {
    "upstream": ("upstream", Reader.text),
    "inject": ("inject", _inject),
    "models": ("models", _some),
    "paths": ("paths", _some),
    "mask": ("mask", _some),
    "addresses": ("addresses", _some),
    "budget": ("budget", _budget),
}
_NETWORK: dict[str, Field] = {
    "mode": ("mode", one_of("none", "egress", "open")),
    "allow": ("allow", _rules),
    "record": ("record", _RECORD),
    "onUnknown": ("on_unknown", one_of("deny", "ask")),
    "askTimeout": ("ask_timeout", Reader.duration),
    "learn": ("learn", Reader.boolean),
    "redact": ("redact", Reader.texts),
    "budget": ("budget", _budget),
    "inference": ("inference", _inference),
    "connections": ("connections", Reader.integer),
    "connectTimeout": ("connect_timeout", Reader.duration),
    "idleTimeout": ("idle_timeout", Reader.duration),
    "totalTimeout": ("total_timeout", Reader.duration),
}
_ALWAYS = ("mode", "allow", "record", "host", "ports", "upstream")


def written(value: Any, fields: dict[str, Field], unset: Any) -> dict[str, Any]:
    """Keys and values as the file says them: those that are always written, and those that are set."""
    result: dict[str, Any] = {}
    for key, (name, _) in fields.items():
        part = getattr(value, name)
        if (name not in _ALWAYS or (name == "record" and isinstance(value, NetworkRule))) and part == getattr(
            unset, name
        ):
            continue
        if isinstance(part, Budget):
            part = written(part, _BUDGET, Budget())
        elif isinstance(part, Inference):
            part = written(part, _INFERENCE, Inference(""))
        elif isinstance(part, dict):
            part = dict(part)
        elif isinstance(part, tuple):
            part = [
                written(one, _RULE, NetworkRule("")) if isinstance(one, NetworkRule) else one for one in part
            ]
        result[key] = part
    return result


def to_dict(network: Network) -> dict[str, Any]:
    """The part as its file would say it; JSON-able."""
    return written(network, _NETWORK, Network())


def variables(network: Network) -> dict[str, str]:
    """The variables that programs find placeholders in, each with the name of its secret."""
    injected = [rule.inject for rule in network.allow]
    if network.inference is not None:
        injected.append(network.inference.inject)
    found = {}
    for inject in injected:
        if inject is not None and "env" in inject and (match := re.search(SECRET, inject["placeholder"])):
            found[inject["env"]] = match[1]
    return found if network.mode == "egress" else {}


def check_free(variables: Iterable[str], env: Iterable[str]) -> None:
    """No variable has both a placeholder and a value of the caller's, which might be the secret itself.

    Raises:
        InvalidRequest: one has.
    """
    both = sorted(set(variables) & set(env))
    if both:
        raise InvalidRequest(
            f"the environment variable {both[0]} is the policy's: a placeholder of a secret",
            hint="leave it out, or name another one in the rule's inject.env",
        )
