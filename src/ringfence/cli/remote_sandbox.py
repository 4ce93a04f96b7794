"""Sandboxes of a service: create, list, show, and everything of their lives."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ringfence.cli import remote
from ringfence.cli.listing import clock
from ringfence.cli.output import note, print_json, safe, table

if TYPE_CHECKING:
    from ringfence.sdk.results import SandboxInfo
    from ringfence.sdk.sandbox import AsyncSandbox
    from ringfence.sdk.service import AsyncService

_ENDED = ("stopped", "failed")


def create(options: argparse.Namespace) -> int:
    """``ringfence sandbox create``."""
    from ringfence.sdk.sandbox import AsyncSandbox

    asked = _asked(options)

    async def do(service: AsyncService) -> SandboxInfo:
        sandbox = await AsyncSandbox.create(**asked, service=service)
        info = sandbox.info
        await sandbox.close()
        return info

    info = remote.with_service(do)
    if not options.json and info.final:
        note(f"it is {info.state}: {info.cause} {safe(info.detail)}".rstrip(": "))
    return remote.say(options, info.raw, info.id)


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``AsyncSandbox.create``."""
    from ringfence.model.errors import InvalidRequest
    from ringfence.sdk.policy import Policy

    policy: Any = options.preset
    if options.policy:
        policy = Policy.load(options.policy)
    if options.policy and options.preset:
        raise InvalidRequest("--policy and --preset", hint="one of them, please")
    files = {}
    for text in options.file:
        local, _, inside = text.rpartition(":") if ":" in text else (text, "", "")
        try:
            with open(local, "rb") as file:
                files[inside or local.rstrip("/").rpartition("/")[2]] = file.read()
        except OSError as error:
            raise InvalidRequest(
                f"--file {local}: {error.strerror}", hint="folders go in with `ringfence sandbox cp`"
            ) from None
    volumes = []
    for text in options.volume:
        volume, path, *mode = text.split(":")[:3] if text.count(":") <= 2 else ("", "")
        if not volume or not path.startswith("/") or mode not in ([], ["ro"], ["rw"]):
            raise InvalidRequest(f"--volume {text!r}", hint="NAME:/path/inside, :ro for read-only")
        volumes.append({"volume": volume, "path": path, "read_only": mode == ["ro"]})
    return {
        "template": options.template,
        "policy": policy,
        "runtime": options.runtime,
        "level": options.isolation,
        "pool": options.pool,
        "snapshot": options.snapshot,
        "size": options.size,
        "cpus": options.cpus,
        "memory": options.memory,
        "disk": options.disk,
        "network": options.net,
        "env": remote.environment(options.env),
        "secrets": {name: _secret(value) for name, value in remote.pairs(options.secret, "--secret").items()},
        "files": files,
        "labels": remote.pairs(options.label, "--label"),
        "volumes": volumes,
        "timeout": options.timeout,
        "idle": options.idle,
        "on_idle": options.on_idle,
        "name": options.name,
        "task": options.task,
        "agent": options.agent,
        "wait": not options.no_wait,
        "start_timeout": options.start_timeout,
        "idempotency_key": options.idempotency_key,
    }


