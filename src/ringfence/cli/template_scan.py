"""``ringfence template scan``: what packages a template has, and what a scanner says of them."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from typing import Any

from ringfence.cli.output import note, print_json, printable, safe, table
from ringfence.cli.parsing import add_json
from ringfence.model.errors import DeadlineExceeded, InvalidRequest, RuntimeUnavailable
from ringfence.model.quantities import parse_duration

VARIABLE = "RINGFENCE_SCANNER"
PLACE = "{sbom}"
_MOST = 1 << 20  # bytes of what the scanner says that are kept


def configure(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("name", metavar="NAME", help="name, name:tag or sha256:…")
    parser.add_argument(
        "--output",
        "-o",
        metavar="FILE",
        help="write the bill of materials there (CycloneDX 1.5); -: to stdout",
    )
    parser.add_argument(
        "--scanner",
        metavar="COMMAND",
        help=f"give the bill of materials to this command, as in 'grype sbom:{PLACE}' (default: ${VARIABLE})",
    )
    parser.add_argument("--no-scanner", action="store_true", help=f"run none, whatever ${VARIABLE} says")
    parser.add_argument(
        "--scanner-timeout", metavar="TIME", default="10m", help="time for the scanner (default: 10m)"
    )
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Scan. Returns 0, or 1 if the scanner found something."""
    from ringfence import __version__
    from ringfence.cli.template import opened
    from ringfence.images.scanning.documents import cyclonedx
    from ringfence.images.scanning.packages import scan

    command = None if options.no_scanner else (options.scanner or os.environ.get(VARIABLE) or None)
    argv = scanner(command) if command else []
    seconds = parse_duration(options.scanner_timeout)
    with opened() as (_, store):
        template = store.resolve(options.name)
        store.layer(template.layers[0].digest)  # while it is read nobody takes it away
        for layer in template.layers[1:]:
            store.layer(layer.digest)
        found = scan(template.lowers)
    document = cyclonedx(template, found, __version__)
    if options.output == "-":
        print_json(document)
    elif options.output:
        _write(options.output, document)
    outcome = run(argv, document, seconds) if argv else None
    counts = {kind: sum(each.kind == kind for each in found.packages) for kind in ("deb", "pypi", "npm")}
    if options.json and options.output != "-":
        print_json(
            {
                "template": {"name": template.name, "digest": template.digest},
                "packages": counts,
                "notes": found.notes,
                "scanner": outcome,
                **({} if options.output else {"sbom": document}),
            }
        )
    elif options.output != "-":
        _print(options, found, counts)
    if outcome is not None and not options.json:
        for key, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
            for line in str(outcome[key]).splitlines():
                print(printable(line), file=stream)
        note(f"scanner {safe(argv[0])} ended with {outcome['exit_code']}")
    return 1 if outcome is not None and outcome["exit_code"] else 0


def _print(options: argparse.Namespace, found: Any, counts: dict[str, int]) -> None:
    for text in found.notes[:10]:
        note(printable(text))
    if not options.output:
        table(
            ("kind", "package", "version", "from"),
            [(each.kind, safe(each.name), safe(each.version), safe(each.place)) for each in found.packages],
        )
    total = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    print(f"{len(found.packages)} packages" + (f": {total}" if total else ""))


def scanner(command: str) -> list[str]:
    """The scanner's argv, ``{sbom}`` in one of its words (put at the end if it is in none).

    Raises:
        InvalidRequest: it can't be read.
        RuntimeUnavailable: there is no such program.
    """
    try:
        argv = shlex.split(command)
    except ValueError as error:
        raise InvalidRequest(f"the scanner's command {command!r} can't be read: {error}") from None
    if not argv:
        raise InvalidRequest("the scanner's command is empty", hint=f"as in {VARIABLE}='grype sbom:{PLACE}'")
    program = shutil.which(argv[0])
    if program is None:
        raise RuntimeUnavailable(
            f"the scanner {argv[0]} is not here", hint=f"install it, or change {VARIABLE} or --scanner"
        )
    if not any(PLACE in word for word in argv):
        argv.append(PLACE)
    return [program, *argv[1:]]


def run(argv: list[str], document: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Give the document to the scanner: its exit code, and the end of what it said.

    Raises:
        DeadlineExceeded: it took longer than ``seconds``; it is gone.
    """
    with tempfile.TemporaryDirectory(prefix="ringfence-sbom-") as folder:
        path = os.path.join(folder, "sbom.cdx.json")
        with open(path, "w", encoding="utf-8") as file:
            print_json(document, file)
        words = [word.replace(PLACE, path) for word in argv]
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
            try:
                code = process.wait(seconds)
            except BaseException as error:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                process.wait()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise DeadlineExceeded(
                        f"the scanner {argv[0]} did not end within {seconds:g} seconds",
                        hint="--scanner-timeout",
                    ) from None
                raise
            return {"command": argv, "exit_code": code, "stdout": _end(out), "stderr": _end(err)}


def _end(file: Any) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _MOST))
    text: str = file.read().decode("utf-8", "replace")
    return text


def _write(path: str, document: dict[str, Any]) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            print_json(document, file)
    except OSError as error:
        raise InvalidRequest(f"--output {path}: {error.strerror}") from None
