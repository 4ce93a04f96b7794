"""``ringfence template``: root file systems other than the host's own.

Each verb is a pair of functions (options, work) in ``VERBS``; those that build have a module of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfence.cli import template_build, template_refresh, template_scan
from ringfence.cli.output import note, print_json, printable, safe, table
from ringfence.cli.parsing import Parser, add_json, add_verbs
from ringfence.model.errors import InvalidRequest
from ringfence.model.quantities import format_size, parse_size

if TYPE_CHECKING:
    from ringfence.images.contract import Template
    from ringfence.images.store import TemplateStore

DESCRIPTION = """\
Templates are root file systems for sandboxes: images from a registry or an archive, a Debian suite, a tar.
Their layers are unpacked once, shared, and never changed; `ringfence run --template NAME` starts from one."""

EPILOG = """\
examples:
  ringfence template add debian:bookworm --package python3
  ringfence template add oci:docker.io/library/python:3.12-slim
  ringfence template add image.tar --name tools        # from docker save, or an OCI archive
  ringfence template add ./layout:3.12                 # a folder in OCI's layout
  ringfence template ls                                # every verb has --json and --help
  ringfence run --template tools -- python3 job.py
  ringfence template rm tools && ringfence template gc --budget 20GiB"""


def configure(parser: Parser) -> None:
    """Add the verbs."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add_verbs(parser, "template", VERBS)


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    code: int = options.work(options)
    return code


@contextlib.contextmanager
def opened() -> Iterator[tuple[Path, TemplateStore]]:
    """The state root and its template store.

    Raises:
        HostLimit: the state root can't be used.
    """
    from ringfence.images.store import TemplateStore
    from ringfence.node.state import StateRoot

    state = StateRoot.open()
    try:
        with TemplateStore.open(state.path / "images") as store:
            yield state.path, store
    finally:
        state.close()


def reporter(options: argparse.Namespace) -> Callable[[str], None]:
    """What is told of a long job, on stderr: on a terminal one line that changes."""
    if options.json or options.quiet:
        return lambda line: None
    if not sys.stderr.isatty():
        return lambda line: note(printable(line)) if line else None

    def say(line: str) -> None:
        print(f"\r\033[K{printable(line)[:200]}", end="" if line else "\r", file=sys.stderr, flush=True)

    return say


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """``--quiet`` and ``--json`` of verbs that take long."""
    parser.add_argument("--quiet", "-q", action="store_true", help="say nothing on stderr but errors")
    add_json(parser)


# -- add


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="oci:IMAGE, a folder in OCI's layout, an archive of an image, rootfs:TAR, debian:SUITE or "
        "snapshot:NAME; "
        "of several images in one place: PATH:NAME",
    )
    parser.add_argument(
        "--name", "-n", metavar="NAME[:TAG]", default="", help="name (default: the source's own)"
    )
    parser.add_argument("--start", metavar="COMMAND", help="shell command to start with each sandbox")
    parser.add_argument("--ready", metavar="COMMAND", help="shell command that succeeds once a sandbox is up")
    parser.add_argument("--max-size", metavar="SIZE", help="largest layer, unpacked (default: 64GiB)")
    parser.add_argument(
        "--max-ratio", type=int, metavar="N", help="most bytes for a compressed one (default: 250)"
    )
    group = parser.add_argument_group("images from a registry")
    group.add_argument(
        "--insecure", action="store_true", help="registry without a certificate that is trusted"
    )
    group.add_argument(
        "--authfile", metavar="FILE", default="", help="credentials, as `docker login` writes them"
    )
    group = parser.add_argument_group("Debian suites")
    group.add_argument(
        "--package", action="append", default=[], metavar="NAME", help="install this package too"
    )
    group.add_argument(
        "--variant",
        choices=("minbase", "apt", "essential", "extract"),
        default="minbase",
        help="how much of Debian (default: minbase; extract: the packages' files only, nothing is set up)",
    )
    group.add_argument("--mirror", metavar="URL", default="", help="where packages come from")
    add_quiet(parser)


