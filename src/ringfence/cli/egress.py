"""``ringfence egress``: the log of the door, its open questions, and the policy that a workload needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ringfence.cli import remote
from ringfence.cli.output import note, print_json, printable, safe, table
from ringfence.cli.parsing import Parser, add_json, add_verbs
from ringfence.model.errors import InvalidRequest, NotFound, RingfenceError

DESCRIPTION = """\
What sandboxes with network mode egress did at their door, what waits for somebody's answer (policy
`onUnknown: ask`), and the secrets that the door puts into requests: of sandboxes of this machine's
command line, and with a service (`ringfence login`) of that, too."""

_MOST_SECRET = 64 * 1024
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


def _selected(
    options: argparse.Namespace, lines: Iterable[dict[str, Any]], sandbox: str | None
) -> Iterator[dict[str, Any]]:
    for line in lines:
        if all(
            wanted is None or line.get(key) == wanted
            for key, wanted in (("sandbox", sandbox), ("task", options.task), ("host", options.host))
        ):
            yield line


def _read_log(options: argparse.Namespace) -> list[dict[str, Any]]:
    from ringfence.egress.log import ConnectionLog

    here = ConnectionLog(_folder() / "connections.jsonl")
    found = list(_selected(options, here.read(), options.sandbox))
    if not found and options.sandbox and remote.configured():
        from ringfence.cli import remote_egress

        # They are its own, though it may have been called by its name.
        found = list(_selected(options, remote_egress.lines(options.sandbox), None))
    return found


def _log(options: argparse.Namespace) -> int:
    if options.lines < 0:
        raise InvalidRequest(f"-n {options.lines} is no number of lines", hint="-n 20: the last 20")
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
        if remote.configured() and not options.sandbox:
            note("this was this machine's log; the service has one of each sandbox: --sandbox ID")
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
    from ringfence.egress.redaction import Redactors

    if options.sandbox is None:
        raise InvalidRequest("--har needs --sandbox", hint="records are kept by sandbox")
    entries = list(Records(_folder(), Redactors()).log(options.sandbox).read())
    document = har(entries, __version__)
    if not entries and remote.configured():
        from ringfence.cli import remote_egress

        document = remote_egress.records(options.sandbox)
    log = document["log"]
    if not log["entries"]:
        raise NotFound(
            f"nothing was recorded of sandbox {options.sandbox}",
            hint="policies with network.record: headers or bodies record requests that are inspected",
        )
    log["entries"] = [entry for entry in log["entries"] if _recorded(options, entry)]
    print_json(document)
    return 0


def _recorded(options: argparse.Namespace, entry: dict[str, Any]) -> bool:
    from urllib.parse import urlsplit

    if options.task is not None and entry.get("_task") != options.task:
        return False
    return options.host is None or urlsplit(entry["request"]["url"]).hostname == options.host


def _clock(seconds: float) -> str:
    import time

    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


# -- questions


def _pending(options: argparse.Namespace) -> int:
    from ringfence.egress.visiting import visits

    found: list[dict[str, Any]] = []
    for visit in visits(_folder()):
        found += visit.call("pending")
    failed: RingfenceError | None = None
    if remote.configured():
        from ringfence.cli import remote_egress

        try:
            found += remote_egress.questions()
        except RingfenceError as error:
            failed = error  # those of this machine can be answered all the same
    if options.json:
        if failed is None:
            print_json({"pending": found})
            return 0
        from ringfence.cli.main import FAILED

        print_json({"pending": found, "error": failed.as_dict()})
        return FAILED
    if found:
        _show_pending(found)
    elif failed is None:
        print("no request waits for an answer")
    if failed is not None:
        raise failed
    return 0


def _show_pending(found: list[dict[str, Any]]) -> None:
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


def _question(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("question", metavar="QUESTION", help="its id, as `ringfence egress pending` shows it")
    add_json(parser)


def _allow_options(parser: argparse.ArgumentParser) -> None:
    _question(parser)
    parser.add_argument("--remember", action="store_true", help="also from now on, as a rule of the sandbox")


def _answer(options: argparse.Namespace, *, allow: bool) -> int:
    result = _answered(options.question, allow=allow, remember=getattr(options, "remember", False))
    if options.json:
        print_json(result)
        return 0
    print(f"{'allowed' if allow else 'denied'}: {safe(result['host'])}:{result['port']}")
    if "rule" in result:
        import json

        print("as a rule for the policy's network.allow:")
        print(f"  - {printable(json.dumps(result['rule']))}")
    return 0


def _answered(question: str, *, allow: bool, remember: bool) -> Any:
    import contextlib

    from ringfence.egress.visiting import visits

    for visit in visits(_folder()):
        with contextlib.suppress(NotFound):
            return visit.call("answer", id=question, allow=allow, remember=remember)
    if remote.configured():
        from ringfence.cli import remote_egress

        with contextlib.suppress(NotFound):
            return remote_egress.answer(question, allow=allow, remember=remember)
    raise NotFound(f"no question {question[:60]!r} is open", hint="`ringfence egress pending` lists them")


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
    parser.add_argument(
        "--local",
        action="store_true",
        help="of this machine's `ringfence run`, though a service is configured",
    )
    parser.add_argument(
        "--project", default="", metavar="PROJECT", help="with --local: whose it is, in a service"
    )
    add_json(parser)


class _Here:
    """The secrets of this machine's command line."""

    def __init__(self, project: str) -> None:
        from ringfence.egress.client import prepare
        from ringfence.egress.keys import MasterKey
        from ringfence.egress.secrets import SecretStore

        folder = _folder()
        prepare(folder)
        self.project, self.store = project, SecretStore(folder, MasterKey(folder))

    def secrets(self) -> list[dict[str, Any]]:
        return [
            {"name": one.name, "version": one.version, "changed": one.changed}
            for one in self.store.list(self.project)
        ]

    def put_secret(self, name: str, value: str) -> dict[str, Any]:
        import asyncio

        info = asyncio.run(self.store.put(self.project, name, value))
        return {"name": info.name, "version": info.version}

    def remove_secret(self, name: str) -> None:
        self.store.remove(self.project, name)


