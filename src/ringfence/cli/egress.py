"""``ringfence egress``: the log of the door, its open questions, and the policy that a workload needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ringfence.cli.output import note, print_json, printable, safe, table
from ringfence.cli.parsing import Parser, add_json, add_verbs
from ringfence.model.errors import InvalidRequest, NotFound

DESCRIPTION = """\
What sandboxes with network mode egress did at their door, what waits for somebody's answer (policy
`onUnknown: ask`), and the secrets that the door puts into requests."""

EPILOG = """\
examples:
  ringfence egress log --denied    # every verb has --help, and --json
  ringfence egress pending
  ringfence egress allow ask-06h2k1tywwgvxb4ybktb --remember
  ringfence egress learn --sandbox sb-06h2k1tywwgvxb4ybktb > policy.yaml"""


def configure(parser: Parser) -> None:
    """Add the verbs."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add_verbs(parser, "egress", VERBS)


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    code: int = options.work(options)
    return code


def _folder() -> Path:
    from ringfence.node.state import default_root

    return default_root() / "egress"


# -- log


def _log_options(parser: argparse.ArgumentParser) -> None:
    _selection(parser)
    parser.add_argument("--denied", action="store_true", help="only what was refused")
    parser.add_argument("-n", "--lines", type=int, default=0, metavar="N", help="only the last N")
    parser.add_argument("--har", action="store_true", help="what was recorded of --sandbox, as HAR")
    add_json(parser)


def _selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sandbox", metavar="ID", help="only of this sandbox")
    parser.add_argument("--task", metavar="TASK", help="only of this task")
    parser.add_argument("--host", metavar="HOST", help="only to this host")


