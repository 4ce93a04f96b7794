"""From the options of ``ringfence run`` to the request for a sandbox, each value checked by name."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringfence.model.errors import InvalidRequest
from ringfence.model.levels import Level
from ringfence.model.policy import LEAST_MEMORY, MOST_GPUS, Mount, Network, Policy, Resources
from ringfence.model.quantities import format_size, parse_duration, parse_size
from ringfence.model.sandbox import Owner, SandboxRequest
from ringfence.model.values import dataclass

if TYPE_CHECKING:
    import argparse


@dataclass(frozen=True, slots=True)
class Transfer:
    """One copy in or out. ``local`` is a path here, ``inside`` one in the sandbox (may be relative)."""

    local: str
    inside: str


def request(options: argparse.Namespace) -> SandboxRequest:
    """The sandbox that the options ask for.

    Raises:
        InvalidRequest: an option's value can't be right; the message names the option.
        PolicyError: the policy file is wrong; names file, line and field.
        DangerousMount: a mount is refused.
    """
    return SandboxRequest(
        policy=policy(options),
        owner=Owner(
            user=_user_name(),
            agent=options.agent,
            parent_agent=options.parent_agent,
            agent_class=options.agent_class,
            task=options.task,
        ),
        env=environment(options),
        labels=labels(options),
        keep=options.keep,
        template=options.template or "host",
    )


def policy(options: argparse.Namespace) -> Policy:
    """Preset or file, then what the options override."""
    base = _base_policy(options)
    wall, door = base.wall, base.door
    isolation = wall.isolation
    if options.runtime:
        isolation = replace(isolation, runtime=options.runtime)
        if not (options.isolation or options.policy or options.preset):
            # Whoever names a runtime has seen its level; a minimum that was asked for still holds.
            isolation = replace(isolation, minimum=Level.L1)
    if options.isolation:
        isolation = replace(isolation, minimum=Level(options.isolation))
    process = _given(
        wall.process,
        user=_user(options.user),
        max_processes=_count("--pids", options.pids),
        cpu_time=_time("--cpu-time", options.cpu_time),
    )
    filesystem = wall.filesystem
    if options.readonly:
        filesystem = replace(filesystem, root="readonly")
    if options.mount or filesystem.mounts:
        filesystem = replace(filesystem, mounts=mounts(options, filesystem.mounts))
    limits = _given(
        door.limits, timeout=_time("--timeout", options.timeout), output=_size("--output", options.output)
    )
    network = _network(options, door.network)
    result = replace(
        base,
        wall=replace(
            wall,
            isolation=isolation,
            process=process,
            filesystem=filesystem,
            resources=_resources(options, base),
        ),
        door=replace(door, limits=limits, network=network),
    )
    if result is not base and (options.policy or options.preset or options.allow):
        from ringfence.model.policies import check

        check(result)  # an option may break what the file's trust promises
    return result


def _network(options: argparse.Namespace, base: Network) -> Network:
    """``--net``, and what ``--allow`` adds to the policy's own rules."""
    if not options.allow:
        network: Network = _given(base, mode=options.net)
        return network
    from ringfence.cli.allowing import rule

    if (options.net or "egress") != "egress":
        raise InvalidRequest(
            f"--allow and --net {options.net} exclude each other", hint="write --net egress --allow HOST"
        )
    if base.mode == "open" and options.net is None:
        raise InvalidRequest("--allow: the policy's network is open", hint="add --net egress to close it")
    return replace(base, mode="egress", allow=(*base.allow, *map(rule, options.allow)))


def warnings(options: argparse.Namespace, made: Policy) -> list[str]:
    """What the policy allows and should be thought about; asked for where somebody wrote one."""
    if not (options.policy or options.preset):
        return []
    from ringfence.model import policies

    return list(policies.warnings(made))


def mounts(options: argparse.Namespace, base: tuple[Mount, ...]) -> tuple[Mount, ...]:
    """The policy's mounts and those of ``--mount``, judged: each source as it was resolved then.

    Raises:
        InvalidRequest: not of the form, or the source can't be read.
        DangerousMount: it would hand over the host, and ``--allow-dangerous-mount`` does not name it.
    """
    if not options.mount and not base:
        return ()
    from ringfence.model.policies import check_mounts, parse_mount

    wanted = [parse_mount(_expanded(text)) for text in options.mount]
    allowed = [os.path.expanduser(path) for path in options.allow_dangerous_mount]
    return check_mounts((*base, *wanted), allowed)


