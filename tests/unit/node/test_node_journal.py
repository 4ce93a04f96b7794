"""The journal: whole lines only, merged in order, errors with a remedy."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.model.errors import HostLimit
from ringfence.model.levels import Level
from ringfence.model.policy import (
    Audit,
    Door,
    Filesystem,
    Isolation,
    Limits,
    Mount,
    Network,
    NetworkRule,
    Policy,
    Process,
    Resources,
    Wall,
)
from ringfence.model.sandbox import Owner, SandboxRequest
from ringfence.node import journal
from ringfence.node.journal import Journal
from ringfence.runtimes.contract import Handle


def test_lines_are_merged_in_order(tmp_path: Path) -> None:
    book = Journal.begin(tmp_path, {"id": "sb-1", "owner": "a"})
    book.append({"state": "handle", "handle": {"pid": 7}})
    book.append({"owner": "b"})
    book.close()
    assert journal.read(tmp_path) == {
        "v": 1,
        "state": "handle",
        "id": "sb-1",
        "owner": "b",
        "handle": {"pid": 7},
    }
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o600


def test_an_empty_journal_is_used_again_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(b"")
    assert journal.read(tmp_path) is None
    Journal.begin(tmp_path, {"owner": "a"}).close()
    assert (journal.read(tmp_path) or {})["owner"] == "a"
    with pytest.raises(HostLimit):
        Journal.begin(tmp_path, {"owner": "b"})
    assert (journal.read(tmp_path) or {})["owner"] == "a"


def test_another_process_goes_on_where_a_killed_one_stopped(tmp_path: Path) -> None:
    Journal.begin(tmp_path, {"owner": "a"}).close()
    with open(tmp_path / "journal", "ab") as file:
        file.write(b'{"state":"handle","han')  # killed in the middle of a write
    found = Journal.load(tmp_path)
    assert found is not None
    assert found.record["state"] == "intent"
    found.append({"owner": "b"})
    found.close()
    again = journal.read(tmp_path)
    assert again is not None
    assert (again["state"], again["owner"]) == ("intent", "b")


@given(st.integers(0, 400))
def test_cut_anywhere_it_holds_a_former_state(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("cut")
    book = Journal.begin(folder, {"owner": "a", "n": 0})
    for number in range(1, 6):
        book.append({"n": number})
    book.close()
    whole = (folder / "journal").read_bytes()
    (folder / "journal").write_bytes(whole[:cut])
    found = journal.read(folder)
    complete = whole[:cut].count(b"\n")
    if complete == 0:
        assert found is None
    else:
        assert found is not None
        assert found["n"] == min(5, complete - 1 - whole[:cut].count(b"\n\n"))


@pytest.mark.parametrize(
    "text", [b"", b"\n\n", b"no json\n", b"[1]\n", b'{"v":2}\n', b"\xff\xfe\n", b'{"v":1}']
)
def test_what_is_no_journal_is_none(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "journal").write_bytes(text)
    assert journal.read(tmp_path) is None


def test_a_symlink_is_no_journal(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text('{"v":1,"owner":"evil"}\n')
    os.symlink(tmp_path / "elsewhere", tmp_path / "journal")
    assert journal.read(tmp_path) is None


def test_missing_is_none(tmp_path: Path) -> None:
    assert Journal.load(tmp_path) is None


def test_a_full_disk_is_named_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = Journal.begin(tmp_path, {})

    def full(_file: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal.os, "write", full)
    with pytest.raises(HostLimit, match="the disk is full") as caught:
        book.append({"state": "handle"})
    monkeypatch.undo()
    book.close()
    assert "free some space" in caught.value.hint
    assert book.record["state"] == "intent"  # what is not written down is not so


def test_a_second_journal_of_one_folder_is_refused(tmp_path: Path) -> None:
    Journal.begin(tmp_path, {}).close()
    with pytest.raises(HostLimit):
        Journal.begin(tmp_path, {})


def test_a_handle_survives_the_journal() -> None:
    handle = Handle("jail", 1, "sb-1", "/x", 4, 5, "boot", {"a": [1]})
    assert journal.handle_from_json(journal.handle_as_json(handle)) == handle


def test_a_request_survives_the_journal(tmp_path: Path) -> None:
    request = SandboxRequest(
        policy=Policy(
            name="everything",
            wall=Wall(
                isolation=Isolation(Level.L3, "gvisor", ("a", "b"), True),
                filesystem=Filesystem("readonly", ("/usr",), ("/w",), (Mount("/a", "/b", False),)),
                process=Process(0, "default", 9, 99, 1.5),
                resources=Resources(0.5, 1 << 28, 1 << 27, 10**6),
            ),
            door=Door(
                limits=Limits(5, 6, "stop", 7),
                network=Network(
                    "egress", (NetworkRule("h", (1,), ("GET",), ("/x",), {"header": "A"}),), "bodies"
                ),
                audit=Audit(True, False),
            ),
            trust="controlled",
        ),
        owner=Owner("o", "p", "u", "agent", "parent", "code-executing", "task"),
        env={"A": "ä"},
        labels={"l": "m"},
        keep=True,
        id="sb-00000000000000000000",
    )
    book = Journal.begin(tmp_path, {"request": journal.request_as_json(request)})
    book.close()
    record = journal.read(tmp_path)
    assert record is not None
    assert journal.request_from_json(record["request"]) == request
