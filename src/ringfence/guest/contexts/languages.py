"""The languages of contexts: which program runs which kernel."""

from __future__ import annotations

from dataclasses import field
from functools import cache
from importlib import resources

from ringfence.model.errors import InvalidRequest
from ringfence.model.values import dataclass

# Reads as many bytes as it is told from its input, which are the kernel, and runs them. Small, since a
# command line is shown to everybody in the sandbox.
_PYTHON = (
    "import os,sys\nn=int(sys.argv[1]);b=b''\n"
    "while len(b)<n:\n d=os.read(0,n-len(b))\n if not d:sys.exit(3)\n b+=d\n"
    "exec(compile(b,'<ringfence kernel>','exec'),{'__name__':'__main__'})"
)
_NODE = (
    "const fs=require('fs');let n=+process.argv[1],b=Buffer.alloc(n),g=0;"
    "while(g<n){let k;try{k=fs.readSync(0,b,g,n-g)}catch(e){if(e.code==='EAGAIN')continue;throw e}"
    "if(!k)process.exit(3);g+=k}"
    "globalThis.__ringfence=require;new Function('require',b.toString())(require)"
)


@dataclass(frozen=True, slots=True)
class Language:
    """``programs``: tried in this order. ``before``, ``after``: words around the kernel's size."""

    name: str
    kernel: str
    programs: tuple[str, ...]
    before: tuple[str, ...]
    needs: str
    env: dict[str, str] = field(default_factory=dict)

    def source(self) -> bytes:
        """The kernel's text."""
        return _source(self.kernel)

    def argv(self, program: str) -> tuple[str, ...]:
        """The command that reads the kernel from its input."""
        return (program, *self.before, str(len(self.source())))


LANGUAGES = {
    "python": Language(
        "python", "python.py", ("python3", "python"), ("-u", "-c", _PYTHON), "CPython 3.8 or newer"
    ),
}
_ALIASES = {"py": "python", "python3": "python", "js": "javascript", "node": "javascript", "sh": "bash"}


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


@cache
def _source(kernel: str) -> bytes:
    folder = resources.files("ringfence.guest.contexts.kernels")
    source = (folder / kernel).read_text("utf-8")
    if kernel == "python.py":
        source = f"DISPLAY = {(folder / 'python_display.py').read_text('utf-8')!r}\n{source}"
    return source.encode()