def _secrets_of(options: argparse.Namespace) -> Any:
    if options.local or options.project or not remote.configured():
        return _Here(options.project)
    from ringfence.cli import remote_egress

    return remote_egress


def _value(name: str) -> str:
    """A secret, from the terminal or from standard input.

    Raises:
        InvalidRequest: there is none, or it is not all: what is stored has to be what was given.
    """
    hint = f"`ringfence egress secret set {name} < file`, or type it on a terminal"
    if sys.stdin is None:
        raise InvalidRequest("standard input is closed, and the secret comes from there", hint=hint)
    if sys.stdin.isatty():
        import getpass

        try:
            return getpass.getpass(f"value of {safe(name)}: ")
        except EOFError:
            raise InvalidRequest("no secret was typed", hint=hint) from None
    try:
        value = sys.stdin.read(_MOST_SECRET + 1)
        value.encode()
    except UnicodeError:
        raise InvalidRequest("a secret is text in UTF-8", hint="encode it, e.g. with base64") from None
    if len(value) > _MOST_SECRET:
        raise InvalidRequest("standard input has more than a secret may", hint="32,768 bytes")
    value = value.removesuffix("\n").removesuffix("\r")
    if not value:
        raise InvalidRequest("standard input has no secret", hint=hint)
    if "\n" in value or "\r" in value:
        raise InvalidRequest(
            "standard input has several lines, and a secret is one",
            hint="store what a header or a field has to carry; a key file can be encoded with base64 -w0",
        )
    return value


def _secret(options: argparse.Namespace) -> int:
    if options.action == "ls":
        found = _secrets_of(options).secrets()
        if options.json:
            print_json({"secrets": found})
        elif found:
            rows = [(safe(one["name"]), str(one["version"]), _clock(one["changed"])) for one in found]
            table(("name", "version", "changed"), rows)
        else:
            print("no secrets are here")
        return 0
    if options.name is None:
        raise InvalidRequest(f"`secret {options.action}` needs a name", hint="as in {{secret:NAME}}")
    if options.action == "rm":
        _secrets_of(options).remove_secret(options.name)
        return 0
    value = _value(options.name)
    info = _secrets_of(options).put_secret(options.name, value)
    if options.json:
        print_json({"name": info["name"], "version": info["version"]})
    else:
        print(f"{safe(info['name'])}, version {info['version']}")
    return 0


# -- placeholders


def _revoke_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="SANDBOX", help="of the service: its id, or its label `name`")
    parser.add_argument(
        "of",
        nargs="*",
        metavar="OF",
        help="whose: ids of it or of those that it is a copy of (default: all that it inherited)",
    )
    add_json(parser)


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
    "revoke": (
        "take back placeholders of secrets in a service's sandbox, for good",
        _revoke_options,
        remote.only("remote_egress", "revoke"),
        (
            "revoke sb-…          # those that it inherited as a copy",
            "revoke sb-… sb-…    # those of the second",
        ),
    ),
}
