"""What COPY may take: patterns, .dockerignore, and no way out of the context."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringfence.images.building.archives import Placed, Stream, of_context
from ringfence.images.building.context import Context
from ringfence.images.building.ignoring import Ignored
from ringfence.model.errors import InvalidRequest, NotFound


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A context beside a file that must never be reached."""
    (tmp_path / "secret").write_text("secret")
    top = tmp_path / "context"
    (top / "app/deep").mkdir(parents=True)
    (top / "app/a.py").write_text("a")
    (top / "app/b.py").write_text("b")
    (top / "app/deep/c.txt").write_text("c")
    (top / "app/b.py").chmod(0o4755)
    (top / "app/link").symlink_to("a.py")
    (top / "README").write_text("r")
    return top


def names(context: Context, *sources: str, into: bool = True) -> list[str]:
    return [each.name for each in context.find(sources, into_folder=into)]


def test_folders_files_and_patterns(folder: Path) -> None:
    with Context(folder) as context:
        assert names(context, "app") == ["", "a.py", "b.py", "deep", "deep/c.txt", "link"]
        assert names(context, "README") == ["README"]
        assert names(context, "README", into=False) == [""]
        assert names(context, "app/*.py") == ["a.py", "b.py"]
        assert names(context, "*/deep/c.???") == ["c.txt"]
        assert names(context, "app/[a]*") == ["a.py"]
        assert "README" in names(context, ".")


def test_special_bits_are_taken_off_and_links_stay_links(folder: Path) -> None:
    with Context(folder) as context:
        found = {each.name: each for each in context.find(("app",), into_folder=True)}
    assert found["b.py"].mode == 0o755
    assert (found["link"].kind, found["link"].link) == ("symlink", "a.py")


@pytest.mark.parametrize("target", ["../secret", "/etc/passwd", "app/../../secret", "up"])
def test_a_link_that_leads_out_is_refused(folder: Path, target: str) -> None:
    (folder / "up").symlink_to("..")
    (folder / "out").symlink_to(target)
    with Context(folder) as context:
        with pytest.raises(InvalidRequest, match="leads out of the context"):
            context.find(("out" if target != "up" else "up/secret",), into_folder=False)
        # The control: one that leads to a file of the context is followed.
        (folder / "in").symlink_to("app/../README")
        assert context.find(("in",), into_folder=True)[0]._replace(digest="") == (
            "in",
            "file",
            "README",
            0o644,
            1,
            "",
            "",
        )


def test_links_in_a_circle(folder: Path) -> None:
    (folder / "one").symlink_to("two")
    (folder / "two").symlink_to("one")
    with Context(folder) as context, pytest.raises(InvalidRequest, match="circle"):
        context.find(("one",), into_folder=False)


def test_a_folder_swapped_for_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/a.py").write_text("secret")
    with Context(folder) as context:
        found = [each for each in context.find(("app",), into_folder=True) if each.name == "a.py"]
        (folder / "app").rename(folder / "was")
        (folder / "app").symlink_to(tmp_path / "outside")
        with pytest.raises(InvalidRequest, match="link or no folder"):
            b"".join(of_context(context, found, {}, Placed("/x"), None, epoch=0))


@pytest.mark.parametrize("change", ["content", "longer", "shorter", "gone"])
def test_a_file_that_changes_is_found_out(folder: Path, change: str) -> None:
    with Context(folder) as context:
        found = context.find(("README",), into_folder=True)
        if change == "gone":
            (folder / "README").unlink()
        else:
            (folder / "README").write_text({"content": "s", "longer": "rr", "shorter": ""}[change])
        with pytest.raises((InvalidRequest, NotFound), match=r"changed|there is no"):
            b"".join(of_context(context, found, {}, Placed("/x"), None, epoch=0))


def test_what_is_no_file_is_refused(folder: Path) -> None:
    os.mkfifo(folder / "app/pipe")
    with Context(folder) as context, pytest.raises(InvalidRequest, match="no file, folder or link") as caught:
        context.find(("app",), into_folder=True)
    assert ".dockerignore" in caught.value.hint
    (folder / ".dockerignore").write_text("app/pipe\n")
    with Context(folder) as context:
        assert "pipe" not in names(context, "app")


def test_what_is_missing_has_a_hint(folder: Path) -> None:
    with Context(folder) as context:
        with pytest.raises(NotFound, match="there is no REDME in the context") as caught:
            context.find(("REDME",), into_folder=False)
        assert caught.value.hint == "did you mean README?"
        with pytest.raises(NotFound, match="nothing in the context fits"):
            context.find(("*.c",), into_folder=True)
    with pytest.raises(InvalidRequest, match="can't be read"):
        Context(folder / "nothing")


def test_dockerignore(folder: Path) -> None:
    (folder / ".dockerignore").write_text("# comment\n*.md\n**/*.txt\n!app/deep/c.txt\napp/b.py\n")
    (folder / "app/deep/d.txt").write_text("d")
    with Context(folder) as context:
        assert names(context, "app") == ["", "a.py", "deep", "deep/c.txt", "link"]
        (folder / ".dockerignore").write_text("app\n")
    with Context(folder) as context, pytest.raises(NotFound, match=r"left out by \.dockerignore"):
        context.find(("app",), into_folder=True)


@pytest.mark.parametrize(
    ("pattern", "out", "kept"),
    [
        ("*.log", ["a.log"], ["a/b.log", "log"]),
        ("**/*.log", ["a.log", "a/b/c.log"], ["a.logs"]),
        ("build/", ["build", "build/x"], ["a/build"]),
        ("/top", ["top", "top/x"], ["a/top"]),
        ("a?c", ["abc"], ["a/c", "abbc"]),
        ("[ab]c", ["ac", "bc"], ["cc", "/c"]),
        ("*\n!keep", ["x", "x/y"], ["keep", "keep/x"]),
        ("a(b", ["a(b"], ["ab"]),
    ],
)
def test_patterns(pattern: str, out: list[str], kept: list[str]) -> None:
    ignored = Ignored(pattern)
    assert [path for path in out if path not in ignored] == []
    assert [path for path in kept if path in ignored] == []


def test_a_pattern_that_is_none() -> None:
    with pytest.raises(InvalidRequest, match="line 2"):
        Ignored("x\n[a\n")


def test_a_stream_in_small_pieces() -> None:
    stream = Stream([b"abc", b"", b"de"])
    assert [stream.read(2) for _ in range(5)] == [b"ab", b"c", b"de", b"", b""]
