"""Definitions: what is read, what each instruction comes to, and how mistakes are told."""

from __future__ import annotations

import random

import pytest

from ringfence.images.building.definition import LARGEST, parse
from ringfence.images.building.steps import Step, base_of, work_out
from ringfence.images.building.words import BadWords, expand, split
from ringfence.images.contract import TemplateConfig
from ringfence.model.errors import InvalidRequest

BASE = TemplateConfig(env=(("PATH", "/bin"),), workdir="", cmd=("/bin/sh",))
VARIABLES = {"A": "one", "EMPTY": "", "B": "two words"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a  b\tc", ["a", "b", "c"]),
        ("'a b' \"c d\"", ["a b", "c d"]),
        ("$A ${A}x x$A", ["one", "onex", "xone"]),
        ("$B", ["two words"]),  # never split
        ("'$A' \"$A\"", ["$A", "one"]),
        ("\\$A \"\\$A\" a\\ b", ["$A", "$A", "a b"]),
        ('"a\\b"', ["a\\b"]),
        ("${X:-else} ${A:-else} ${EMPTY:-else} ${EMPTY-else}", ["else", "one", "else", ""]),
        ("${A:+then} x${X:+then}", ["then", "x"]),
        ("${X:-${A}}", ["one"]),
        ("$ $1 a$", ["$", "$1", "a$"]),
        ("", []),
        ("''", [""]),
    ],
)  # fmt: skip
def test_words(text: str, words: list[str]) -> None:
    assert split(text, VARIABLES) == words


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("'a", "not closed"),
        ('"a', "not closed"),
        ("${A", "not closed"),
        ("${}", "names no variable"),
        ("${1}", "names no variable"),
        ("${A/x/y}", "known forms"),
        ("${X:?it must be given}", "it must be given"),
    ],
)
def test_words_that_make_no_sense(text: str, why: str) -> None:
    with pytest.raises(BadWords, match=why):
        split(text, VARIABLES)


def test_variables_that_double_one_another_are_bounded() -> None:
    with pytest.raises(BadWords, match="larger than 1 MiB"):
        split("$A" * 3000, {"A": "x" * 1000})
    with pytest.raises(BadWords, match="too deep"):
        expand("${X:-" * 50 + "a" + "}" * 50, {})


def steps(text: str, **arguments: str) -> list[Step]:
    return work_out(parse(text.encode()), BASE, arguments)


def test_a_whole_definition() -> None:
    found = steps(
        "# syntax=docker/dockerfile:1\n"
        "ARG V=3\n"
        "FROM debian:${V:-4} AS x\n"
        "ARG V\n"
        "# a comment\n"
        'ENV A=1 B="two ${V} words" \\\n'
        "   # one inside\n"
        "   C='no $V'\n"
        "RUN echo hi \\\n"
        "  && echo $((1<<3)) $A\n"
        'RUN ["/bin/echo", "$A"]\n'
        "WORKDIR /srv\n"
        "WORKDIR app\n"
        "COPY --chown=app:app --chmod=640 a $A/*.py dir/\n"
        "USER app\n"
        "LABEL z=2 a=1\n"
        'ENTRYPOINT ["/bin/x"]\n'
        'CMD run "$A"\n'
        'START ["/s", "$A"]\n'
        "READY test -e /tmp/ok\n",
        V="9",
    )
    last = found[-1].config
    assert dict(last.env) == {"PATH": "/bin", "A": "1", "B": "two 9 words", "C": "no $V"}
    runs = [step for step in found if step.kind == "run"]
    assert runs[0].argv == ("/bin/sh", "-c", "echo hi   && echo $((1<<3)) $A")  # the shell's own variables
    assert runs[1].argv == ("/bin/echo", "$A")
    assert dict(runs[0].env)["V"] == "9" and "V" not in dict(last.env)
    copy = next(step for step in found if step.kind == "copy")
    assert (copy.sources, copy.target, copy.owner, copy.mode) == (
        ("a", "1/*.py"),
        "/srv/app/dir/",
        "app:app",
        0o640,
    )
    assert [step.target for step in found if step.kind == "folder"] == ["/srv", "/srv/app"]
    assert (last.user, last.workdir, last.labels) == ("app", "/srv/app", (("a", "1"), ("z", "2")))
    assert last.entrypoint == ("/bin/x",) and last.cmd == ("/bin/sh", "-c", 'run "$A"')
    assert last.start == ("/s", "$A") and last.ready == ("/bin/sh", "-c", "test -e /tmp/ok")
    assert [step.line for step in found][:4] == [6, 9, 11, 12]


def test_the_base() -> None:
    definition = parse(b"ARG V=3\nARG W=$V.1\nFROM python:${W}\n")
    assert base_of(definition, {}) == "python:3.1"
    assert base_of(definition, {"W": "4"}) == "python:4"


def test_an_entry_point_drops_the_arguments_of_the_base() -> None:
    assert steps('FROM x\nENTRYPOINT ["a"]\n')[-1].config.cmd == ()
    assert steps('FROM x\nCMD ["b"]\nENTRYPOINT ["a"]\n')[-1].config.cmd == ("b",)
    assert steps("FROM x\nENV A=1\n")[-1].config.cmd == ("/bin/sh",)


