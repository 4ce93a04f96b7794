"""Entry point: finds the command, imports its module, turns errors into one message and an exit code.

Nothing but ``sys`` and ``os`` is imported before the command is known: ``ringfence --help`` is a string.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing is not imported for a type or two
if TYPE_CHECKING:
    from typing import NoReturn

# name: (module, what the command list says)
COMMANDS = {
    "run": ("run", "run one command in a sandbox of its own"),
    "setup": ("setup", "install what runtimes need, and show which work"),
    "doctor": ("doctor", "what works on this machine, what does not, and how to fix it"),
    "probe": ("probe", "start a sandbox and measure what its wall really is"),
    "bench": ("bench", "measure speed and memory beside other tools"),
    "conformance": ("conformance", "run the shipped test suite on the runtimes of this machine"),
    "template": ("template", "root file systems for sandboxes: add, list, show, remove"),
    "sandbox": ("sandbox", "sandboxes: create, exec, code, cp, snapshot, fork, reset, pause, remove …"),
    "login": ("login", "keep the address of a service, and your key"),
    "pool": ("pool", "sandboxes that a service starts ahead: create, list, show, queue, remove"),
    "job": ("job", "commands that run to completion at a service: run, list, show, logs, cancel, retry"),
    "volume": ("volume", "named storage at a service: create, list, show, export, import, remove"),
    "key": ("key", "keys of a project at a service: create, list, rotate, revoke"),
    "quota": ("quota", "limits of a project at a service, and what it has"),
    "top": ("top", "what lives at a service: a live table"),
    "snapshot": ("snapshot", "saved sandboxes: list, check, remove"),
    "list": ("listing", "sandboxes that were kept; the same as `sandbox ls`"),
    "stop": ("stopping", "end kept sandboxes and remove what is theirs; the same as `sandbox rm`"),
    "serve": ("serve", "serve sandboxes over HTTP: API, orchestrator and node in one command"),
    "node": ("node", "serve this machine's sandboxes to an API, over a unix socket"),
    "egress": ("egress", "the door to the network: its log, open questions, secrets, and policies learned"),
    "completion": ("completion", "print the completion script for bash, zsh or tcsh"),
    "version": ("version", "print the version"),
}
FAILED = 125  # Ringfence's own failure, as docker and env use it: the command's codes stay its own

USAGE = "usage: ringfence COMMAND [options]"


def main(arguments: list[str]) -> int:
    """Run one command line; returns the exit code. Prints at most one error message, never a traceback
    (unless ``RINGFENCE_DEBUG=1``).
    """
    if arguments[:1] == ["help"] and len(arguments) > 1:
        return main([arguments[1], "--help"])
    if arguments[:1] in (["-V"], ["--version"]):
        arguments = ["version", *arguments[1:]]
    try:
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            return _print_help(to_stderr=not arguments)
        return _dispatch(arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Who reads our tables went away; nothing to tell anybody. Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except Exception as error:
        return _report(error, _wants_json(arguments))


def _let_interrupts_end_us() -> None:
    """Ctrl-C kills us, until ``run`` handles signals itself: before that nothing was made.

    Python's own handler raises KeyboardInterrupt wherever it is just then, and where that is a callback of
    the import system's, as it often is in the first tenth of a second, it is printed and lost.
    """
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if who started us ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)


_came: list[int] | None = None  # signals that ended us; None: we are not a process of our own


def _end_as_interrupted() -> None:
    """SIGTERM (of `timeout`, say) and SIGHUP (the terminal was closed) take down what was begun, as Ctrl-C
    does: without a handler they would leave it. Commands with handlers of their own put them over these.
    """
    import signal

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return  # who started us ignores it: then these end us at once

    def end(number: int, _: object) -> None:
        assert _came is not None
        _came.append(number)
        if len(_came) > 2:  # twice was not enough
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        signal.raise_signal(signal.SIGINT)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # not under nohup
            signal.signal(number, end)


def entry() -> NoReturn:
    """The console script. Leaves without the interpreter's tear-down, which costs as much as a sandbox."""
    if sys.argv[1:2] == ["run"]:
        _let_interrupts_end_us()
    global _came
    _came = []
    for descriptor in (0, 1, 2):
        # Started with a standard stream closed (`<&-`): its number would go to the next socket we open, and
        # what is meant for a user would be written there.
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if (
        sys.stdout is None or sys.stderr is None
    ):  # what Python makes of a closed one: nothing can be asked of it
        nowhere = open(os.devnull, "w")  # noqa: SIM115 - for as long as we live
        sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
    for stream in (sys.stdout, sys.stderr):
        # What the terminal's encoding has no character for is shown as one that it has.
        if getattr(stream, "errors", "") == "strict":
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    code = main(sys.argv[1:])
    if _came and code == 130:
        code = 128 + _came[0]
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (BrokenPipeError, ValueError):
        code = code or 141
    except OSError as error:  # the disk that stdout goes to is full
        code = code or _report(error, as_json=False)
    os._exit(code)


def _dispatch(arguments: list[str]) -> int:
    name = arguments[0]
    if name not in COMMANDS:
        from ringfence.cli.parsing import unknown_command

        raise unknown_command(name, list(COMMANDS))
    from importlib import import_module

    module = import_module("ringfence.cli." + COMMANDS[name][0])
    if name == "run" and (quick := module.parse_quickly(arguments[1:])) is not None:
        return int(module.main(quick))
    from ringfence.cli.parsing import Parser

    parser = Parser(prog="ringfence " + name)
    module.configure(parser)
    options = parser.parse_command_line(arguments[1:])
    if _came is not None and name != "run":  # which has its own; nothing was begun so far
        _end_as_interrupted()
    code: int = module.main(options)
    return code


def _print_help(*, to_stderr: bool) -> int:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{text}" for name, (_, text) in COMMANDS.items()]
    text = "\n".join(
        [
            USAGE,
            "",
            "Runs code that nobody has vouched for inside a wall as strong as its risk calls for.",
            "",
            "commands:",
            *lines,
            "",
            "options:",
            "  -h, --help     this text; `ringfence COMMAND --help` for a command's own",
            "  -V, --version  print the version",
            "",
            "examples:",
            "  ringfence run -- python3 -c 'print(6 * 7)'",
            "  ringfence run --memory 256M --timeout 30s --file job.py:job.py -- python3 job.py",
            "  ringfence run -i -- bash",
            "  ringfence doctor",
            "",
            "Environment: RINGFENCE_HOME (where state lives), RINGFENCE_DEBUG=1 (tracebacks), NO_COLOR.",
        ]
    )
    print(text, file=sys.stderr if to_stderr else sys.stdout, flush=True)
    return FAILED if to_stderr else 0


def _wants_json(arguments: list[str]) -> bool:
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in own


def _report(error: Exception, as_json: bool) -> int:
    if os.environ.get("RINGFENCE_DEBUG", "") not in ("", "0"):
        import traceback

        traceback.print_exception(error)
    from contextlib import suppress

    from ringfence.cli.output import print_error

    try:
        print_error(error, as_json=as_json)
    except OSError:  # nothing can be written to stdout, which may be the very error
        with suppress(OSError):
            print_error(error, as_json=False)
    return getattr(error, "exit_code", FAILED)