def _secret(value: str) -> str:
    """A secret's value: as given, or ``@FILE``: what stands there, so that it is in no process list."""
    if not value.startswith("@"):
        return value
    from ringfence.model.errors import InvalidRequest

    try:
        with open(value[1:], encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--secret: {value[1:]}: {getattr(error, 'strerror', error)}") from None


def ls(options: argparse.Namespace) -> int:
    """``ringfence sandbox ls``."""
    from ringfence.sdk.sandbox import AsyncSandbox

    labels = remote.pairs(options.label, "--label")

    async def do(service: AsyncService) -> list[SandboxInfo]:
        found = AsyncSandbox.list(labels=labels, states=options.state, newest_first=True, service=service)
        return [info async for info in found if options.all or options.state or not info.final]

    found = remote.with_service(do)
    if options.json:
        print_json({"sandboxes": [info.raw for info in found]})
    elif not found:
        print("no sandboxes live" + ("" if options.all else "; `--all` shows those that have ended too"))
    else:
        rows = [
            (
                info.id, info.runtime, info.state + (f" ({info.cause})" if info.cause else ""),
                safe(info.labels.get("name", "")), clock(info.created_at),
                clock(info.deadline) if info.deadline else "",
            )
            for info in found
        ]  # fmt: skip
        table(("id", "runtime", "state", "name", "created", "deadline"), rows)
    return 0


def show(options: argparse.Namespace) -> int:
    """``ringfence sandbox show``."""
    from ringfence.model.errors import RingfenceError

    async def do(sandbox: AsyncSandbox) -> dict[str, Any]:
        found = dict(sandbox.info.raw)
        if sandbox.state == "running":
            try:
                found["boundary"] = dict(await sandbox.boundary())
                found["metrics"] = dict(await sandbox.metrics())
                found["processes"] = [_process(each) for each in await sandbox.processes()]
            except RingfenceError as error:
                note(f"{error.message}")
        return found

    found = remote.with_sandbox(options.id, do)
    if options.json:
        print_json(found)
        return 0
    boundary, usage = found.get("boundary") or {}, (found.get("metrics") or {}).get("usage", {})
    wall = f"{boundary.get('level', '?')} ({boundary.get('boundary', '?')}), {boundary.get('kernel', '?')}"
    lines = [
        f"{found['id']}  {found['state']}  {safe(found['labels'].get('name', ''))}".rstrip(),
        f"  runtime    {found.get('runtime') or 'none yet'}" + (f", {wall}" if boundary else ""),
        f"  created    {clock(found['created_at'])}"
        + (f", deadline {clock(found['deadline'])}" if found.get("deadline") else ""),
        f"  template   {safe(str(found.get('template')))}",
    ]
    if found.get("cause"):
        lines.append(f"  ended      {found['cause']} {safe(str(found.get('detail') or ''))}".rstrip())
    if usage:
        cpu, peak = usage.get("cpu_seconds") or 0, int(usage.get("memory_peak") or 0) >> 20
        lines.append(f"  used       {cpu:.2f} s of CPU, {peak} MiB at most")
    for each in found.get("processes", ()):
        if each["state"] == "running":
            lines.append(f"  command    {safe(each['id'])}  {safe(each['command'])}")
    print("\n".join(lines))
    return 0


def _process(found: Any) -> dict[str, Any]:
    return {"id": found.id, "state": found.state, "command": found.command, "exit_code": found.exit_code}


def logs(options: argparse.Namespace) -> int:
    """``ringfence sandbox logs``."""
    import json

    async def do(sandbox: AsyncSandbox) -> None:
        async for entry in sandbox.logs(follow=options.follow):
            if options.json:
                print_json({"at": entry.at, "name": entry.name, "data": entry.data, "number": entry.number})
            else:
                data = safe(json.dumps(dict(entry.data))) if entry.data else ""
                print(f"{clock(entry.at)}  {safe(entry.name)}  {data}".rstrip(), flush=True)

    remote.with_sandbox(options.id, do)
    return 0


def changes(options: argparse.Namespace) -> int:
    """``ringfence sandbox changes``."""

    async def do(sandbox: AsyncSandbox) -> list[Any]:
        return list(await sandbox.changes())

    found = remote.with_sandbox(options.id, do)
    if options.json:
        print_json({"changes": found})
    for each in found if not options.json else ():
        size = f"{each.size:>10}" if each.type == "file" and each.kind != "deleted" else " " * 10
        print(f"{each.kind[:1].upper()} {size} {safe(each.path)}")
    return 0


def snapshot(options: argparse.Namespace) -> int:
    """``ringfence sandbox snapshot``."""

    async def do(sandbox: AsyncSandbox) -> Any:
        return await sandbox.snapshot(options.name, kind=options.kind)

    made = remote.with_sandbox(options.id, do)
    return remote.say(options, made, made.id or made.name)


def fork(options: argparse.Namespace) -> int:
    """``ringfence sandbox fork``."""

    async def do(sandbox: AsyncSandbox) -> list[str]:
        made = await sandbox.fork(options.count)
        for copy in made:
            await copy.close()
        return [copy.id for copy in made]

    copies = remote.with_sandbox(options.id, do)
    return remote.say(options, {"id": options.id, "copies": copies}, "\n".join(copies))


def restore(options: argparse.Namespace) -> int:
    """``ringfence sandbox restore``: a new one from a snapshot."""
    from ringfence.sdk.sandbox import AsyncSandbox

    async def do(service: AsyncService) -> str:
        sandbox = await AsyncSandbox.create(snapshot=options.snapshot, name=options.name, service=service)
        await sandbox.close()
        return sandbox.id

    name = remote.with_service(do)
    return remote.say(options, {"id": name, "snapshot": options.snapshot}, name)


def pause(options: argparse.Namespace) -> int:
    """``ringfence sandbox pause``."""
    return _simple(options, "pause", "paused")


def resume(options: argparse.Namespace) -> int:
    """``ringfence sandbox resume``."""
    return _simple(options, "resume", "resumed")


def reset(options: argparse.Namespace) -> int:
    """``ringfence sandbox reset``."""
    return _simple(options, "reset", "reset")


def _simple(options: argparse.Namespace, method: str, done: str) -> int:
    async def do(sandbox: AsyncSandbox) -> SandboxInfo:
        info: SandboxInfo = await getattr(sandbox, method)()
        return info

    info = remote.with_sandbox(options.id, do)
    return remote.say(options, {"id": info.id, "state": info.state}, f"{done} {info.id}")


def extend(options: argparse.Namespace) -> int:
    """``ringfence sandbox extend``."""
    from ringfence.model.quantities import parse_duration

    seconds = parse_duration(options.time)

    async def do(sandbox: AsyncSandbox) -> SandboxInfo:
        return await sandbox.extend(seconds)

    info = remote.with_sandbox(options.id, do)
    text = f"{info.id} ends {clock(info.deadline)}" if info.deadline else info.id
    return remote.say(options, {"id": info.id, "deadline": info.deadline}, text)


def wait(options: argparse.Namespace) -> int:
    """``ringfence sandbox wait``: 0 when it is in the state, 1 when it has ended in another."""
    from ringfence.model.errors import WrongState
    from ringfence.model.quantities import parse_duration

    states = options.state or ["running"]
    timeout = parse_duration(options.timeout)

    async def do(sandbox: AsyncSandbox) -> tuple[SandboxInfo, int]:
        try:
            return await sandbox.wait(*states, timeout=timeout), 0
        except WrongState:
            return sandbox.info, 1

    info, code = remote.with_sandbox(options.id, do)
    remote.say(options, info.raw, f"{info.id} is {info.state}" + (f" ({info.cause})" if info.cause else ""))
    return code


def kill(options: argparse.Namespace) -> int:
    """``ringfence sandbox kill`` and ``rm``."""
    import asyncio

    from ringfence.model.errors import InvalidRequest
    from ringfence.model.quantities import parse_duration
    from ringfence.sdk.sandbox import AsyncSandbox

    if bool(options.ids) == options.all:
        raise InvalidRequest("name sandboxes, or --all", hint="see `ringfence sandbox ls`")
    grace = parse_duration(options.grace)

    async def do(service: AsyncService) -> list[str]:
        if options.all:
            names = [info.id async for info in AsyncSandbox.list(service=service) if not info.final]
            sandboxes = [await AsyncSandbox.connect(name, service=service) for name in names]
        else:
            # All are looked up before the first is touched: a wrong id ends nothing.
            sandboxes = [await remote.find(service, name) for name in dict.fromkeys(options.ids)]
        await asyncio.gather(*(sandbox.kill(grace=grace) for sandbox in sandboxes))
        return [sandbox.id for sandbox in sandboxes]

    stopped = remote.with_service(do)
    return remote.say(options, {"stopped": stopped}, "\n".join(f"stopped {name}" for name in stopped))
