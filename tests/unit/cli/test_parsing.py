"""Where our options end and the command's begin."""

from __future__ import annotations

import pytest

from ringfence.cli.options import configure
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


def test_a_choice_that_is_none_names_all():
    with pytest.raises(InvalidRequest, match="'L9' is not one of L1, L2, L3, L4"):
        parse("--isolation", "L9", "--", "true")


def test_a_value_that_is_missing_is_named():
    with pytest.raises(InvalidRequest, match="--memory: expected one argument") as caught:
        parse("--memory", "--", "true")
    assert "ringfence run --help" in caught.value.hint
