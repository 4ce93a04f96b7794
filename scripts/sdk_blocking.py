"""Writes the blocking half of the SDK, ``src/ringfence/sdk/blocking``, from the asynchronous one.

usage: sdk_blocking.py           write the modules anew
       sdk_blocking.py --check   exit 1 if they are not what this script would write

Every public class ``AsyncX`` becomes ``X``: the same names, arguments, types, docstrings and examples,
without ``async`` and ``await``; each method hands its coroutine to the SDK's background loop. So the SDK is
written once, and both halves are plain code that readers, editors and type checkers understand.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "ringfence" / "sdk"
TARGET = SOURCE / "blocking"
MODULES = (
    "process",
    "files",
    "contexts",
    "ports",
    "volumes",
    "sandbox",
    "jobs",
    "templates",
    "pools",
    "service",
)
SPECIAL = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
}
# How the asynchronous half is built; of no use here.
HIDDEN = {"transport", "hold", "release", "begin", "run_at_once", "follow", "open"}
# Classes and the module that has them.
OWNERS: dict[str, str] = {}


def text(node: ast.AST | None) -> str:
    """The source of a node."""
    return "" if node is None else ast.unparse(node)


def blocking(words: str) -> str:
    """Names and words of the asynchronous half as the blocking half says them."""
    words = re.sub(r"\bOpening\[(\w+)\]", r"\1", words)
    words = re.sub(r"\bAsync(Iterator|Iterable|Generator)\b", r"\1", words)
    words = re.sub(r"\bAsync([A-Z]\w*)", r"\1", words)
    words = re.sub(r"\basync (with|for|def)\b", r"\1", words)
    words = re.sub(r"``async with``", "``with``", words)
    words = re.sub(r"\(await ([^()]*(?:\([^()]*(?:\([^()]*\)[^()]*)*\)[^()]*)*)\)(\.|\[)", r"\1\2", words)
    return re.sub(r"\bawait ", "", words)


def wrapped(annotation: str, value: str) -> str:
    """How a result of this type comes out."""
    match = re.fullmatch(r"(?:Opening\[)?Async(\w+?)\]?( \| None)?", annotation)
    if match and f"Async{match[1]}" in OWNERS:
        name = match[1]
        return f"{name}._of_optional({value})" if match[2] else f"{name}._of({value})"
    match = re.fullmatch(r"Sequence\[Async(\w+)\]", annotation)
    if match:
        return f"[{match[1]}._of(each) for each in {value}]"
    return value


class Method:
    """One method of a class."""

    def __init__(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.node = node
        self.name = SPECIAL.get(node.name, node.name)
        self.decorators = [text(each) for each in node.decorator_list]
        self.returns = text(node.returns)
        self.coroutine = isinstance(node, ast.AsyncFunctionDef)
        self.opening = self.returns.startswith("Opening[")
        self.iterates = self.returns.startswith("AsyncIterator[")
        self.property = "property" in self.decorators
        self.of_class = "classmethod" in self.decorators

    def write(self, owner: str) -> list[str]:
        """Its lines."""
        lines = [f"@{name}" for name in self.decorators]
        lines.append(f"def {self.name}({self._signature()}) -> {self._returned(owner)}:")
        document = ast.get_docstring(self.node)
        if document:
            lines.append(_indented(blocking(document)))
        if self.name == "__next__":
            lines += [
                "    try:",
                f"        return {wrapped(self.returns, 'BACKGROUND.run(self._async.__anext__())')}",
                "    except StopAsyncIteration:",
                "        raise StopIteration from None",
            ]
            return lines
        if self.name in ("__iter__", "__enter__"):
            inner = [] if self.name == "__iter__" else ["    BACKGROUND.run(self._async.__aenter__())"]
            return [*lines, *inner, "    return self"]
        if self.name == "__repr__":
            return [*lines, '    return repr(self._async).removeprefix("Async")']
        target = f"Async{owner}" if self.of_class else "self._async"
        if self.property:
            return [*lines, f"    return {wrapped(self.returns, f'{target}.{self.node.name}')}"]
        call = f"{target}.{self.node.name}({self._passed()})"
        if self.iterates:
            each = wrapped(self.returns.removeprefix("AsyncIterator[").removesuffix("]"), "each")
            found = f"BACKGROUND.iterate({call})"
            return [*lines, f"    return {found if each == 'each' else f'({each} for each in {found})'}"]
        if self.opening:
            call = f"BACKGROUND.run(_opened({call}))"
        elif self.coroutine and self._callbacks():
            call = f"BACKGROUND.run_calling(lambda here: {call})"
        elif self.coroutine:
            call = f"BACKGROUND.run({call})"
        if self.returns == "None":
            return [*lines, f"    {call}"]
        return [*lines, f"    return {wrapped(self.returns, call)}"]

    def _returned(self, owner: str) -> str:
        if self.name in ("__iter__", "__enter__"):
            return owner
        return blocking(self.returns)

    def _arguments(self) -> list[ast.arg]:
        found = self.node.args
        return [*found.posonlyargs, *found.args, *found.kwonlyargs][1:]

    def _callbacks(self) -> bool:
        return any(_is_callback(text(each.annotation)) for each in self._arguments())

    def _signature(self) -> str:
        return blocking(ast.unparse(self.node.args))

    def _passed(self) -> str:
        found = self.node.args
        parts = [self._value(each) for each in found.args[1:]]
        if found.vararg:
            parts.append(f"*{found.vararg.arg}")
        parts += [f"{each.arg}={self._value(each)}" for each in found.kwonlyargs]
        if found.kwarg:
            parts.append(f"**{found.kwarg.arg}")
        return ", ".join(parts)

    def _value(self, argument: ast.arg) -> str:
        kind = text(argument.annotation)
        if _is_callback(kind):
            return f"here({argument.arg})"
        if "AsyncIterable" in kind:
            return f"_flowing({argument.arg})"
        if re.search(r"\bAsync[A-Z]", kind):
            return f"_plain({argument.arg})"
        return argument.arg


def _is_callback(kind: str) -> bool:
    return "Callable[" in kind or re.search(r"\bSink\b", kind) is not None


def classes(module: str) -> list[ast.ClassDef]:
    """The asynchronous classes of a module."""
    tree = ast.parse((SOURCE / f"{module}.py").read_text(encoding="utf-8"))
    return [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.startswith("Async")]


def imports(module: str, body: str) -> list[str]:
    """Import lines of the source that the body still needs, and those of the classes it wraps."""
    tree = ast.parse((SOURCE / f"{module}.py").read_text(encoding="utf-8"))
    lines = []
    plain = re.sub(r'"""(?:.|\n)*?"""', "", body)
    used = set(re.findall(r"\b[A-Za-z_]\w*\b", plain))
    for node in tree.body:
        if isinstance(node, ast.Import):
            lines += [f"import {alias.name}" for alias in node.names if alias.name in used]
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            for alias in node.names:
                name = alias.asname or alias.name
                if name in used and not name.startswith("Async"):
                    lines.append(f"from {node.module} import {text(alias)}")
                if name.startswith("AsyncIter") and name.removeprefix("Async") in used:
                    lines.append(f"from collections.abc import {name.removeprefix('Async')}")
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id in used
        ):
            lines.append(f"from ringfence.sdk.{module} import {node.targets[0].id}")
    for name, owner in OWNERS.items():
        if name in used:
            lines.append(f"from ringfence.sdk.{owner} import {name}")
        if name.removeprefix("Async") in used and owner != module:
            lines.append(f"from ringfence.sdk.blocking.{owner} import {name.removeprefix('Async')}")
    helpers = [name for name in ("Facade", "_flowing", "_opened", "_plain") if name in used]
    lines.append(f"from ringfence.sdk.blocking.base import {', '.join(helpers)}")
    if "BACKGROUND" in used:
        lines.append("from ringfence.sdk.background import BACKGROUND")
    return sorted(set(lines))


def render(module: str) -> str:
    """One module of the blocking half."""
    body = "\n\n\n".join(_class(node) for node in classes(module))
    head = f'"""``ringfence.sdk.{module}`` without ``await``; scripts/sdk_blocking.py writes it."""'
    lines = [head, "", "from __future__ import annotations", "", *imports(module, body), "", "", body, ""]
    return _formatted("\n".join(lines))


def _class(node: ast.ClassDef) -> str:
    name = node.name.removeprefix("Async")
    lines = [f"class {name}(Facade):\n" + _indented(blocking(ast.get_docstring(node) or name))]
    lines.append(f"    _async: Async{name}")
    for member in node.body:
        if not isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if member.name == "__init__":
            if name == "Service":  # the only one that users make themselves
                lines.append(_init(name, member))
            continue
        private = member.name.startswith("_") and member.name not in {*SPECIAL, "__repr__"}
        if not (private or member.name in HIDDEN):
            lines.append(textwrap.indent("\n".join(Method(member).write(name)), "    "))
    lines += [_field(field, kind) for field, kind in _public_fields(node)]
    return "\n\n".join(lines)


def _indented(document: str) -> str:
    """A docstring, one level in."""
    inner = document.replace("\\", "\\\\")
    return textwrap.indent(f'"""{inner}\n"""' if "\n" in inner else f'"""{inner}"""', "    ")


def _public_fields(node: ast.ClassDef) -> list[tuple[str, str]]:
    """Attributes that ``__init__`` takes over from its arguments."""
    found = []
    for member in node.body:
        if not (isinstance(member, ast.FunctionDef) and member.name == "__init__"):
            continue
        kinds = {each.arg: text(each.annotation) for each in [*member.args.args, *member.args.kwonlyargs]}
        for line in ast.walk(member):
            if not isinstance(line, ast.Assign):
                continue
            target, value = text(line.targets[0]), text(line.value)
            if target.startswith("self.") and not target.startswith("self._"):
                kind = kinds.get(value.split(".")[0], "Any") if "." not in value else "str"
                found.append((target.removeprefix("self."), kind))
    return found


def _field(name: str, kind: str) -> str:
    value = wrapped(kind, f"self._async.{name}")
    head = f"    @property\n    def {name}(self) -> {blocking(kind)}:\n"
    return f'{head}        """As it was last seen."""\n        return {value}'


def _init(name: str, node: ast.FunctionDef) -> str:
    method = Method(node)
    head = f"    def __init__({method._signature()}) -> None:\n"
    return f"{head}        self._async = Async{name}({method._passed()})"


def _formatted(source: str) -> str:
    for command in (["check", "--select", "I,F401", "--fix", "-q"], ["format", "-q"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(TARGET / "x.py"), "-"],
            input=source, capture_output=True, text=True, cwd=ROOT, check=False,
        )  # fmt: skip
        if done.returncode and not done.stdout:
            raise SystemExit(done.stderr + source)
        source = done.stdout
    return source


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    present = [module for module in MODULES if (SOURCE / f"{module}.py").exists()]
    for module in present:
        OWNERS.update({node.name: module for node in classes(module)})
    stale = []
    for module in present:
        place, wanted = TARGET / f"{module}.py", render(module)
        if not place.exists() or place.read_text(encoding="utf-8") != wanted:
            stale.append(place)
            if not arguments:
                place.write_text(wanted, encoding="utf-8")
                print(f"wrote {place.relative_to(ROOT)}")
    if stale and arguments:
        print("not what scripts/sdk_blocking.py writes:", *(p.name for p in stale), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
