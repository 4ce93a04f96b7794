"""From a log of what a workload did to the narrowest policy that lets it. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_MOST_PATHS = 6  # of one directory, until it is named as a whole


def propose(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The network part of a policy that allows exactly what these log lines show to have passed.

    Rules are by host and port; where requests were seen, by method and path too (several paths of one
    directory become ``/directory/*``). What lies in a private range is named by its address.
    """
    from ringfence.egress.names import BadHost, address_class, parse_host

    seen: dict[tuple[str, int], dict[str, Any]] = {}
    for line in lines:
        if line.get("decision") != "allowed" or not line.get("host") or line.get("error"):
            continue
        try:
            host = parse_host(str(line["host"]))
            port = int(line["port"])
        except (BadHost, KeyError, ValueError):
            continue
        if host.name == "inference":
            continue
        one = seen.setdefault((str(host), port), {"protocol": set(), "requests": {}, "addresses": set()})
        one["protocol"].add(line.get("protocol"))
        if line.get("method"):
            one["requests"].setdefault(str(line["method"]), set()).add(
                "*" if line.get("path_cut") else str(line.get("path") or "*")
            )
        address = line.get("address")
        if address and host.name:
            found = parse_host(str(address)).address
            if found is not None and address_class(found) is not None:
                one["addresses"].add(str(found))
    rules: list[dict[str, Any]] = []
    for (name, port), one in sorted(seen.items()):
        base: dict[str, Any] = {"host": name, "ports": [port]}
        if "tcp" in one["protocol"]:
            base["protocol"] = "tcp"
        if one["addresses"]:
            base["addresses"] = sorted(one["addresses"])
        by_paths: dict[tuple[str, ...], list[str]] = {}
        if "tcp" not in one["protocol"]:
            for method, paths in sorted(one["requests"].items()):
                by_paths.setdefault(tuple(_narrowed(paths)), []).append(method)
        if not by_paths:
            rules.append(base)
        for paths, methods in sorted(by_paths.items()):
            rules.append(base | {"methods": methods} | ({"paths": list(paths)} if paths else {}))
    return {"mode": "egress" if rules else "none", **({"allow": rules} if rules else {})}


def _narrowed(paths: set[str]) -> list[str]:
    """Each path; those of a directory with many, or one that a policy can't spell, as the directory."""
    if "*" in paths:
        return []
    by_folder: dict[str, set[str]] = {}
    for path in paths:
        by_folder.setdefault(path.rpartition("/")[0] + "/", set()).add(path)
    found: set[str] = set()
    for folder, members in by_folder.items():
        plain = all(not path.endswith("*") and _spelled(path) for path in members)
        if len(members) <= _MOST_PATHS and plain:
            found |= members
        else:
            found.add((folder if _spelled(folder) else "/") + "*")
    whole = sorted(found)
    folders = [path[:-1] for path in whole if path.endswith("*")]
    return [
        path
        for path in whole
        if not any(path.startswith(folder) and path != folder + "*" for folder in folders)
    ]


def _spelled(path: str) -> bool:
    import re

    from ringfence.model.policy_network_checks import _URL_PATH

    return re.fullmatch(_URL_PATH, path) is not None and ".." not in path.split("/")
