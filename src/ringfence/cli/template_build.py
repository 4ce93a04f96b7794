"""``ringfence template build``: a template from a definition, step by step."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from ringfence.cli.output import coloured, note, print_json, printable
from ringfence.model.errors import InvalidRequest
from ringfence.model.levels import Level
from ringfence.model.quantities import format_duration, format_size

if TYPE_CHECKING:
    from ringfence.images.contract import Layer
    from ringfence.model.policy import Policy

NAMES = ("Ringfile", "Dockerfile", "Containerfile")  # what a definition in a folder is called
_DISK, _ROOT_DISK = "512M", "4G"  # a disk in memory can't be large
_LONGEST = 2000  # characters of a line of output that are shown


def configure(parser: argparse.ArgumentParser) -> None:
    """The options."""
    from ringfence.cli.template import add_quiet

    parser.add_argument(
        "path",
        metavar="FILE|FOLDER",
        help="a definition (FROM, RUN, COPY, …), or a folder with one called " + " or ".join(NAMES),
    )
    parser.add_argument(
        "--tag", "-t", dest="name", metavar="NAME[:TAG]", required=True, help="what it is called"
    )
    parser.add_argument("--file", "-f", metavar="FILE", help="the definition, if it is not in the folder")
    parser.add_argument(
        "--context", metavar="FOLDER", help="what COPY takes from (default: the definition's folder)"
    )
    parser.add_argument(
        "--build-arg",
        action="append",
        default=[],
        metavar="K[=V]",
        help="a value for an ARG; without =V from here",
    )
    parser.add_argument(
        "--no-cache", action="store_true", help="run every step, also those known from before"
    )
    parser.add_argument(
        "--epoch",
        type=int,
        metavar="SECONDS",
        help="no file's time is later (default: SOURCE_DATE_EPOCH, else 1980-01-02)",
    )
    parser.add_argument(
        "--insecure", action="store_true", help="FROM oci: of a registry without a certificate"
    )
    parser.add_argument("--authfile", metavar="FILE", default="", help="credentials for FROM oci:")
    add_limits(parser)
    add_quiet(parser)


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Options of the sandboxes that steps run in."""
    group = parser.add_argument_group("the sandbox of each step")
    group.add_argument("--runtime", metavar="NAME", help="as for `ringfence run`")
    group.add_argument(
        "--isolation",
        metavar="LEVEL",
        choices=[level.value for level in Level],
        help="the weakest wall: L2 to L4",
    )
    group.add_argument("--policy", metavar="FILE", help="policy file; options given here win over it")
    group.add_argument("--preset", metavar="NAME", help="built-in policy: untrusted, controlled or trusted")
    group.add_argument("--memory", metavar="SIZE", help="memory (default: 2GiB)")
    group.add_argument("--disk", metavar="SIZE", help="what one step may write (default: 4GiB as root)")
    group.add_argument("--cpus", type=float, metavar="N", help="CPUs")
    group.add_argument("--pids", type=int, metavar="N", help="processes and threads at once (default: 1024)")
    group.add_argument("--timeout", metavar="TIME", help="time of one step (default: 1h)")


def policy_of(options: argparse.Namespace) -> Policy:
    """The policy of the steps.

    Raises:
        InvalidRequest, PolicyError: see ``ringfence.cli.requesting.policy``.
    """
    from ringfence.cli import requesting

    known = vars(options)
    own = not (options.policy or options.preset)
    root = os.geteuid() == 0
    defaults: dict[str, Any] = {
        "memory": "2G" if own and root else None,
        "disk": (_ROOT_DISK if root else _DISK) if own else None,
        "pids": 1024 if own else None,
        "timeout": "1h" if own else None,
    }
    unasked = dict.fromkeys(("user", "cpu_time", "net", "size", "gpus"))
    lists: dict[str, Any] = {"mount": [], "allow_dangerous_mount": [], "allow": []}
    given = {name: known[name] if known.get(name) is not None else value for name, value in defaults.items()}
    whole = argparse.Namespace(
        **unasked, **lists, **given, readonly=False, output="256M" if own else None,
        **{name: known[name] for name in ("runtime", "isolation", "policy", "preset", "cpus")},
    )  # fmt: skip
    return requesting.policy(whole)


def main(options: argparse.Namespace) -> int:
    """Build. Returns the exit code."""
    from ringfence.cli.template import as_json, layers
    from ringfence.images import names
    from ringfence.images.building.definition import parse

    names.full_name(options.name)
    path, context = find(options.path, options.file, options.context)
    definition = parse(read(path), os.path.basename(path))
    from ringfence.node.building import BuildOptions

    build = BuildOptions(
        options.name,
        arguments=arguments(options.build_arg),
        policy=policy_of(options),
        cache=not options.no_cache,
        epoch=_epoch(options.epoch),
        insecure=options.insecure,
        authfile=options.authfile,
    )
    listener = Progress(quiet=options.quiet or options.json)

    async def work(node: Any, store: Any) -> Any:
        from ringfence.node.building import build as run

        return await run(node, store, definition, context, build, listener)

    built = with_node(work)
    if options.json:
        print_json(
            {
                "template": as_json(built.template),
                "steps": built.steps,
                "cached": built.cached,
                "notes": built.notes,
            }
        )
    else:
        template = built.template
        print(f"{template.name}  {template.digest}  {layers(template)}, {format_size(template.size)}")
    return 0