def _add(options: argparse.Namespace) -> int:
    from ringfence.images import importing, names

    if options.name:
        names.full_name(options.name)  # before anything is fetched
    if options.source.startswith("snapshot:"):
        return _add_snapshot(options)
    say = reporter(options)
    with opened() as (_, store):
        added = importing.add(store, options.source, import_options(options), say)
    say("")
    if options.json:
        print_json({"template": as_json(added.template), "layers_reused": added.reused, "notes": added.notes})
        return 0
    if not options.quiet:
        for text in added.notes[:5]:
            note(printable(text))
        if len(added.notes) > 5:
            note(f"and {len(added.notes) - 5} notes more (--json has them)")
    template = added.template
    shared = f", {added.reused} of them here before" if added.reused else ""
    print(f"{template.name}  {template.digest}  {layers(template)}{shared}")
    return 0


def _add_snapshot(options: argparse.Namespace) -> int:
    import asyncio

    from ringfence.node.service import Node
    from ringfence.node.templating import template_from

    snapshot = options.source.partition(":")[2]

    async def make() -> tuple[Template, tuple[str, ...]]:
        async with await Node.open(adopt=False) as node:
            return await template_from(node, snapshot, options.name or snapshot)

    template, notes = asyncio.run(make())
    if options.json:
        print_json({"template": as_json(template), "notes": notes})
        return 0
    for text in notes[:5] if not options.quiet else ():
        note(printable(text))
    print(f"{template.name}  {template.digest}  {layers(template)}")
    return 0


def layers(template: Template) -> str:
    """``1 layer``, ``2 layers``."""
    count = len(template.layers)
    return f"{count} layer" + ("s" if count != 1 else "")


def import_options(options: argparse.Namespace) -> Any:
    """What the options of ``add`` say to an import.

    Raises:
        InvalidRequest: a value can't be right.
    """
    from dataclasses import replace

    from ringfence.images.contract import ImportLimits
    from ringfence.images.importing import ImportOptions

    limits = ImportLimits()
    if options.max_size is not None:
        limits = replace(limits, size=_size("--max-size", options.max_size))
    if options.max_ratio is not None:
        if options.max_ratio < 1:
            raise InvalidRequest(
                f"--max-ratio {options.max_ratio}: not a ratio", hint="write --max-ratio 1000"
            )
        limits = replace(limits, ratio=options.max_ratio)
    return ImportOptions(
        name=options.name,
        limits=limits,
        start=shell(options.start),
        ready=shell(options.ready),
        insecure=options.insecure,
        authfile=options.authfile,
        packages=tuple(options.package),
        mirror=options.mirror,
        variant=options.variant,
    )


def shell(text: str | None) -> tuple[str, ...]:
    """A shell command as an argv."""
    return ("/bin/sh", "-c", text) if text else ()


# -- ls, show


def _ls_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", "-a", action="store_true", help="those without a name, too")
    add_json(parser)


def _ls(options: argparse.Namespace) -> int:
    with opened() as (_, store):
        found = [each for each in store.templates() if each.name or options.all]
    if options.json:
        print_json({"templates": [as_json(each) for each in found]})
    elif not found:
        print("no templates but `host`; `ringfence template add --help` shows how to add some")
    else:
        rows = [
            (
                safe(each.name) or "(no name)",
                each.digest[:19],
                format_size(each.size),
                len(each.layers),
                clock(each.made_at),
                safe(each.source),
            )
            for each in found
        ]
        table(("name", "digest", "size", "layers", "added", "source"), rows)
    return 0


def _show_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name, name:tag or sha256:…")
    add_json(parser)


def _show(options: argparse.Namespace) -> int:
    with opened() as (_, store):
        template = store.resolve(options.name)
    if options.json:
        print_json({"template": as_json(template)})
        return 0
    config = template.config
    user = config.user or "root"
    if config.uid is not None and config.user and config.user != str(config.uid):
        user += f" ({config.uid}:{config.gid})"
    rows: list[tuple[str, str]] = [
        ("name", template.name or "(no name)"),
        ("digest", template.digest),
        ("source", template.source),
        ("base", template.base_digest),
        ("base made", clock(template.base_made_at)),
        ("added", clock(template.made_at)),
        ("architecture", template.architecture),
        ("size", format_size(template.size)),
        ("image's user", user),
        ("workdir", config.workdir or "/workspace"),
        ("command", _words(config.command)),
        ("start", _words(config.start)),
        ("ready", _words(config.ready)),
        *(("env", f"{name}={value}") for name, value in config.env),
        *(("label", f"{name}={value}") for name, value in config.labels),
        *(("layer", f"{layer.digest}  {format_size(layer.size)}") for layer in template.layers),
    ]
    for name, value in rows:
        if value:
            print(f"{name:<13} {safe(value)}")
    return 0


