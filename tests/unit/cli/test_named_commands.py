"""Commands that hints and documents name are there, with their verbs and options."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from ringfence.cli.completion import everything

pytest.importorskip("shtab")

ROOT = Path(__file__).resolve().parents[3]
PLACES = sorted([*(ROOT / "src/ringfence").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
NAMED = re.compile(r"`(?:sudo )?ringfence ([a-z][^`\n]*)`")


def verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """What is below it, by name."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
    return found


def problem(words: str, top: argparse.ArgumentParser) -> str:
    """What is wrong with the words behind `ringfence`; nothing: an empty text."""
    parser, named = top, words.partition(" -- ")[0].split()
    while named and (below := verbs(parser)):
        if not re.fullmatch("[a-z][a-z|-]*", named[0]):
            break  # the kind, as in `ringfence sandbox …`
        several = named.pop(0).split("|")
        if unknown := [each for each in several if each not in below]:
            return f"there is no {unknown[0]}"
        parser = below[several[0]]
        if len(several) > 1:
            return ""
    known = {option for action in parser._actions for option in action.option_strings}
    for word in named:
        option = re.match("--?[a-z][a-z-]*", word)
        if option and option[0] not in known:
            return f"there is no option {option[0]}"
    return ""


def test_what_is_named_is_there() -> None:
    top = everything()
    seen, wrong = 0, []
    for place in PLACES:
        for match in NAMED.finditer(place.read_text(encoding="utf-8")):
            seen += 1
            if text := problem(match[1], top):
                wrong.append(f"{place.relative_to(ROOT)}: {match[0]}: {text}")
    assert seen > 200
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("key create --scope read", ""),
        ("key make", "there is no make"),
        ("no-such-command", "there is no no-such-command"),
        ("run --no-such-option -- true", "there is no option --no-such-option"),
        ("run --runtime jail -- ls --all", ""),
        ("egress pending|allow|forbid", "there is no forbid"),
    ],
)
def test_what_is_not_there_is_found(words: str, text: str) -> None:
    assert problem(words, everything()) == text