def environment(options: argparse.Namespace) -> dict[str, str]:
    """``--env-file`` first, ``--env`` over it."""
    found: dict[str, str] = {}
    for name in options.env_file:
        try:
            with open(name, encoding="utf-8") as file:
                lines = file.read().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"--env-file {name}: {_reason(error)}") from None
        for number, line in enumerate(lines, start=1):
            if line.strip() and not line.lstrip().startswith("#"):
                _add_variable(found, line.strip(), f"{name} line {number}")
    for text in options.env:
        _add_variable(found, text, "--env")
    return found


def labels(options: argparse.Namespace) -> dict[str, str]:
    """``--label`` and ``--name``."""
    found = {}
    for text in options.label:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise InvalidRequest(f"--label {text}: not of the form K=V", hint="write --label team=search")
        found[key] = value
    if options.name:
        found["name"] = options.name
    return found


def files_in(options: argparse.Namespace) -> list[Transfer]:
    """``--file LOCAL[:PATH]``; the last colon divides, since names here may hold some.

    Raises:
        InvalidRequest: nothing there, or it can't be read.
    """
    found = []
    for text in options.file:
        local, colon, inside = text.rpartition(":")
        if not colon or (os.path.exists(text) and not os.path.exists(local)):
            local, inside = text, ""
        if not local or not os.path.exists(local):
            raise InvalidRequest(
                f"--file {text}: there is no {local or 'name'} here", hint="write --file LOCAL:PATH"
            )
        if not os.access(local, os.R_OK):
            raise InvalidRequest(f"--file {text}: {local} can't be read by this user")
        if not (os.path.isfile(local) or os.path.isdir(local)):
            raise InvalidRequest(f"--file {text}: neither a file nor a folder")
        name = os.path.basename(os.path.abspath(local))
        if not inside or inside.endswith("/"):
            inside += name
        found.append(Transfer(local, inside))
    return found


def files_out(options: argparse.Namespace) -> list[Transfer]:
    """``--out PATH[:LOCAL]``; the first colon divides."""
    found = []
    for text in options.out:
        inside, _, local = text.partition(":")
        name = os.path.basename(inside.rstrip("/"))
        if not name or name in (".", ".."):
            raise InvalidRequest(f"--out {text}: no name of a file or folder", hint="write --out PATH:LOCAL")
        local = local or name
        if os.path.isdir(local) or local.endswith("/"):
            # As cp does it: into a folder that is there, under the name it had inside.
            local = os.path.join(local, name)
        found.append(Transfer(local, inside))
    return found


def check_command(options: argparse.Namespace) -> tuple[str, ...]:
    """The command's argv.

    Raises:
        InvalidRequest: there is none, or it holds a NUL.
        NotFound: the template, whose command it would be, is not there.
    """
    if options.template == "":  # a variable that is not set: the host's programs are not what was meant
        raise InvalidRequest(
            "--template: an empty name", hint="leave it out, or name one: `ringfence template ls`"
        )
    if not options.command and options.template not in (None, "host"):
        return _template_command(options.template)
    if not options.command:
        line = f"sandbox exec {options.id}" if getattr(options, "verb", "") == "exec" else "run"
        hint = f"write it after two dashes: ringfence {line} -- COMMAND"
        raise InvalidRequest("no command to run", hint=hint)
    if not options.command[0]:
        raise InvalidRequest("the command is an empty string")
    return tuple(options.command)


def _template_command(name: str) -> tuple[str, ...]:
    """What the template runs where nobody says what."""
    from ringfence.images.contract import ENGINE
    from ringfence.images.store import TemplateStore
    from ringfence.node.state import default_root

    hint = f"write it after two dashes: ringfence run --template {name} -- COMMAND"
    if name.startswith(ENGINE):
        raise InvalidRequest("no command to run, and an engine's image is not asked for one", hint=hint)
    with TemplateStore.open(default_root() / "images") as store:
        found = store.resolve(name).config.command
    if not found:
        raise InvalidRequest(f"no command to run, and template {name} has none of its own", hint=hint)
    return found