def as_json(template: Template) -> dict[str, Any]:
    """A template as ``--json`` prints it."""
    from ringfence.images.records import config_as_json

    return {
        "name": template.name,
        "digest": template.digest,
        "source": template.source,
        "base_digest": template.base_digest,
        "base_made_at": template.base_made_at,
        "made_at": template.made_at,
        "architecture": template.architecture,
        "size": template.size,
        "layers": [{"digest": each.digest, "size": each.size} for each in template.layers],
        "config": {
            **config_as_json(template.config),
            "env": dict(template.config.env),
            "labels": dict(template.config.labels),
        },
    }


# -- rm, gc


def _rm_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="+", help="name, name:tag or sha256:… (all its names)")
    parser.add_argument("--keep-files", action="store_true", help="leave the files to the next `template gc`")
    add_json(parser)


def _rm(options: argparse.Namespace) -> int:
    from ringfence.node.collecting import collect

    with opened() as (state, store):
        gone = [name for given in options.names for name in store.remove(given)]
        freed = 0 if options.keep_files else collect(state, store).freed
    if options.json:
        print_json({"removed": gone, "freed": freed})
    else:
        for name in gone:
            print(safe(name))
    return 0


def _gc_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--budget",
        metavar="SIZE",
        help="what layers, disks of virtual machines and compiled modules may take together: those not "
        "used for the longest time go first, templates with a name never",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")
    add_json(parser)


def _gc(options: argparse.Namespace) -> int:
    from ringfence.node.collecting import collect

    budget = None if options.budget is None else _size("--budget", options.budget)
    with opened() as (state, store):
        found = collect(state, store, budget=budget, dry_run=options.dry_run)
    if options.json:
        removed = [{"kind": kind, "name": name, "size": size} for kind, name, size in found.removed]
        print_json({"removed": removed, "freed": found.freed, "left": found.left, "failures": found.failures})
    else:
        for kind, name, size in found.removed:
            print(f"{kind:<9} {safe(name)[:71]}  {format_size(size) if size else ''}".rstrip())
        word = "would free" if options.dry_run else "freed"
        print(f"{word} {format_size(found.freed)}; {format_size(found.left)} in use")
        for text in found.failures:
            note(printable(text))
        if budget is not None and found.left > budget:
            note(f"more than the budget of {format_size(budget)}: `ringfence template rm` removes templates")
    return 1 if found.failures else 0


def clock(seconds: float) -> str:
    """A time for people; empty where it is not known."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else ""


def _words(words: tuple[str, ...]) -> str:
    import shlex

    return shlex.join(words)


def _size(option: str, text: str) -> int:
    try:
        size = parse_size(text)
    except InvalidRequest as error:
        raise InvalidRequest(f"{option}: {error.message}", hint=error.hint) from None
    if not 0 <= size < 2**60:
        raise InvalidRequest(f"{option} {text}: not a possible size", hint="write 20GiB")
    return size


VERBS: dict[
    str,
    tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]],
] = {
    "add": ("add a template from an image, an archive or a Debian suite", _add_options, _add),
    "build": (
        "build a template from a definition, in sandboxes",
        template_build.configure,
        template_build.main,
    ),
    "ls": ("list the templates that are here", _ls_options, _ls),
    "show": ("show a template's configuration, layers and origin", _show_options, _show),
    "rm": ("remove names, and what nothing needs then", _rm_options, _rm),
    "scan": (
        "list a template's packages, and run a scanner on them",
        template_scan.configure,
        template_scan.main,
    ),
    "refresh": ("make templates again on newer bases", template_refresh.configure, template_refresh.main),
    "warm": ("prepare templates ahead of use", template_refresh.configure_warm, template_refresh.main_warm),
    "gc": ("remove what nothing needs, and shrink caches to a budget", _gc_options, _gc),
}
