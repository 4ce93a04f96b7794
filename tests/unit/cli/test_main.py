"""The entry point: commands, errors, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ringfence.cli import main as entry_point
from ringfence.cli.main import COMMANDS, main


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, (_, text) in COMMANDS.items():
        assert f"  {name}" in shown
        assert text in shown


def test_no_command_shows_help_on_stderr_and_fails(capsys):
    assert main([]) == 125
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "usage: ringfence" in shown.err


def test_help_imports_next_to_nothing():
    # The promise about its time rests on this; times themselves are measured by the bench.
    code = (
        "import sys; from ringfence.cli.main import main; main(['--help']);"
        "print(sorted({'argparse','asyncio','dataclasses','rich','json','typing'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(_source())!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_run_imports_nothing_that_it_does_not_need():
    code = (
        "import sys; from ringfence.cli.main import main; code = main(['run', '--memory', 'x', '--', 'y']);"
        "print(code, sorted({'rich','yaml','msgspec','shtab','ssl','importlib.metadata'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(_source())!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "125 []"


def _source():
    from pathlib import Path

    return Path(entry_point.__file__).parents[2]


@pytest.mark.parametrize(
    ("typed", "hint"),
    [("rnu", "did you mean run?"), ("docter", "did you mean doctor?"), ("zzzz", "ringfence --help")],
)
def test_an_unknown_command_says_what_was_meant(typed, hint, capsys):
    assert main([typed]) == 125
    shown = capsys.readouterr().err
    assert f"unknown command '{typed}'" in shown
    assert hint in shown


def test_a_program_given_as_a_command_is_explained(capsys):
    assert main(["sh", "-c", "true"]) == 125
    assert "ringfence run -- sh" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help_with_examples(name, capsys):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "examples:" in shown
    assert f"ringfence {name}" in shown
    assert "--json" in shown


def test_an_error_is_one_message_with_its_remedy(capsys):
    assert main(["run", "--memory", "12Q", "--", "true"]) == 125
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        "ringfence: --memory: unknown unit in size '12Q'",
        "  use K, M, G or T, as in 64M or 2GiB",
    ]


def test_an_error_as_json_is_one_document_on_stdout(capsys):
    assert main(["run", "--json", "--memory", "12Q", "--", "true"]) == 125
    shown = capsys.readouterr()
    assert shown.err == ""
    error = json.loads(shown.out)["error"]
    assert error["code"] == "invalid_request"
    assert error["hint"]


def test_json_behind_the_dashes_is_the_commands_own(capsys):
    assert main(["run", "--memory", "12Q", "--", "tool", "--json"]) == 125
    assert capsys.readouterr().out == ""


def test_a_fault_of_ours_shows_no_traceback_unless_asked(capsys, monkeypatch):
    def broken(_):
        raise ValueError("surprise")

    monkeypatch.setattr("ringfence.cli.version.main", broken)
    assert main(["version"]) == 125
    shown = capsys.readouterr().err
    assert "ValueError: surprise" in shown
    assert "Traceback" not in shown
    monkeypatch.setenv("RINGFENCE_DEBUG", "1")
    assert main(["version"]) == 125
    assert "Traceback" in capsys.readouterr().err


def test_version(capsys):
    from ringfence import __version__

    assert main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out
    assert main(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ringfence"] == __version__


def test_completion_scripts_are_valid_and_know_the_options(capsys, tmp_path):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    for word in ("run", "doctor", "--memory", "--allow-dangerous-mount"):
        assert word in script
    path = tmp_path / "ringfence.bash"
    path.write_text(script)
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert main(["completion", "zsh"]) == 0
    assert "#compdef ringfence" in capsys.readouterr().out


def test_an_unknown_shell_is_refused(capsys):
    assert main(["completion", "bsh"]) == 125
    assert "did you mean bash?" in capsys.readouterr().err


SHIM = "import sys; from ringfence.cli.main import entry; sys.argv[0] = 'ringfence'; entry()"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["version"], ["version", "--json"], ["setup", "--dry-run"]]
)
def test_without_a_standard_output_nothing_is_a_fault(arguments):
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", SHIM, *arguments],
        capture_output=True,
        text=True,
    )
    assert "Error" not in done.stderr
    assert "fault in Ringfence" not in done.stderr
    assert done.returncode == 0


def test_an_encoding_without_our_characters_is_no_fault():
    done = subprocess.run(
        [sys.executable, "-c", SHIM, "run", "--help"],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii() and b"--memory" in done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["version"]])
def test_a_full_or_closed_output_is_one_message_and_no_traceback(arguments):
    command = [sys.executable, "-c", SHIM, *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (125, "ringfence: No space left on device\n")
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
