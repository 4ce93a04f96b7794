"""Where our options end and the command's begin."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.cli import egress
from ringfence.cli.options import GROUPS, configure, parse_quickly
from ringfence.cli.parsing import Parser
from ringfence.model.errors import InvalidRequest


def parse(*arguments):
    parser = Parser(prog="ringfence run")
    configure(parser)
    return parser.parse_command_line(list(arguments))


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["--", "true"], ["true"]),
        (["true"], ["true"]),
        (["--", "sh", "-c", "a -- b"], ["sh", "-c", "a -- b"]),
        (["--", "git", "log", "--", "file"], ["git", "log", "--", "file"]),
        (["git", "log", "--", "file"], ["git", "log", "--", "file"]),
        (["--memory", "64M", "python3", "--version"], ["python3", "--version"]),
        (["--memory", "64M", "--", "--odd-name"], ["--odd-name"]),
        (["--", "--"], ["--"]),
        (["--"], []),
        ([], []),
    ],
)
def test_the_command_is_untouched(arguments, command):
    assert parse(*arguments).command == command


def test_options_before_the_command_are_ours_and_after_it_are_not():
    options = parse("--memory", "1G", "tool", "--memory", "2G")
    assert options.memory == "1G"
    assert options.command == ["tool", "--memory", "2G"]


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(InvalidRequest, match="unknown option --memry") as caught:
        parse("--memry", "64M", "--", "true")
    assert caught.value.hint == "did you mean --memory?"


def test_options_are_never_abbreviated():
    with pytest.raises(InvalidRequest, match="unknown option --mem"):
        parse("--mem", "64M", "--", "true")


@pytest.mark.parametrize(
    ("option", "said"),
    [("--pids", "--pids: 'x\n' is no whole number"), ("--cpus", "--cpus: 'x\n' is no number")],
)
def test_a_number_that_is_none(option, said):
    with pytest.raises(InvalidRequest) as caught:
        parse(option, "x\n", "--", "true")
    assert caught.value.message == said.replace("\n", "\\n")
    assert caught.value.hint


def test_a_choice_that_is_none_names_all():
    with pytest.raises(InvalidRequest, match="'L9' is not one of L1, L2, L3, L4"):
        parse("--isolation", "L9", "--", "true")


def test_a_value_that_is_missing_is_named():
    with pytest.raises(InvalidRequest, match="--memory: expected one argument") as caught:
        parse("--memory", "--", "true")
    assert "ringfence run --help" in caught.value.hint


WORDS = st.sampled_from(
    [name for _, options in GROUPS for names, _ in options for name in names]
    + ["--", "true", "64M", "L2", "0.5", "7", "none", "a=b", "", "-x", "--nosuch", "-", "--memory=1G", "-e=x"]
)


@given(st.lists(WORDS, max_size=8))
def test_the_quick_reader_agrees_with_argparse_or_leaves_it_to_it(arguments):
    quick = parse_quickly(arguments)
    if quick is not None:
        assert vars(quick) == vars(parse(*arguments))


def test_the_quick_reader_is_used():
    arguments = [
        "--memory",
        "64M",
        "--env=A=b=c",
        "-e",
        "B",
        "--cpus",
        "0.5",
        "-i",
        "--",
        "sh",
        "-c",
        "--json",
    ]
    quick = parse_quickly(arguments)
    assert quick is not None
    assert (quick.memory, quick.env, quick.cpus, quick.interactive) == ("64M", ["A=b=c", "B"], 0.5, True)
    assert quick.command == ["sh", "-c", "--json"]


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["-h"], ["--nosuch"], ["--memory"], ["--cpus", "x"], ["--isolation", "L9"], ["--json=x"]],
)
def test_everything_else_is_left_to_argparse(arguments):
    assert parse_quickly([*arguments, "--", "true"]) is None


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["exec", "--timout", "1s", "sb-x"], "see `ringfence sandbox exec --help`"),
        (["ls", "--jsn"], "did you mean --json?"),
        (["ls", "extra"], "see `ringfence sandbox ls --help`"),
    ],
)
def test_what_a_verb_does_not_know_leads_to_its_own_help(arguments, hint):
    from ringfence.cli import sandbox

    parser = Parser(prog="ringfence sandbox")
    sandbox.configure(parser)
    with pytest.raises(InvalidRequest) as caught:
        parser.parse_command_line(arguments)
    assert caught.value.hint == hint


def verbs():
    parser = Parser(prog="ringfence egress")
    egress.configure(parser)
    return parser


@pytest.mark.parametrize(
    "words", [("set", "a", "--local"), ("set", "--local", "a"), ("--local", "set", "a"), ("--json", "ls")]
)
def test_what_may_be_left_out_may_stand_behind_options(words):
    options = verbs().parse_command_line(["secret", *words])
    assert options.name == ("a" if "a" in words else None) and options.local is ("--local" in words)


@pytest.mark.parametrize(
    "words", [("set", "--local", "a", "b"), ("set", "a", "--local", "b"), ("set", "--loca", "a")]
)
def test_what_nobody_asked_for_is_still_refused(words):
    with pytest.raises(InvalidRequest, match=r"unknown (argument b|option --loca)"):
        verbs().parse_command_line(["secret", *words])
