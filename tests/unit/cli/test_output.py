"""What is printed: hostile names, tables, errors."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.cli import output
from ringfence.cli.output import print_error, print_json, printable, safe, table
from ringfence.model.errors import InvalidRequest, StartFailed


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("plain.txt", "plain.txt"),
        ("ümläut", "ümläut"),
        ("two\nlines", "two\\nlines"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\\nb", "a\\\\nb"),
        (b"\xff\xfe", "\\xff\\xfe"),
        ("\u202egnp.exe", "\\u{202e}gnp.exe"),
        ("\u200b", "\\u{200b}"),
        ("\x7f\x9b", "\\x7f\\x9b"),
    ],
)
def test_hostile_names(name, shown):
    assert safe(name) == shown


@given(st.binary())
def test_a_name_is_one_printable_line_and_no_two_look_the_same(raw):
    shown = safe(raw)
    assert shown.isprintable()
    assert len(shown.splitlines()) <= 1
    assert safe(raw + b"\n") != shown


@given(st.text(), st.text())
def test_different_names_look_different(one, other):
    assert (safe(one) == safe(other)) == (one == other)


def test_sentences_keep_their_backslashes():
    assert printable("'a\\n'\x1b") == "'a\\n'\\x1b"


def test_a_plain_table_is_aligned_and_without_escapes():
    stream = io.StringIO()
    table(("a", "bb"), [("long cell", None), (1, "x")], title="T", stream=stream)
    assert stream.getvalue() == "T\na          bb\nlong cell\n1          x\n\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colours_only_on_a_terminal_that_wants_them(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert output.coloured(Terminal())
    assert not output.coloured(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not output.coloured(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not output.coloured(Terminal())


def test_markup_in_cells_is_shown_as_it_is(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    table(("name",), [("[red]x[/red]",)], stream=stream)
    assert "[red]x[/red]" in stream.getvalue()


def test_errors(capsys):
    print_error(StartFailed("no wall\x1b[0m", hint="build one", step="mount"), as_json=False)
    assert capsys.readouterr().err == "ringfence: no wall\\x1b[0m\n  build one\n"
    print_error(StartFailed("no wall", step="mount"), as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        "error": {"code": "start_failed", "message": "no wall", "hint": "", "details": {"step": "mount"}}
    }


def test_an_os_error_names_the_file(capsys):
    print_error(FileNotFoundError(2, "No such file or directory", "/nosuch/file"), as_json=False)
    assert capsys.readouterr().err == "ringfence: No such file or directory: /nosuch/file\n"


def test_json_survives_names_that_are_no_text(capsys):
    print_json({"path": b"\xff".decode("utf-8", "surrogateescape"), "raw": b"ab"})
    assert json.loads(capsys.readouterr().out) == {"path": "\udcff", "raw": "ab"}


@pytest.mark.parametrize(("count", "text"), [(0, "0 layers"), (1, "1 layer"), (2, "2 layers")])
def test_layers_are_counted_in_words(count, text):
    from types import SimpleNamespace

    from ringfence.cli.template import layers

    assert layers(SimpleNamespace(layers=[None] * count)) == text


def test_text_that_is_not_utf8_is_the_users_and_no_fault_of_ours(capsys):
    with pytest.raises(UnicodeEncodeError) as caught:
        '{"name": "a\udcff.txt"}'.encode()
    print_error(caught.value, as_json=False)
    said = capsys.readouterr().err
    assert "'a\\xff.txt' is not UTF-8" in said
    assert "fault" not in said
    print_error(caught.value, as_json=True)
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "invalid_request"


def test_a_field_is_named_without_the_body_that_carried_it(capsys):
    fields = [{"field": "min", "problem": "too small"}]
    refused = InvalidRequest(
        "the body is wrong: min: too small", hint="see /openapi.json for what it takes", fields=fields
    )
    print_error(refused, as_json=False)
    assert capsys.readouterr().err == "ringfence: min: too small\n  see the command's --help\n"
    print_error(refused, as_json=True)  # programs get what the service said
    assert json.loads(capsys.readouterr().out)["error"]["message"].startswith("the body")
    other = InvalidRequest("min (5) is more than max (2)", hint="swap them")
    print_error(other, as_json=False)
    assert capsys.readouterr().err == "ringfence: min (5) is more than max (2)\n  swap them\n"