def test_documents_in_the_definition() -> None:
    found = steps(
        "FROM x\nENV A=1\nRUN <<EOF\nset -e\necho $A\nEOF\nRUN cat <<EOF > /x\nhi $A\nEOF\n"
        "COPY <<EOF /etc/motd\nhi $A 'x'\nEOF\nCOPY <<'ONE' <<-TWO /etc/\n$A\nONE\n\tb\n\tTWO\n"
    )
    assert found[1].argv[2] == "set -e\necho $A\n"
    assert found[2].argv[2] == "cat <<EOF > /x\nhi $A\nEOF\n"
    assert found[3].target == "/etc/" and found[3].inline == (("motd", "hi 1 'x'\n"),)
    assert found[4].inline == (("ONE", "$A\n"), ("TWO", "b\n"))


def test_another_escape_character() -> None:
    assert steps("# escape=`\nFROM x\nRUN a `\n  b\n")[0].argv[2] == "a   b"


def read(text: str) -> None:
    definition = parse(text.encode(), "D")
    base_of(definition, {})
    work_out(definition, BASE, {})


@pytest.mark.parametrize(
    ("text", "line", "name", "message", "hint"),
    [
        ("RUN x", 1, "RUN", "before FROM", "FROM TEMPLATE"),
        ("FROM x\nRUNN y", 2, "RUNN", "no such instruction", "did you mean RUN?"),
        ("FROM x\n\n# c\nADD a b", 4, "ADD", "not built here", "COPY"),
        ("FROM x\nVOLUME /x", 2, "VOLUME", "not built here", "part of the template"),
        ("FROM x\nHEALTHCHECK CMD x", 2, "HEALTHCHECK", "not built here", "READY"),
        ("FROM x\nFROM y", 2, "FROM", "one FROM", "stage"),
        ("FROM x\nRUN", 2, "RUN", "nothing follows", "RUN COMMAND"),
        ("FROM x y", 1, "FROM", "not of the form", "python"),
        ("FROM --platform=linux/s390x x", 1, "FROM", "this machine is linux/", "this machine only"),
        ("FROM x\nRUN <<EOF\necho", 2, "RUN", "has no end", "alone on a line"),
        ("FROM x\nRUN <<EOF\n#!/usr/bin/python3\nprint()\nEOF", 2, "RUN", "given to the shell", "python3"),
        ("FROM x\nRUN --mount=type=cache,target=/x y", 2, "RUN", "--mount is not known", "no mounts"),
        ("FROM x\nRUN --network=host y", 2, "RUN", "no network", "COPY"),
        ("FROM x\nCOPY --from=y a b", 2, "COPY", "--from is not known", "another template"),
        ("FROM x\nCOPY a", 2, "COPY", "source and a destination", "COPY app"),
        ("FROM x\nCOPY a b c", 2, "COPY", "end with a slash", ""),
        ("FROM x\nCOPY ../a b", 2, "COPY", "climbs out", "context"),
        ("FROM x\nCOPY a/../../b c", 2, "COPY", "climbs out", "context"),
        ("FROM x\nCOPY --chmod=rw a b", 2, "COPY", "no mode", "755"),
        ("FROM x\nCOPY --chown=a:b:c a b", 2, "COPY", "no user", "1000"),
        ("FROM x\nENV A", 2, "ENV", "KEY=value", ""),
        ("FROM x\nENV 1=2", 2, "ENV", "no name of a variable", ""),
        ("FROM x\nENV A=1 B", 2, "ENV", "KEY=value", "quote"),
        ("FROM x\nENV A='b", 2, "ENV", "not closed", ""),
        ("FROM x\nUSER a b", 2, "USER", "no user", "USER app"),
        ("FROM x\nUSER ../x", 2, "USER", "no user", "USER app"),
        ("FROM x\nSHELL bash", 2, "SHELL", "list of words", "bash"),
        ("FROM x\nARG 1", 2, "ARG", "no name", ""),
        ("FROM x\nRUN echo \0", 2, "", "NUL", "text file"),
        ("# escape=x\nFROM x", 1, "", "escape character", ""),
    ],
)
def test_mistakes_name_line_and_instruction(text: str, line: int, name: str, message: str, hint: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        read(text)
    assert caught.value.message.startswith(f"D line {line}" + (f", {name}: " if name else ": "))
    assert hint in caught.value.hint
    assert caught.value.details["line"] == line


def test_other_mistakes() -> None:
    with pytest.raises(InvalidRequest, match="line 2: this is not UTF-8"):
        parse(b"FROM x\nRUN \xff\n", "D")
    with pytest.raises(InvalidRequest, match="there is no FROM"):
        parse(b"# nothing\n")
    with pytest.raises(InvalidRequest, match="larger than 1 MiB"):
        parse(b"#" * (LARGEST + 1))
    with pytest.raises(InvalidRequest, match="--build-arg W: Dockerfile has no ARG") as caught:
        steps("FROM x\nARG V\n", W="1")
    assert "V" in caught.value.hint


def test_what_has_no_meaning_is_said() -> None:
    definition = parse(b"FROM x\nEXPOSE 80\nSTOPSIGNAL INT\n", "D")
    assert len(definition.notes) == 2 and "D line 2: EXPOSE is ignored" in definition.notes[0]


def test_noise_is_refused_or_read_and_nothing_else() -> None:
    chance = random.Random(7)
    letters = [
        "FROM x\n", "RUN ", "COPY ", "ENV ", "$", "{", "}", '"', "'", "\\", "\n", "<<E", " ", "a=", "--x=",
        ":-", "[", "]", "E\n", "#",
    ]  # fmt: skip
    for _ in range(3000):
        text = "FROM x\n" + "".join(chance.choices(letters, k=chance.randrange(1, 12)))
        try:
            work_out(parse(text.encode()), BASE, {})
        except InvalidRequest as error:
            assert error.message  # noqa: PT017 - any refusal will do, any other exception fails
