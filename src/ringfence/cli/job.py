"""``ringfence job``: commands that run to completion at a service."""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ringfence.cli import remote
from ringfence.cli.output import note, print_json, safe, table
from ringfence.cli.parsing import Parser, add_json, add_verbs
from ringfence.model.policy import SIZES

if TYPE_CHECKING:
    from ringfence.sdk.service import AsyncService

FINAL = ("succeeded", "failed", "cancelled")
_STATES = ("queued", "running", *FINAL)


def configure(parser: Parser) -> None:
    """Add the verbs."""
    parser.description = (
        "Jobs: commands that run to completion, each attempt in a fresh sandbox; what they printed and the "
        "files they leave are kept."
    )
    parser.epilog = (
        "examples:\n  ringfence job run --output out.csv --retries 2 -- python3 work.py\n"
        "  ringfence job ls --state running    # every verb has --help, most --json\n"
        "  ringfence job logs -f JOB\n  ringfence job outputs JOB --into out"
    )
    add_verbs(parser, "job", VERBS)


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    remote.need("`ringfence job`")
    code: int = options.work(options)
    return code


def _path(id: str) -> str:
    return "/v1/jobs/" + quote(id, safe="")


def _run_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ringfence job run [options] -- COMMAND [ARGUMENT ...]"
    parser.add_argument("--follow", "-f", action="store_true", help="print what it prints; end with its code")
    parser.add_argument("--template", "-t", metavar="NAME", help="root file system (default: host)")
    parser.add_argument("--preset", metavar="NAME", help="built-in policy: untrusted, controlled or trusted")
    parser.add_argument("--policy", metavar="FILE", help="policy file; options given here win over it")
    parser.add_argument("--runtime", metavar="NAME", help="start its sandboxes with this runtime")
    parser.add_argument("--size", choices=list(SIZES), metavar="NAME", help="small, medium or large")
    for name, text in (("memory", "memory"), ("disk", "disk")):
        parser.add_argument(f"--{name}", metavar="SIZE", help=f"{text} of its sandboxes")
    parser.add_argument("--env", "-e", action="append", default=[], metavar="K[=V]", help="variable inside")
    parser.add_argument("--label", action="append", default=[], metavar="K=V", help="label of the job")
    files = "put a file of this machine inside"
    parser.add_argument("--file", action="append", default=[], metavar="LOCAL:INSIDE", help=files)
    fetch = "fetch a URL, through egress, to a path inside"
    parser.add_argument("--fetch", action="append", default=[], metavar="URL=INSIDE", help=fetch)
    volume = "attach a volume: read-only, or writable with :rw"
    parser.add_argument("--volume", action="append", default=[], metavar="NAME:INSIDE[:rw]", help=volume)
    keep = "keep this file or folder when the command has ended"
    parser.add_argument("--output", "-o", action="append", default=[], metavar="INSIDE", help=keep)
    parser.add_argument("--deadline", metavar="TIME", help="for all attempts, waiting included (default: 1h)")
    parser.add_argument("--retries", type=int, metavar="N", help="attempts after the first (default: 0)")
    parser.add_argument(
        "--backoff", type=float, metavar="SECONDS", help="before the second; then twice as long"
    )
    parser.add_argument("--priority", type=int, metavar="N", help="higher comes first (default: 0)")
    parser.add_argument("--ttl", metavar="TIME", help="how long it is kept after its end (default: 7d)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command")
    add_json(parser)


def _body(options: argparse.Namespace) -> dict[str, Any]:
    """The request that the options stand for.

    Raises:
        InvalidRequest: an option that can't be right, or a file that can't be read.
    """
    from ringfence.model.errors import InvalidRequest
    from ringfence.sdk import wire
    from ringfence.sdk.policy import Policy

    if options.policy and options.preset:
        raise InvalidRequest("--policy and --preset", hint="one of them, please")
    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not words:
        raise InvalidRequest("no command to run", hint="for example `ringfence job run -- python3 work.py`")
    files: dict[str, str | bytes] = {}
    for text in options.file:
        local, inside = _split(text, ":", "--file LOCAL:INSIDE")
        try:
            files[inside] = Path(local).read_bytes()
        except OSError as error:
            raise InvalidRequest(f"--file {local}: {error.strerror}") from None
    inputs = []
    for text in options.fetch:
        url, inside = _split(text, "=", "--fetch URL=INSIDE")
        inputs.append({"url": url, "path": inside})
    policy = Policy.load(options.policy) if options.policy else options.preset
    numbers = ("deadline", "retries", "backoff", "priority", "ttl")
    plain = ("template", "runtime", "size", "memory", "disk")
    return wire.filled(
        argv=list(words), policy=wire.policy(policy), files=wire.contents(files) or None,
        inputs=inputs or None, volumes=[_mount(text) for text in options.volume] or None,
        outputs=options.output or None, env=remote.environment(options.env) or None,
        labels=remote.pairs(options.label, "--label") or None,
        **{name: getattr(options, name) for name in (*numbers, *plain)},
    )  # fmt: skip