def find(path: str, file: str | None, context: str | None) -> tuple[str, str]:
    """(definition, context folder).

    Raises:
        InvalidRequest: there is no definition.
    """
    if os.path.isdir(path):
        folder = context or path
        if file is not None:
            return file, folder
        for name in NAMES:
            if os.path.exists(os.path.join(path, name)):
                return os.path.join(path, name), folder
        raise InvalidRequest(
            f"there is no definition in {path}",
            hint=f"call it {NAMES[0]} or {NAMES[1]}, or name it with --file",
        )
    if file is not None:
        raise InvalidRequest(f"{path} is no folder", hint="with --file the context is a folder")
    return path, context or os.path.dirname(path) or "."


def read(path: str) -> bytes:
    """The definition.

    Raises:
        InvalidRequest: it can't be read.
    """
    from ringfence.images.building.definition import LARGEST

    try:
        with open(path, "rb") as file:
            return file.read(LARGEST + 1)
    except OSError as error:
        raise InvalidRequest(
            f"the definition {path} can't be read: {error.strerror}",
            hint="write FROM, RUN, COPY … into a file",
        ) from None


def arguments(given: list[str]) -> dict[str, str]:
    """``--build-arg``.

    Raises:
        InvalidRequest: not of the form, or not set here.
    """
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            if name not in os.environ:
                raise InvalidRequest(
                    f"--build-arg {name}: it is not set here", hint=f"write --build-arg {name}=VALUE"
                )
            value = os.environ[name]
        if not name:
            raise InvalidRequest(f"--build-arg {text}: not of the form K=V")
        found[name] = value
    return found


def _epoch(value: int | None) -> int | None:
    if value is not None and not 0 <= value < 1 << 33:
        raise InvalidRequest(f"--epoch {value}: not a time", hint="seconds since 1970")
    return value


class Progress:
    """Tells on stderr what a build does. What commands print is hostile: nothing of it moves a cursor."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._rest = {1: b"", 2: b""}
        self._dim, self._plain = ("\033[2m", "\033[0m") if coloured(sys.stderr) else ("", "")

    def step(self, number: int, count: int, text: str) -> None:
        """See ``ringfence.node.building.Listener``."""
        self._say(f"[{number}/{count}] {printable(text[:300])}")

    def output(self, stream: int, data: bytes) -> None:
        """See the Listener."""
        if self._quiet:
            return
        *lines, rest = (self._rest[stream] + data).replace(b"\r", b"\n").split(b"\n")
        self._rest[stream] = rest[-_LONGEST:]
        for line in lines:
            self._line(line)

    def ended(self, number: int, seconds: float, layer: Layer | None, *, cached: bool) -> None:
        """See the Listener."""
        self._flush()
        brought = f", {format_size(layer.size)}" if layer is not None else ""
        if cached:
            self._say(f"    known from before{brought}")
        elif layer is not None or seconds > 1:
            self._say(f"    {format_duration(seconds)}{brought}")

    def note(self, text: str) -> None:
        """See the Listener."""
        self._flush()
        if text and not self._quiet:
            note(printable(text))

    def _flush(self) -> None:
        for stream, rest in self._rest.items():
            if rest and not self._quiet:
                self._line(rest)
            self._rest[stream] = b""

    def _line(self, line: bytes) -> None:
        if line.strip():
            text = printable(line[:_LONGEST].decode("utf-8", "replace").rstrip())
            self._say(f"    {self._dim}{text}{self._plain}")

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)


def with_node(work: Any) -> Any:
    """``await work(node, store)`` with a node and its template store; a signal ends it cleanly.

    Raises:
        Interrupted: a signal came; everything is undone.
    """
    import asyncio

    return asyncio.run(_with_node(work))


async def _with_node(work: Any) -> Any:
    import asyncio
    import signal

    from ringfence.cli.report import Interrupted
    from ringfence.images.store import TemplateStore
    from ringfence.node.service import Node

    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    ending = 0

    def stop(number: int) -> None:
        nonlocal ending
        if not ending:  # who sends more does not make the clean-up any faster
            ending = number
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop, number)

    async def inner(node: Node) -> Any:
        with TemplateStore.open(node.state.path / "images") as store:
            return await work(node, store)

    try:
        node = await Node.open(adopt=False)
        try:
            return await inner(node)
        finally:
            await node.close()
    except asyncio.CancelledError:
        if not ending:
            raise
        raise Interrupted(ending, "nothing of the build is left") from None
