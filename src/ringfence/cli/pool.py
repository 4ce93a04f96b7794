"""``ringfence pool``: sandboxes that a service starts ahead."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ringfence.cli import remote
from ringfence.cli.listing import clock
from ringfence.cli.output import print_json, safe, table
from ringfence.cli.parsing import Parser, add_json, add_verbs
from ringfence.model.levels import Level
from ringfence.model.policy import SIZES

if TYPE_CHECKING:
    from ringfence.sdk.service import AsyncService

_NUMBERS = {
    "min": "members ready at least",
    "max": "members ready at most",
    "most": "sandboxes taken from it and alive at once",
    "overflow": "of these, how many may be started on demand because none was ready",
    "queue": "requests that may wait beyond that",
}


def configure(parser: Parser) -> None:
    """Add the verbs."""
    parser.description = (
        "Pools: sandboxes that are started ahead, so that a create takes milliseconds. Each is used once."
    )
    parser.epilog = (
        "examples:\n  ringfence pool create small --min 5 --max 50    # every verb has --json and --help\n"
        "  ringfence sandbox create --pool small\n  ringfence pool queue small\n  ringfence pool rm small"
    )
    add_verbs(parser, "pool", VERBS)


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    remote.need("`ringfence pool`")
    code: int = options.work(options)
    return code


def _numbers(parser: argparse.ArgumentParser) -> None:
    for name, text in _NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=text)
    parser.add_argument("--queue-seconds", type=float, metavar="SECONDS", help="how long they may wait")


def _create_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="how a create names it")
    parser.add_argument("--template", "-t", metavar="NAME", help="root file system (default: host)")
    parser.add_argument("--preset", metavar="NAME", help="built-in policy: untrusted, controlled or trusted")
    parser.add_argument("--policy", metavar="FILE", help="policy file; options given here win over it")
    parser.add_argument("--runtime", metavar="NAME", help="start members with this runtime")
    levels = [level.value for level in Level]
    parser.add_argument("--isolation", choices=levels, metavar="LEVEL", help="the weakest wall that will do")
    parser.add_argument("--size", choices=list(SIZES), metavar="NAME", help="small, medium or large")
    parser.add_argument("--cpus", type=float, metavar="N", help="CPUs of a member")
    parser.add_argument("--memory", metavar="SIZE", help="memory of a member")
    parser.add_argument("--disk", metavar="SIZE", help="disk of a member")
    parser.add_argument("--timeout", metavar="TIME", help="deadline of those that are taken, from then on")
    parser.add_argument("--label", action="append", default=[], metavar="K=V", help="label of the pool")
    _numbers(parser)
    add_json(parser)


def _create(options: argparse.Namespace) -> int:
    from ringfence.model.errors import InvalidRequest
    from ringfence.sdk.policy import Policy
    from ringfence.sdk.pools import AsyncPool

    if options.policy and options.preset:
        raise InvalidRequest("--policy and --preset", hint="one of them, please")
    policy = Policy.load(options.policy) if options.policy else options.preset
    labels = remote.pairs(options.label, "--label")

    async def do(service: AsyncService) -> Any:
        made = await AsyncPool.create(
            options.name, template=options.template, policy=policy, runtime=options.runtime,
            level=options.isolation, size=options.size, cpus=options.cpus, memory=options.memory,
            disk=options.disk, timeout=options.timeout, labels=labels, service=service, **_given(options),
        )  # fmt: skip
        return made.info

    made = remote.with_service(do)
    return remote.say(options, made, made["id"])


def _given(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in (*_NUMBERS, "queue_seconds")}


def _update_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name or id")
    parser.add_argument(
        "--template", "-t", metavar="NAME", help="another root file system: members are replaced"
    )
    _numbers(parser)
    add_json(parser)


def _update(options: argparse.Namespace) -> int:
    from ringfence.sdk.pools import AsyncPool

    async def do(service: AsyncService) -> Any:
        pool = await AsyncPool.get(options.name, service=service)
        return await pool.update(template=options.template, **_given(options))

    changed = remote.with_service(do)
    return remote.say(options, changed, f"changed {changed['id']}")


async def all_pools(service: AsyncService) -> list[dict[str, Any]]:
    """Every pool's record, with its queue."""
    from ringfence.sdk.pools import AsyncPool

    found = []
    async for pool in AsyncPool.list(service=service):
        queue = await pool.queue()
        found.append(
            dict(pool.info)
            | {"queue_now": {
                "waiting": queue.waiting, "oldest_waiting_seconds": queue.oldest_waiting_seconds,
                "warm": queue.warm, "running": queue.running,
            }}
        )  # fmt: skip
    return found


