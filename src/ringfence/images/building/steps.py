"""What the instructions come to: a list of steps, each with all that its result depends on."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import replace

from ringfence.images.building.definition import Definition, Heredoc, Instruction, wrong
from ringfence.images.building.words import BadWords, expand, split
from ringfence.images.contract import TemplateConfig
from ringfence.model.errors import InvalidRequest
from ringfence.model.values import dataclass

SHELL = ("/bin/sh", "-c")
SCRATCH = "scratch"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_ONLY_HEREDOC = re.compile(r"<<-?(['\"]?)[A-Za-z_][A-Za-z0-9_]*\1", re.ASCII)
_FLAGS = {
    "FROM": ("platform",),
    "RUN": ("network",),
    "COPY": ("chown", "chmod", "link"),
}
_FLAG_HINTS = {
    "from": "copy from another template is not built here: build in one, or COPY from the context",
    "mount": "a step has no mounts: what it needs is copied in before, and removed in the same RUN",
    "security": "steps run with a sandbox's own rights only",
    "parents": "write one COPY for each folder",
    "exclude": "name it in .dockerignore",
}


@dataclass(frozen=True, slots=True)
class Step:
    """One step. ``kind``: run, copy or folder (WORKDIR's); else only ``config`` changes.

    ``config`` is the template's after the step. ``env`` of a run has the build arguments, too. ``owner`` is
    what ``--chown`` says. ``inline``: (name, text, mode) of files written in the definition itself.
    """

    line: int
    name: str
    text: str
    kind: str
    config: TemplateConfig
    argv: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    sources: tuple[str, ...] = ()
    target: str = ""
    owner: str = ""
    mode: int | None = None
    inline: tuple[tuple[str, str], ...] = ()


def base_of(definition: Definition, arguments: Mapping[str, str]) -> str:
    """What FROM names, with the build arguments put in.

    Raises:
        InvalidRequest: it can't be read.
    """
    known: dict[str, str] = {}
    for each in definition.instructions:
        if each.name == "ARG":
            for name, value in _arguments(definition, each, known, arguments):
                if value is not None:
                    known[name] = value
            continue
        _check_flags(definition, each)
        for flag, value in each.flags:
            _check_platform(definition, each, flag, value)
        words = _split(definition, each, each.rest, known)
        if len(words) not in (1, 3) or (len(words) == 3 and words[1].lower() != "as"):
            raise wrong(
                definition.file, each.line, "FROM", "not of the form FROM TEMPLATE", "as in FROM python:3.12"
            )
        return words[0]
    raise InvalidRequest(f"{definition.file}: there is no FROM", hint="begin with FROM TEMPLATE")


def work_out(definition: Definition, base: TemplateConfig, arguments: Mapping[str, str]) -> list[Step]:
    """The steps after FROM, given the configuration that the base brings.

    Raises:
        InvalidRequest: an instruction makes no sense, or a build argument that nothing declares.
    """
    return _Working(definition, base, arguments).run()


class _Working:
    def __init__(self, definition: Definition, base: TemplateConfig, arguments: Mapping[str, str]) -> None:
        self._definition = definition
        self._config = base
        self._arguments = arguments
        self._global: dict[str, str] = {}
        self._declared: dict[str, str] = {}
        self._names: set[str] = set()
        self._shell: tuple[str, ...] = SHELL
        self._command_set = False

    def run(self) -> list[Step]:
        steps: list[Step] = []
        begun = False
        for each in self._definition.instructions:
            if each.name == "FROM":
                begun = True
                continue
            if not begun:  # an ARG before FROM
                for name, value in _arguments(self._definition, each, self._global, self._arguments):
                    self._names.add(name)
                    if value is not None:
                        self._global[name] = value
                continue
            _check_flags(self._definition, each)
            step = self._step(each)
            if step is not None:
                steps.append(step)
        unknown = sorted(set(self._arguments) - self._names)
        if unknown:
            raise InvalidRequest(
                f"--build-arg {unknown[0]}: {self._definition.file} has no ARG of that name",
                hint=f"declared: {', '.join(sorted(self._names)) or 'none'}",
            )
        return steps

    @property
    def _variables(self) -> dict[str, str]:
        return self._declared | dict(self._config.env)

    def _step(self, each: Instruction) -> Step | None:
        handler = getattr(self, "_do_" + each.name.lower())
        result = handler(each)
        assert result is None or isinstance(result, Step)
        return result

    def _made(self, each: Instruction, kind: str = "", **values: object) -> Step:
        return Step(each.line, each.name, each.text, kind, self._config, **values)  # type: ignore[arg-type]

    # -- one method an instruction

    def _do_arg(self, each: Instruction) -> Step | None:
        for name, value in _arguments(self._definition, each, self._variables, self._arguments):
            self._names.add(name)
            if value is None:
                value = self._global.get(name)  # as declared before FROM
            if value is not None:
                self._declared[name] = value
        return None

    def _do_run(self, each: Instruction) -> Step:
        for flag, value in each.flags:
            if value != "none":
                raise self._wrong(
                    each,
                    f"--{flag}={value}: build steps have no network",
                    "copy in what the step needs with COPY",
                )
        words = each.words()
        script = _script(each)
        if script is not each.rest and script.startswith("#!"):
            raise self._wrong(
                each,
                "a document is given to the shell, whatever its first line says",
                "as in RUN python3 <<EOF",
            )
        if words is not None and not each.heredocs:
            if not words or not words[0]:
                raise self._wrong(each, "no command", 'as in RUN ["make", "install"]')
            argv = words
        else:
            argv = (*self._shell, script)
        return self._made(each, "run", argv=argv, env=tuple(self._variables.items()))

    def _do_copy(self, each: Instruction) -> Step:
        flags = dict(each.flags)
        inline: list[tuple[str, str]] = []
        words = each.words()
        if words is None:
            names = {heredoc.name for heredoc in each.heredocs}
            parts = self._words(each, each.rest)
            words = tuple(
                word for word in parts if not (word.startswith("<<") and word.strip("<-'\"") in names)
            )
            for heredoc in each.heredocs:
                inline.append((heredoc.name, self._body(each, heredoc)))
        else:
            words = tuple(self._expand(each, word, quotes=False) for word in words)
        if len(words) + len(inline) < 2 or not words:
            raise self._wrong(each, "needs a source and a destination", "as in COPY app /srv/app")
        target = words[-1]
        if inline and len(words) == 1 and len(inline) == 1 and not target.endswith("/"):
            inline = [(posixpath.basename(target), inline[0][1])]
            target = posixpath.dirname(target) + "/"
        if len(words) + len(inline) > 2 and not target.endswith("/"):
            raise self._wrong(each, f"{target} must end with a slash: several are copied into it")
        mode = None
        if "chmod" in flags:
            text = self._expand(each, flags["chmod"])
            if not re.fullmatch(r"0?[0-7]{3,4}", text, re.ASCII):
                raise self._wrong(each, f"--chmod={text} is no mode", "as in --chmod=755")
            mode = int(text, 8) & 0o1777
        owner = self._expand(each, flags.get("chown", ""))
        if "chown" in flags and not re.fullmatch(
            r"[A-Za-z0-9_.][A-Za-z0-9_.-]*(:[A-Za-z0-9_.-]+)?", owner, re.ASCII
        ):
            raise self._wrong(each, f"--chown={owner} is no user", "as in --chown=1000:1000 or --chown=app")
        for source in words[:-1]:
            if ".." in source.split("/"):
                raise self._wrong(
                    each,
                    f"{source} climbs out of the context",
                    "only what is in the context folder can be copied",
                )
        return self._made(
            each,
            "copy",
            sources=words[:-1],
            target=self._absolute(each, target),
            owner=owner,
            mode=mode,
            inline=tuple(inline),
        )

    def _do_env(self, each: Instruction) -> Step:
        self._set(env=_merged(self._config.env, self._pairs(each)))
        return self._made(each)

    def _do_label(self, each: Instruction) -> Step:
        self._set(labels=tuple(sorted(_merged(self._config.labels, self._pairs(each)))))
        return self._made(each)

    def _do_user(self, each: Instruction) -> Step:
        user = self._expand(each, each.rest)
        if not re.fullmatch(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*(:[A-Za-z0-9_.-]+)?", user, re.ASCII):
            raise self._wrong(each, f"{user!r} is no user", "as in USER app, USER 1000 or USER 1000:1000")
        self._set(user=user, uid=None, gid=None)
        return self._made(each)

    def _do_workdir(self, each: Instruction) -> Step:
        path = self._absolute(each, self._expand(each, each.rest)).rstrip("/") or "/"
        self._set(workdir="" if path == "/" else path)
        return self._made(each, "folder", target=path)

    def _command(self, each: Instruction) -> tuple[str, ...]:
        words = each.words()
        if words is None:
            return (*self._shell, each.rest)
        return words

    def _do_entrypoint(self, each: Instruction) -> Step:
        # The base's arguments are those of the base's entry point.
        cmd = self._config.cmd if self._command_set else ()
        self._set(entrypoint=self._command(each), cmd=cmd)
        return self._made(each)

    def _do_cmd(self, each: Instruction) -> Step:
        self._command_set = True
        self._set(cmd=self._command(each))
        return self._made(each)

    def _do_start(self, each: Instruction) -> Step:
        self._set(start=self._command(each))
        return self._made(each)

    def _do_ready(self, each: Instruction) -> Step:
        self._set(ready=self._command(each))
        return self._made(each)

    def _do_shell(self, each: Instruction) -> None:
        words = each.words()
        if not words or not words[0]:
            raise self._wrong(each, "must be a list of words", 'as in SHELL ["/bin/bash", "-c"]')
        self._shell = words

    # -- parts

    def _set(self, **values: object) -> None:
        self._config = replace(self._config, **values)  # type: ignore[arg-type]

    def _pairs(self, each: Instruction) -> list[tuple[str, str]]:
        first = each.rest.split(None, 1)
        pairs: list[tuple[str, str]] = []
        if "=" not in first[0]:  # the old form: ENV KEY the whole rest
            if len(first) < 2 or each.name == "LABEL":
                raise self._wrong(each, f"{first[0]} is not of the form KEY=value")
            pairs.append((first[0], self._expand(each, first[1].strip())))
        else:
            for word in self._words(each, each.rest):
                key, equals, value = word.partition("=")
                if not equals:
                    raise self._wrong(each, f"{word} is not of the form KEY=value", 'quote blanks: KEY="a b"')
                pairs.append((key, value))
        for key, _value in pairs:
            if not key or (each.name == "ENV" and not _NAME.fullmatch(key)):
                raise self._wrong(each, f"{key!r} is no name of a variable")
        return pairs

    def _absolute(self, each: Instruction, path: str) -> str:
        slash = "/" if path.endswith("/") or posixpath.basename(path) == "." else ""
        whole = posixpath.join("/", self._config.workdir, path)
        if not path or len(whole) > 4000:
            raise self._wrong(each, f"{path[:100]!r} is no path")
        whole = "/" + posixpath.normpath(whole).lstrip("/")
        return whole if whole == "/" else whole + slash

    def _body(self, each: Instruction, heredoc: Heredoc) -> str:
        if heredoc.quoted:
            return heredoc.text
        # In a document quotes are letters like others.
        guarded = heredoc.text.replace("'", "\\'").replace('"', '\\"')
        return self._expand(each, guarded)

    def _words(self, each: Instruction, text: str) -> list[str]:
        return _split(self._definition, each, text, self._variables)

    def _expand(self, each: Instruction, text: str, *, quotes: bool = True) -> str:
        escape = self._definition.escape
        if not quotes:
            text = text.replace("\\", "\\\\").replace("'", "\\'").replace('"', '\\"')
            escape = "\\"
        try:
            return expand(text, self._variables, escape)
        except BadWords as error:
            raise self._wrong(each, str(error)) from None

    def _wrong(self, each: Instruction, message: str, hint: str = "") -> InvalidRequest:
        return wrong(self._definition.file, each.line, each.name, message, hint)


def _merged(old: tuple[tuple[str, str], ...], new: list[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((dict(old) | dict(new)).items())


def _arguments(
    definition: Definition, each: Instruction, known: Mapping[str, str], given: Mapping[str, str]
) -> list[tuple[str, str | None]]:
    """(name, value or None) of one ARG."""
    found: list[tuple[str, str | None]] = []
    for word in _split(definition, each, each.rest, known):
        name, equals, default = word.partition("=")
        if not _NAME.fullmatch(name):
            raise wrong(definition.file, each.line, "ARG", f"{name!r} is no name of an argument")
        found.append((name, given.get(name, default if equals else None)))
    return found


def _split(definition: Definition, each: Instruction, text: str, known: Mapping[str, str]) -> list[str]:
    try:
        return split(text, known, definition.escape)
    except BadWords as error:
        raise wrong(definition.file, each.line, each.name, str(error)) from None


def _check_flags(definition: Definition, each: Instruction) -> None:
    for name, _ in each.flags:
        if name not in _FLAGS.get(each.name, ()):
            hint = (
                _FLAG_HINTS.get(name)
                or f"known: {', '.join(f'--{n}' for n in _FLAGS.get(each.name, ())) or 'none'}"
            )
            raise wrong(definition.file, each.line, each.name, f"--{name} is not known here", hint)


def _check_platform(definition: Definition, each: Instruction, flag: str, value: str) -> None:
    from ringfence.images.manifests import machine

    if value not in (f"linux/{machine()}", machine(), ""):
        raise wrong(
            definition.file, each.line, each.name, f"--{flag}={value}: this machine is linux/{machine()}",
            "steps run here, so a template is built for this machine only",
        )  # fmt: skip


def _script(each: Instruction) -> str:
    """What the shell is given."""
    if not each.heredocs:
        return each.rest
    if len(each.heredocs) == 1 and _ONLY_HEREDOC.fullmatch(each.rest):
        return each.heredocs[0].text
    return each.rest + "\n" + "".join(f"{part.text}{part.name}\n" for part in each.heredocs)