def _split(text: str, mark: str, form: str) -> tuple[str, str]:
    from ringfence.model.errors import InvalidRequest

    first, found, second = text.rpartition(mark)
    if not (found and first and second):
        raise InvalidRequest(f"{text!r} is not what it must be", hint=f"write {form}")
    return first, second


def _mount(text: str) -> dict[str, Any]:
    writable = text.endswith(":rw")
    name, path = _split(text.removesuffix(":rw").removesuffix(":ro"), ":", "--volume NAME:INSIDE[:rw]")
    return {"volume": name, "path": path, "read_only": not writable}


def _run(options: argparse.Namespace) -> int:
    import uuid

    body = _body(options)

    async def do(service: AsyncService) -> Any:
        made = await service.call("POST", "/v1/jobs", json=body, key=str(uuid.uuid4()))
        if not options.follow:
            return made
        if not options.json:
            note(f"job {made['id']}")
        await _print_logs(service, made["id"], {"follow": "true"}, quiet=options.json)
        return await _ended(service, made["id"])

    told = remote.with_service(do)
    if options.json:
        print_json(told)
    elif not options.follow:
        print(told["id"])
    if not options.follow:
        return 0
    if told["state"] != "succeeded" and not options.json:
        note(f"job {told['id']} {told['state']}: {_why(told)}")
    code = told.get("exit_code")
    return int(code) if isinstance(code, int) else 0 if told["state"] == "succeeded" else 1


async def _ended(service: AsyncService, id: str) -> Any:
    import asyncio

    while True:  # the log ends a moment before the job does
        told = await service.call("GET", _path(id))
        if told["state"] in FINAL:
            return told
        await asyncio.sleep(0.1)


async def _print_logs(service: AsyncService, id: str, query: dict[str, Any], *, quiet: bool = False) -> None:
    transport = await service.transport()
    async with transport.stream("GET", f"{_path(id)}/logs", params=query) as answer:
        async for piece in answer.aiter_raw():
            if not quiet:
                sys.stdout.buffer.write(piece)
                sys.stdout.buffer.flush()


def _why(told: dict[str, Any]) -> str:
    cause = str(told.get("cause") or "")
    if cause == "exited":
        return f"exit code {told.get('exit_code')}"
    return (
        safe(": ".join(part for part in (cause, str(told.get("detail") or "")) if part))
        or "no cause is known"
    )


def _ls_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state", action="append", choices=_STATES, default=[], metavar="STATE", help="only these"
    )
    parser.add_argument("--label", action="append", default=[], metavar="K=V", help="only with this label")
    add_json(parser)


def _ls(options: argparse.Namespace) -> int:
    async def do(service: AsyncService) -> Any:
        transport = await service.transport()
        query = {"state": options.state or None, "label": options.label or None}
        return [each async for each in transport.pages("/v1/jobs", query)]

    found = remote.with_service(do)
    if options.json:
        print_json({"jobs": found})
    elif not found:
        print("there are no jobs")
    else:
        table(
            ("job", "state", "attempts", "created", "command"),
            [
                (
                    each["id"], each["state"], len(each["attempts"]), _time(each["created_at"]),
                    safe(" ".join(each["command"]))[:60],
                )
                for each in found
            ],
        )  # fmt: skip
    return 0


def _time(seconds: float | None) -> str:
    if not seconds:
        return ""
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _one(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="its id")
    add_json(parser)


def _call(options: argparse.Namespace, method: str, rest: str = "") -> Any:
    async def do(service: AsyncService) -> Any:
        return await service.call(method, _path(options.job) + rest)

    return remote.with_service(do)