def rows(pools: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    """Pools as lines of a table."""
    return [
        (
            safe(pool["name"]), safe(str(pool.get("template", ""))), f"{pool['min']}-{pool['max']}",
            pool["queue_now"]["warm"], pool["queue_now"]["running"], pool["queue_now"]["waiting"],
            f"{pool['queue_now']['oldest_waiting_seconds']:.1f} s" if pool["queue_now"]["waiting"] else "",
        )
        for pool in pools
    ]  # fmt: skip


HEADERS = ("pool", "template", "size", "ready", "running", "waiting", "for")


def _ls(options: argparse.Namespace) -> int:
    found = remote.with_service(all_pools)
    if options.json:
        print_json({"pools": found})
    elif not found:
        print("there are no pools")
    else:
        table(HEADERS, rows(found))
    return 0


def _one(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name or id")
    add_json(parser)


def _show(options: argparse.Namespace) -> int:
    from ringfence.sdk.pools import AsyncPool

    async def do(service: AsyncService) -> Any:
        return (await AsyncPool.get(options.name, service=service)).info

    found = remote.with_service(do)
    if options.json:
        print_json(found)
        return 0
    for name, value in found.items():
        if name == "policy" or value in (None, "", {}, []):
            continue
        if name.endswith("_at"):
            value = clock(value)
        elif isinstance(value, dict):
            value = ", ".join(f"{key}={part}" for key, part in value.items())
        elif isinstance(value, float):
            value = f"{value:g}"
        print(f"{name:<16} {safe(str(value))}")
    return 0


def _queue(options: argparse.Namespace) -> int:
    from ringfence.sdk.pools import AsyncPool

    async def do(service: AsyncService) -> Any:
        return await (await AsyncPool.get(options.name, service=service)).queue()

    found = remote.with_service(do)
    waiting = f"{found.waiting} waiting (longest {found.oldest_waiting_seconds:.1f} s)"
    text = f"{waiting}, {found.warm} ready, {found.running} running"
    return remote.say(options, found, text)


def _rm(options: argparse.Namespace) -> int:
    from ringfence.sdk.pools import AsyncPool

    async def do(service: AsyncService) -> None:
        await (await AsyncPool.get(options.name, service=service)).delete()

    remote.with_service(do)
    return remote.say(options, {"removed": options.name}, f"removed {safe(options.name)}")


VERBS = {
    "create": (
        "make a pool; its members are started in the background",
        _create_options,
        _create,
        ("create small --size small --min 5 --max 50", "create agents -t python --isolation L3 --min 2"),
    ),
    "ls": ("list pools, and how busy they are", add_json, _ls, ("ls", "ls --json | jq '.pools[].queue_now'")),
    "show": ("show a pool", _one, _show, ("show small",)),
    "set": (
        "change a pool's numbers or template",
        _update_options,
        _update,
        ("set small --min 10 --max 100",),
    ),
    "queue": ("who waits for a pool; autoscalers read its --json", _one, _queue, ("queue small --json",)),
    "rm": ("remove a pool and its members; what was taken from it lives on", _one, _rm, ("rm small",)),
}
