"""What command lines mean behind the runtime `wasm`."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from ringfence.runtimes.wasm import commands


@pytest.mark.parametrize("word", [b"python", b"python3", b"/usr/bin/python3", b"python3.12", b"echo", b"cat"])
def test_python(word: bytes) -> None:
    found = commands.resolve([word, b"a"], "/workspace")
    assert (found.kind, found.argv[0], found.argv[-1]) == ("python", b"python3", b"a")


def test_quickjs() -> None:
    assert commands.resolve([b"qjs", b"--help"], "/").argv == (b"qjs", b"--help")
    code = commands.resolve([b"qjs", b"-e", b"'\"\\", b"x"], "/").argv
    assert code[:3] == (b"qjs", b"-m", b"-e")
    assert code[4:] == (b"x",)
    assert b'"text"' in code[3]
    assert b'"module"' in commands.resolve([b"qjs", b"a.mjs"], "/").argv[3]
    assert b'"file"' in commands.resolve([b"qjs", b"a.js"], "/").argv[3]
    assert b'"input"' in commands.resolve([b"qjs"], "/").argv[3]


def test_modules(tmp_path: Path) -> None:
    (tmp_path / "a.wasm").write_bytes(b"")
    assert commands.resolve([b"a.wasm", b"x"], str(tmp_path)).path == str(tmp_path / "a.wasm")
    assert commands.resolve([commands.CALLER.encode(), b"a.wasm"], str(tmp_path)).kind == "call"
    (tmp_path / "b.wasm").mkdir()
    for word, number in ((b"none.wasm", errno.ENOENT), (b"b.wasm", errno.EACCES)):
        with pytest.raises(OSError) as caught:  # noqa: PT011 - the number below
            commands.resolve([word], str(tmp_path))
        assert caught.value.errno == number


@pytest.mark.parametrize(
    ("word", "number"),
    [
        (b"sh", errno.ENOENT),
        (b"/bin/sh", errno.ENOEXEC),
        (b"./python3", errno.ENOENT),
        (b"/x/python", errno.ENOENT),
    ],
)
def test_what_does_not_run_here(word: bytes, number: int) -> None:
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the number below
        commands.resolve([word], "/workspace")
    assert caught.value.errno == number


def test_limits_are_numbers() -> None:
    assert commands.limits_of({commands.FUEL: "5", commands.DEADLINE: "0.5"}) == (5, 0.5)
    for env in (
        {commands.FUEL: "x"},
        {commands.FUEL: "-1"},
        {commands.DEADLINE: "0"},
        {commands.DEADLINE: "nan"},
    ):
        with pytest.raises(OSError) as caught:  # noqa: PT011 - the number below
            commands.limits_of(env)
        assert caught.value.errno == errno.EINVAL


def test_folders(tmp_path: Path) -> None:
    (tmp_path / "in/deep").mkdir(parents=True)
    config = {"folders": [[str(tmp_path / "in"), "/in", True], [str(tmp_path / "gone"), "/gone", True]]}
    assert commands.open_folders(config, str(tmp_path / "in/deep")) == [
        (str(tmp_path / "in"), "/in", True),
        (str(tmp_path / "in/deep"), ".", True),
    ]
    assert commands.open_folders(config, str(tmp_path)) == [(str(tmp_path / "in"), "/in", True)]
