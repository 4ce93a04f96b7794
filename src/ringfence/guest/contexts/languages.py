"""The languages of contexts: which program runs which kernel, and how a request to it is said."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Final

from ringfence.guest.contexts.reading import Lines, Reader, Records
from ringfence.model.errors import InvalidRequest
from ringfence.model.values import dataclass

MOST_CODE: Final = 4 * 1024 * 1024  # bytes of one call
_PIECE: Final = 8192  # characters of a request a line: lines of two host processes must not mix
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}\Z")

# Each reads as many bytes as it is told from its input, which are the kernel, and runs them. Small, since a
# command line is shown to everybody in the sandbox. What lies in the folder is not for a kernel to import: a
# `json.py` there is the user's.
_PYTHON = (
    "import os,sys\nsys.path[:]=filter(None,sys.path)\nn=int(sys.argv[1]);b=b''\n"
    "while len(b)<n:\n d=os.read(0,n-len(b))\n if not d:sys.exit(3)\n b+=d\n"
    "exec(compile(b,'<ringfence kernel>','exec'),{'__name__':'__main__'})"
)
_SHELL = (
    'command -v "$0" >/dev/null || exit 127; exec 4<&0 0</dev/null 3>&1 1>&2; exec "$0" "$@"'  # dup for Node
)
_NODE = (
    "{const n=+process.argv[1],b=Buffer.alloc(n);let g=0;"
    "while(g<n){const k=require('fs').readSync(4,b,g,n-g);if(!k)process.exit(3);g+=k}"
    "new Function('require',b.toString())(require)}"
)
_BASH = (
    "exec 4<&0 0</dev/null 5<&0 6>&1 7>&2; __rf_boot() { local LC_ALL=C k; "
    'IFS= read -r -N "$1" -u 4 k || exit 3; __rf_kernel=$k; }; __rf_boot "$1"; set --; eval "$__rf_kernel"'
)


@dataclass(frozen=True, slots=True)
class Language:
    """``programs``: tried in this order; ``command``: makes the argv of a program and the kernel's size."""

    name: str
    kernel: str
    programs: tuple[str, ...]
    needs: str
    command: Callable[[str, int], tuple[str, ...]]
    request: Callable[[str, str, Mapping[str, str], bool], bytes]
    reader: Callable[[str, bool], Reader]
    forks: bool = False  # it can run a call in a copy of itself
    zygote: str | None = None  # the program whose copies are contexts, if there is one

    def source(self) -> bytes:
        """The kernel's text."""
        return _source(self.kernel)

    def argv(self, program: str) -> tuple[str, ...]:
        """The command that reads the kernel from its input."""
        return self.command(program, len(self.source()))

    def zygote_source(self) -> bytes:
        """The zygote's text."""
        assert self.zygote is not None
        return _source(self.zygote)


def language(name: str) -> Language:
    """A language by its name.

    Raises:
        InvalidRequest: unknown.
    """
    found = LANGUAGES.get(_ALIASES.get(name, name))
    if found is None:
        raise InvalidRequest(
            f"no context can run {name[:64]!r}", hint="languages: " + ", ".join(sorted(LANGUAGES))
        )
    return found


def _lines(call: str, code: str, env: Mapping[str, str], fresh: bool = False) -> bytes:
    """A request to a kernel that reads JSON, long ones in parts."""
    text = json.dumps({"op": "run", "x": call, "code": code, "env": dict(env), "fresh": fresh})
    if len(text) <= _PIECE:
        return text.encode() + b"\n"
    pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
    lines = [
        json.dumps({"op": "last" if at == len(pieces) - 1 else "part", "x": call, "d": piece})
        for at, piece in enumerate(pieces)
    ]
    return "\n".join(lines).encode() + b"\n"


def _sized(call: str, code: str, env: Mapping[str, str], fresh: bool = False) -> bytes:
    """A request to bash: declarations and code by their lengths."""
    wrong = [name for name in env if not _NAME.match(name)]
    if wrong:
        raise InvalidRequest(f"{wrong[0][:64]!r} is no name of a variable in bash")
    if "\0" in code or any("\0" in value for value in env.values()):
        raise InvalidRequest("a NUL character, which bash can't read")
    said = "".join(f"local -x {name}={shlex.quote(value)}\n" for name, value in env.items())
    first, second = (text.encode("utf-8", "surrogateescape") for text in (said, code))
    return f"{call} {len(first)} {len(second)}\n".encode() + first + second


LANGUAGES: Final = {
    "python": Language(
        "python",
        "python.py",
        ("python3", "python"),
        "CPython 3.8 or newer",
        lambda program, size: (program, "-u", "-c", _PYTHON, str(size)),
        _lines,
        Lines,
        forks=True,
        zygote="python_zygote.py",
    ),
    "javascript": Language(
        "javascript",
        "node.js",
        ("node", "nodejs"),
        "Node 14 or newer",
        lambda program, size: ("sh", "-c", _SHELL, program, "-e", _NODE, str(size)),
        _lines,
        Lines,
    ),
    "bash": Language(
        "bash",
        "bash.sh",
        ("bash",),
        "bash 4 or newer",
        lambda program, size: (program, "--noprofile", "--norc", "-c", _BASH, "bash", str(size)),
        _sized,
        Records,
    ),
}
_ALIASES: Final = {
    "py": "python",
    "python3": "python",
    "js": "javascript",
    "node": "javascript",
    "sh": "bash",
}


@cache
def _source(kernel: str) -> bytes:
    folder = resources.files("ringfence.guest.contexts.kernels")
    source = (folder / kernel).read_text("utf-8")
    if kernel == "python.py":
        display, output = (
            (folder / f"python_{name}.py").read_text("utf-8") for name in ("display", "output")
        )
        source = f"DISPLAY = {display!r}\n{output}\n{source}"
    elif kernel == "python_zygote.py":
        source = f"KERNEL = {_source('python.py').decode()!r}\n{source}"
    return source.encode()