def _show(options: argparse.Namespace) -> int:
    told = _call(options, "GET")
    if options.json:
        print_json(told)
        return 0
    print(f"{told['id']}  {told['state']}" + (f"  {_why(told)}" if told["state"] in FINAL else ""))
    print(f"  command   {safe(' '.join(told['command']))}")
    for each in told["attempts"]:
        ended = f"{_time(each.get('ended_at'))}  {_why(each)}" if each.get("ended_at") else "…"
        print(f"  attempt {each['number']}  {_time(each['started_at'])} to {ended}  {each['sandbox']}")
    for each in told["artifacts"]:
        print(f"  output    {safe(each['name'])}  {each['size']} bytes  sha256:{each['sha256'][:16]}…")
    for name in told["missing"]:
        print(f"  missing   {safe(name)}")
    return 0


def _logs_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="its id")
    parser.add_argument("--follow", "-f", action="store_true", help="until it has ended")
    parser.add_argument("--attempt", type=int, metavar="N", help="of this attempt (default: the last)")
    parser.add_argument(
        "--stream", choices=("all", "stdout", "stderr"), metavar="NAME", help="stdout or stderr only"
    )
    parser.set_defaults(json=False)


def _logs(options: argparse.Namespace) -> int:
    query = {
        "follow": "true" if options.follow else None, "attempt": options.attempt, "stream": options.stream,
    }  # fmt: skip

    async def do(service: AsyncService) -> None:
        await _print_logs(service, options.job, query)

    remote.with_service(do)
    return 0


def _cancel(options: argparse.Namespace) -> int:
    told = _call(options, "POST", "/cancel")
    ending = told["state"] not in FINAL
    return remote.say(options, told, f"{'cancelling' if ending else told['state']} {told['id']}")


def _retry(options: argparse.Namespace) -> int:
    told = _call(options, "POST", "/retry")
    return remote.say(options, told, f"queued {told['id']} again")


def _rm(options: argparse.Namespace) -> int:
    _call(options, "DELETE")
    return remote.say(options, {"removed": options.job}, f"removed {safe(options.job)}")


def _outputs_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="its id")
    parser.add_argument("--into", default=".", metavar="FOLDER", help="where to put them (default: here)")
    add_json(parser)


def _outputs(options: argparse.Namespace) -> int:
    """Fetch what was kept. Names are the sandbox's: only their last part is used; nothing is replaced."""
    from ringfence.model.errors import InvalidRequest

    into = Path(options.into)
    into.mkdir(parents=True, exist_ok=True)

    async def do(service: AsyncService) -> list[dict[str, Any]]:
        transport = await service.transport()
        fetched = []
        for each in (await service.call("GET", _path(options.job)))["artifacts"]:
            name = str(each["name"]).rpartition("/")[2]
            if name in ("", ".", "..") or "\0" in name:
                name = str(each["sha256"])
            target = into / name
            try:
                file = target.open("xb")
            except FileExistsError:
                raise InvalidRequest(f"{target} exists", hint="use --into with an empty folder") from None
            with file:
                path = f"{_path(options.job)}/artifacts/{each['sha256']}"
                async with transport.stream("GET", path) as answer:
                    async for piece in answer.aiter_raw():
                        file.write(piece)
            fetched.append({**each, "file": str(target)})
        return fetched

    found = remote.with_service(do)
    return remote.say(options, {"outputs": found}, "\n".join(safe(each["file"]) for each in found))


VERBS: dict[str, tuple[Any, ...]] = {
    "run": (
        "queue a command, and print the job's id", _run_options, _run,
        ("run -- python3 -c 'print(6 * 7)'", "run -f --file in.csv:in.csv --output out.csv -- sh work.sh"),
    ),
    "ls": ("list jobs", _ls_options, _ls, ("ls", "ls --state running --label team=blue")),
    "show": ("show a job: attempts, causes, outputs", _one, _show, ("show JOB",)),
    "logs": ("what a job printed", _logs_options, _logs, ("logs JOB", "logs -f JOB", "logs --attempt 1 JOB")),
    "outputs": ("fetch the files that it left", _outputs_options, _outputs, ("outputs JOB --into results",)),
    "cancel": ("end a job", _one, _cancel, ("cancel JOB",)),
    "retry": ("another attempt of a job that has ended", _one, _retry, ("retry JOB",)),
    "rm": ("forget a job that has ended, with all that it left", _one, _rm, ("rm JOB",)),
}  # fmt: skip