def check_modes(options: argparse.Namespace) -> None:
    """Options that exclude each other.

    Raises:
        InvalidRequest: two that do.
    """
    if options.policy and options.preset:
        raise InvalidRequest(
            "--policy and --preset exclude each other", hint="a policy file can name its trust"
        )
    if options.interactive and options.json:
        raise InvalidRequest(
            "--interactive and --json exclude each other", hint="a terminal can't be captured"
        )
    if options.allow_dangerous_mount and not options.mount and not options.policy:
        raise InvalidRequest("--allow-dangerous-mount goes with --mount", hint="add --mount SRC:DST")
    if options.stream and not options.json:
        raise InvalidRequest("--stream goes with --json", hint="without --json output is always passed on")


def _base_policy(options: argparse.Namespace) -> Policy:
    if options.policy or options.preset:
        from ringfence.model import policies

        return policies.find(options.policy) if options.policy else policies.preset(options.preset)
    return Policy()


def _resources(options: argparse.Namespace, base: Policy) -> Resources:
    resources = base.wall.resources
    memory, disk = _size("--memory", options.memory), _size("--disk", options.disk)
    if options.gpus is not None:
        if not 0 <= options.gpus <= MOST_GPUS:
            raise InvalidRequest(f"--gpus {options.gpus}: not a number of GPUs", hint="write --gpus 1")
        resources = replace(resources, gpus=options.gpus)
    if options.size is None and options.cpus is None and memory is None and disk is None:
        return resources
    if options.cpus is not None and not 0 < options.cpus <= 4096:
        raise InvalidRequest(
            f"--cpus {options.cpus:g}: not a number of CPUs", hint="write --cpus 0.5 or --cpus 2"
        )
    if memory is not None and memory < LEAST_MEMORY:
        raise InvalidRequest(
            f"--memory {options.memory}: less than {format_size(LEAST_MEMORY)} holds no program",
            hint="write --memory 64M",
        )
    from ringfence.model.policies import resize

    return resize(resources, options.size, options.cpus, memory, disk)


def _expanded(text: str) -> str:
    """``~`` in ``--mount=~/x:/x``, which no shell expands."""
    return os.path.expanduser(text) if text.startswith("~") else text


def _add_variable(found: dict[str, str], text: str, where: str) -> None:
    key, equals, value = text.partition("=")
    if not key or "\0" in text or " " in key:
        raise InvalidRequest(f"{where}: {text!r} is not a variable", hint="write K=V")
    if equals:
        found[key] = value
    elif key in os.environ:
        found[key] = os.environ[key]
    else:
        raise InvalidRequest(f"{where}: {key} is not set here", hint=f"write {key}=VALUE")


def _given(value: Any, **parts: Any) -> Any:
    """A copy with the parts replaced that are not None."""
    parts = {name: part for name, part in parts.items() if part is not None}
    return replace(value, **parts) if parts else value


def _size(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        value = parse_size(text)
    except InvalidRequest as error:
        raise InvalidRequest(f"{option}: {error.message}", hint=error.hint) from None
    if not 0 < value < 2**60:
        raise InvalidRequest(f"{option} {text}: not a possible size", hint="write 64M or 2GiB")
    return value


def _time(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = parse_duration(text)
    except InvalidRequest as error:
        raise InvalidRequest(f"{option}: {error.message}", hint=error.hint) from None
    if not 0 < value < 10 * 366 * 86400:
        raise InvalidRequest(f"{option} {text}: not a possible time", hint="write 2s, 10m or 1h30m")
    return value


def _count(option: str, value: int | None) -> int | None:
    if value is not None and not 1 <= value <= 4_000_000:
        raise InvalidRequest(
            f"{option} {value}: not a possible number of processes", hint=f"write {option} 256"
        )
    return value


def _user(value: int | None) -> int | None:
    if value is not None and not 0 <= value < 64999:  # the guest agent's own user
        raise InvalidRequest(
            f"--user {value}: not a user of the sandbox", hint="write --user 1000, or --user 0"
        )
    return value


def _user_name() -> str:
    return (
        os.environ.get("SUDO_USER") or os.environ.get("USER") or os.environ.get("LOGNAME") or str(os.getuid())
    )


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
