"""``ringfence template refresh`` and ``warm``."""

from __future__ import annotations

import argparse
from typing import Any

from ringfence.cli.output import note, print_error_object, print_json, printable
from ringfence.model.errors import InvalidRequest
from ringfence.model.quantities import parse_duration


def configure(parser: argparse.ArgumentParser) -> None:
    """The options of refresh."""
    from ringfence.cli.template import add_quiet

    parser.add_argument("names", metavar="NAME", nargs="*", help="templates to make again from their sources")
    parser.add_argument("--all", "-a", action="store_true", help="every template that has a name")
    parser.add_argument("--older-than", metavar="AGE", help="only those whose base is older: 12h, 7d")
    parser.add_argument(
        "--insecure", action="store_true", help="registries without a certificate that is trusted"
    )
    add_quiet(parser)


def main(options: argparse.Namespace) -> int:
    """Refresh. Returns 1 if one failed."""
    from ringfence.cli.template import as_json
    from ringfence.cli.template_build import Progress, with_node

    if bool(options.names) == options.all:
        raise InvalidRequest("which templates?", hint="name some, or write --all")
    oldest = parse_duration(options.older_than) if options.older_than is not None else None
    progress = Progress(quiet=options.quiet or options.json)

    async def work(node: Any, store: Any) -> Any:
        from ringfence.images.refreshing import age
        from ringfence.node.refreshing import Refreshing, refresh_all

        wanted = store.names() if options.all else options.names
        if oldest is not None:
            wanted = [name for name in wanted if age(store.resolve(name)) > oldest]
        refreshing = Refreshing(node, store, progress, insecure=options.insecure)
        return await refresh_all(refreshing, wanted)

    done, failed = with_node(work)
    if options.json:
        print_json(
            {
                "refreshed": [
                    {"name": each.name, "before": each.before, "changed": each.changed,
                     "template": as_json(each.template), "notes": each.notes}
                    for each in done
                ],
                "failed": [{"name": name, "error": error.as_dict()} for name, error in failed],
            }
        )  # fmt: skip
        return 1 if failed else 0
    for each in done:
        print(f"{each.name}  {each.template.digest}  {'new' if each.changed else 'as it was'}")
    for name, error in failed:
        note(f"{printable(name)} was not refreshed:")
        print_error_object(error.as_dict())
    return 1 if failed else 0


def configure_warm(parser: argparse.ArgumentParser) -> None:
    """The options of warm."""
    from ringfence.cli.template import add_quiet

    parser.add_argument(
        "names", metavar="NAME", nargs="+", help="templates, or sources: oci:… is added first"
    )
    parser.add_argument(
        "--runtime",
        action="append",
        metavar="NAME",
        default=[],
        help="for this runtime (its disk, image or modules are made); default: the one `run` would choose",
    )
    add_quiet(parser)


def main_warm(options: argparse.Namespace) -> int:
    """Warm."""
    from ringfence.cli.template import reporter
    from ringfence.cli.template_build import with_node

    say = reporter(options)

    async def work(node: Any, store: Any) -> Any:
        from functools import partial

        from ringfence.images import references
        from ringfence.model.errors import NotFound
        from ringfence.model.policy import Policy
        from ringfence.node.building import in_thread
        from ringfence.node.warming import warm

        for runtime in options.runtime:  # one that is misspelt: nothing is begun
            await node.runtime(runtime)
        for name in options.names:
            if name.partition(":")[0] not in references.KINDS:
                store.resolve(name)
        found = []
        for number, name in enumerate(options.names, start=1):
            try:
                template = store.resolve(name)
            except (NotFound, InvalidRequest):
                if name.partition(":")[0] not in references.KINDS:
                    raise
                template = (await in_thread(partial(_added, store, name, say))).template
            for runtime in options.runtime or [""]:
                say(f"[{number}/{len(options.names)}] {name}: {runtime or 'default runtime'}")
                found.append(await warm(node, template, runtime, Policy()))
        return found

    found = with_node(work)
    say("")
    if options.json:
        print_json({"warmed": found})
    else:
        for each in found:
            print(f"{each.template}  {each.runtime}: {each.what}")
    return 0


def _added(store: Any, source: str, say: Any, _: Any) -> Any:
    from ringfence.images import importing

    return importing.add(store, source, None, say)