def _selected(options: argparse.Namespace, lines: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if all(
            wanted is None or line.get(key) == wanted
            for key, wanted in (("sandbox", options.sandbox), ("task", options.task), ("host", options.host))
        ):
            yield line


def _read_log(options: argparse.Namespace) -> list[dict[str, Any]]:
    from ringfence.egress.log import ConnectionLog

    return list(_selected(options, ConnectionLog(_folder() / "connections.jsonl").read()))


def _log(options: argparse.Namespace) -> int:
    if options.har:
        return _har(options)
    lines = _read_log(options)
    if options.denied:
        lines = [line for line in lines if line.get("decision") == "denied"]
    if options.lines > 0:
        lines = lines[-options.lines :]
    if options.json:
        print_json({"connections": lines})
        return 0
    if not lines:
        print("nothing is in the log" if not options.denied else "nothing was refused")
        return 0
    rows = [
        (
            _clock(line.get("at", 0)),
            safe(str(line.get("sandbox", ""))),
            safe(str(line.get("decision", ""))) + (f" ({safe(str(line['status']))})" if "status" in line else ""),  # noqa: E501
            safe(f"{line.get('method', line.get('via', ''))} {line.get('host', '?')}:{line.get('port', '?')}"
                 f"{line.get('path', '')}")[:90],
            f"{line.get('sent', 0)}/{line.get('received', 0)}",
            safe(str(line.get("reason") or line.get("rule") or ""))[:90],
        )
        for line in lines
    ]  # fmt: skip
    table(("at", "sandbox", "decision", "what", "bytes out/in", "rule or reason"), rows)
    return 0


def _har(options: argparse.Namespace) -> int:
    from ringfence import __version__
    from ringfence.egress.recording import Records, har
    from ringfence.egress.redaction import Redactor

    if options.sandbox is None:
        raise InvalidRequest("--har needs --sandbox", hint="records are kept by sandbox")
    entries = list(Records(_folder(), Redactor()).log(options.sandbox).read())
    if not entries:
        raise NotFound(
            f"nothing was recorded of sandbox {options.sandbox}",
            hint="policies with network.record: headers or bodies record requests that are inspected",
        )
    print_json(har(_selected(options, entries), __version__))
    return 0


def _clock(seconds: float) -> str:
    import time

    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


# -- questions


def _pending(options: argparse.Namespace) -> int:
    from ringfence.egress.visiting import visits

    found: list[dict[str, Any]] = []
    for visit in visits(_folder()):
        found += visit.call("pending")
    if options.json:
        print_json({"pending": found})
        return 0
    if not found:
        print("no request waits for an answer")
        return 0
    import time

    rows = [
        (
            safe(one["id"]),
            safe(one["sandbox"]),
            safe(f"{one.get('method', 'connect')} {one['host']}:{one['port']}{one.get('path', '')}")[:90],
            f"{max(0, round(one['expires'] - time.time()))} s",
        )
        for one in found
    ]
    table(("question", "sandbox", "what", "time left"), rows)
    return 0


def _question(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("question", metavar="QUESTION", help="its id, as `ringfence egress pending` shows it")
    add_json(parser)


def _allow_options(parser: argparse.ArgumentParser) -> None:
    _question(parser)
    parser.add_argument("--remember", action="store_true", help="also from now on, as a rule of the sandbox")


def _answer(options: argparse.Namespace, *, allow: bool) -> int:
    from ringfence.egress.visiting import visits

    for visit in visits(_folder()):
        try:
            result = visit.call(
                "answer", id=options.question, allow=allow, remember=getattr(options, "remember", False)
            )
        except NotFound:
            continue
        if options.json:
            print_json(result)
            return 0
        print(f"{'allowed' if allow else 'denied'}: {safe(result['host'])}:{result['port']}")
        if "rule" in result:
            import json

            print("as a rule for the policy's network.allow:")
            print(f"  - {printable(json.dumps(result['rule']))}")
        return 0
    raise NotFound(
        f"no question {options.question[:60]!r} is open", hint="`ringfence egress pending` lists them"
    )


def _allow(options: argparse.Namespace) -> int:
    return _answer(options, allow=True)


def _deny(options: argparse.Namespace) -> int:
    return _answer(options, allow=False)


# -- learning


def _learn_options(parser: argparse.ArgumentParser) -> None:
    _selection(parser)
    parser.add_argument(
        "--name", default="learned", metavar="NAME", help="the policy's name (default: learned)"
    )
    add_json(parser)


def _learn(options: argparse.Namespace) -> int:
    from ringfence.egress.learning import propose
    from ringfence.model import policies

    network = propose(_read_log(options))
    if network["mode"] == "none":
        note("the log shows nothing that passed: the workload needs no network, or it was not there")
    document = {
        "apiVersion": policies.API_VERSION, "kind": "Policy", "metadata": {"name": options.name},
        "network": network,
    }  # fmt: skip
    policies.from_dict(document)  # what we propose is a policy
    if options.json:
        print_json(document)
        return 0
    import yaml

    yaml.safe_dump(document, sys.stdout, sort_keys=False)
    return 0


# -- secrets


def _secret_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=("set", "ls", "rm"), help="store or rotate one, list them, remove one"
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="as in {{secret:NAME}}")
    parser.add_argument("--project", default="", metavar="PROJECT", help="whose it is, in a service")
    add_json(parser)


def _secret(options: argparse.Namespace) -> int:
    import asyncio

    from ringfence.egress.client import prepare
    from ringfence.egress.keys import MasterKey
    from ringfence.egress.secrets import SecretStore

    folder = _folder()
    prepare(folder)
    store = SecretStore(folder, MasterKey(folder))
    if options.action == "ls":
        found = store.list(options.project)
        if options.json:
            print_json(
                {
                    "secrets": [
                        {"name": one.name, "version": one.version, "changed": one.changed} for one in found
                    ]
                }
            )
        elif found:
            table(
                ("name", "version", "changed"),
                [(one.name, str(one.version), _clock(one.changed)) for one in found],
            )
        else:
            print("no secrets are here")
        return 0
    if options.name is None:
        raise InvalidRequest(f"`secret {options.action}` needs a name", hint="as in {{secret:NAME}}")
    if options.action == "rm":
        store.remove(options.project, options.name)
        return 0
    if sys.stdin.isatty():
        import getpass

        value = getpass.getpass(f"value of {options.name}: ")
    else:
        value = sys.stdin.readline(64 * 1024).rstrip("\r\n")
    info = asyncio.run(store.put(options.project, options.name, value))
    if options.json:
        print_json({"name": info.name, "version": info.version})
    else:
        print(f"{info.name}, version {info.version}")
    return 0


VERBS: dict[str, tuple[Any, ...]] = {
    "log": (
        "what sandboxes did at their door: allowed and refused, newest last",
        _log_options,
        _log,
        ("log --denied", "log --sandbox sb-… --json", "log --sandbox sb-… --har > requests.har"),
    ),
    "pending": ("requests that wait for somebody's answer", add_json, _pending),
    "allow": ("let a request pass that waits", _allow_options, _allow, ("allow ask-… --remember",)),
    "deny": ("refuse a request that waits", _question, _deny),
    "learn": (
        "the narrowest policy for what the log shows to have passed",
        _learn_options,
        _learn,
        ("learn --task nightly > policy.yaml",),
    ),
    "secret": (
        "credentials that the door puts into requests: set (from standard input), ls, rm",
        _secret_options,
        _secret,
        ("secret set openai < key.txt", "secret ls"),
    ),
}
