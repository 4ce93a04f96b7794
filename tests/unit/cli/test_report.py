"""Causes in words, and exit codes."""

from __future__ import annotations

import errno

import pytest

from ringfence.cli import report
from ringfence.model.errors import GuestRefused, InvalidRequest
from ringfence.model.levels import Cause
from ringfence.model.policy import MIB, Limits, Policy, Resources
from ringfence.model.sandbox import End, FileChange

POLICY = Policy().with_wall(resources=Resources(memory=64 * MIB)).with_door(limits=Limits(timeout=2))


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (End(Cause.EXITED, 0), 0),
        (End(Cause.EXITED, 3), 3),
        (End(Cause.SIGNALED, 139), 139),
        (End(Cause.OUT_OF_MEMORY, 137), 137),
        (End(Cause.OUT_OF_MEMORY, None), 137),
        (End(Cause.DEADLINE, None), 124),
        (End(Cause.DEADLINE, 137), 124),
        (End(Cause.CPU_TIME, None), 137),
        (End(Cause.OUTPUT_LIMIT, None), 137),
        (End(Cause.IDLE, None), 137),
        (End(Cause.KILLED, None), 137),
        (End(Cause.KILLED, 130), 130),
        (End(Cause.NODE_LOST, None), 125),
        (End(Cause.RUNTIME_CRASH, None), 125),
    ],
)
def test_exit_codes(end, code):
    assert report.exit_code(end) == code


def test_every_cause_has_its_words():
    for cause in Cause:
        assert bool(report.explain(End(cause, 1), POLICY)) == (cause is not Cause.EXITED)


def test_the_limit_and_how_to_raise_it_are_named():
    memory = report.explain(End(Cause.OUT_OF_MEMORY, 137), POLICY)
    assert memory == "killed: out of memory (limit 64MiB); raise it with --memory"
    assert report.explain(End(Cause.DEADLINE, None), POLICY) == (
        "killed: deadline (limit 2s); raise it with --timeout"
    )
    assert "SIGSEGV" in report.explain(End(Cause.SIGNALED, 139), POLICY)


def test_output_that_is_no_text_is_base64():
    assert report.captured(b"a\n", "stdout") == {"stdout": "a\n", "stdout_encoding": "utf-8"}
    assert report.captured(b"\xff", "stdout") == {"stdout": "/w==", "stdout_encoding": "base64"}
    assert report.captured(None, "stdout") == {"stdout": None, "stdout_encoding": None}


def test_hostile_names_cannot_forge_a_change():
    lines = report.change_lines(
        [FileChange("/w/x\nD         0  /etc/passwd", "added", "file", 5, "sha256:" + "0" * 64)]
    )
    assert len(lines) == 1
    assert "\n" not in lines[0]
    assert "\\nD" in lines[0]


@pytest.mark.parametrize(
    ("number", "text", "code"),
    [
        (errno.ENOENT, "not found", 127),
        (errno.EACCES, "Permission denied", 126),
        (errno.ENOEXEC, "#! line", 126),
    ],
)
def test_a_command_that_does_not_start(number, text, code):
    refused = report.refusal(GuestRefused(number, "start x (program: …)"), ("x",), None)
    assert isinstance(refused, report.CommandRefused)
    assert refused.exit_code == code
    assert text in refused.message
    assert refused.hint


def test_what_was_not_found_is_looked_for_in_the_template():
    error = GuestRefused(errno.ENOENT, "start x (program: …)")
    assert "the host's /usr" in report.refusal(error, ("x",), None, "host").hint
    assert "template tools has its own files alone" in report.refusal(error, ("x",), None, "tools").hint


def test_a_workdir_that_is_not_there_is_our_own_failure():
    refused = report.refusal(GuestRefused(errno.ENOENT, "start x (cwd: …)"), ("x",), "/nope")
    assert isinstance(refused, InvalidRequest)
    assert "--workdir /nope" in refused.message


def test_other_refusals_stay_what_they_are():
    error = GuestRefused(errno.EAGAIN, "start x (fork: …)")
    assert report.refusal(error, ("x",), None) is error
