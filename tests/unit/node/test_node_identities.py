"""Host user ids: never root, never anybody else's, never two sandboxes' at once."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.model.errors import HostLimit
from ringfence.node import identities
from ringfence.node.identities import FIRST_RANGE, RANGES, Ranges, _around, identity_as_root, taken_ranges
from ringfence.runtimes.contract import AGENT_UID, MAP_SIZE


def test_ranges_lie_where_nobody_else_is() -> None:
    assert FIRST_RANGE > 0x6FFF_FFFF  # systemd's last container id
    assert FIRST_RANGE + RANGES * MAP_SIZE <= 1 << 31


@given(st.integers(0, RANGES - 1), st.sampled_from([0, 1, 1000, 65533]))
def test_a_root_identity_never_is_root_of_the_host(number: int, user: int) -> None:
    identity = identity_as_root(number, user)
    assert identity.uid == user
    assert FIRST_RANGE <= identity.host_uid(0) < identity.host_uid(65535) < 1 << 31
    assert identity.host_uid(user) != 0
    assert (identity.capabilities != 0) == (user == 0)
    assert not identity.capabilities & (
        1 << 21 | 1 << 12 | 1 << 19 | 1 << 27
    )  # SYS_ADMIN NET_ADMIN PTRACE MKNOD


def test_neighbouring_ranges_do_not_overlap() -> None:
    one, two = identity_as_root(3, 1000), identity_as_root(4, 1000)
    assert one.host_uid(65535) + 1 == two.host_uid(0)


def test_ranges_of_others_are_left_out(tmp_path: Path) -> None:
    subuid, subgid, users = tmp_path / "u", tmp_path / "g", tmp_path / "p"
    subuid.write_text(f"joe:{FIRST_RANGE + 5}:65536\nnonsense\nx:y:z\n\n#c\njoe:100000:65536\n")
    subgid.write_text(f"joe:{FIRST_RANGE + 10 * MAP_SIZE}:1\n")
    users.write_text(f"odd:x:{FIRST_RANGE + 20 * MAP_SIZE + 3}:7::/:/bin/sh\nroot:x:0:0::/:/bin/sh\nbroken\n")
    assert taken_ranges(str(subuid), str(subgid), str(users)) == {0, 1, 10, 20}


def test_a_span_over_everything_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identities, "taken_ranges", lambda: frozenset(range(RANGES)))
    with pytest.raises(HostLimit, match="in use"):
        Ranges(tmp_path, "a").take()


def test_subordinate_ranges_by_name_and_number(tmp_path: Path) -> None:
    file = tmp_path / "subuid"
    file.write_text("joe:100:200\n1000:300:400\nann:5:6\njoe:-3:4\njoe:٣:4\n")
    assert identities.subordinate_ranges(str(file), 1000, "joe") == [(100, 200), (300, 400)]
    assert identities.subordinate_ranges(str(tmp_path / "none"), 1000, "joe") == []


def test_no_two_nodes_get_one_range(tmp_path: Path) -> None:
    one, two = Ranges(tmp_path, "a"), Ranges(tmp_path, "b")
    taken = [r.take() for _ in range(50) for r in (one, two)]
    assert len(set(taken)) == 100
    assert not set(taken) & taken_ranges()


def test_the_last_freed_is_the_next_taken(tmp_path: Path) -> None:
    ranges = Ranges(tmp_path, "a")
    first, _ = ranges.take(), ranges.take()
    ranges.give_back(first)
    assert ranges.take() == first


def test_closing_frees_all_but_those_of_kept_sandboxes(tmp_path: Path) -> None:
    ranges = Ranges(tmp_path, "a")
    kept, _ = ranges.take(), ranges.take()
    ranges.assign(kept, "sb-kept")
    ranges.close()
    assert os.listdir(tmp_path) == [str(kept)]
    assert os.readlink(tmp_path / str(kept)) == "sb-kept"
    other = Ranges(tmp_path, "b")
    assert kept not in {other.take() for _ in range(100)}
    other.release(kept, "sb-other")
    assert (tmp_path / str(kept)).is_symlink()  # not that one's
    other.release(kept, "sb-kept")  # by whoever adopted and destroyed it
    assert not (tmp_path / str(kept)).is_symlink()


def test_the_dead_ones_leases_are_swept_and_no_others(tmp_path: Path) -> None:
    dead, living = Ranges(tmp_path, "dead"), Ranges(tmp_path, "living")
    dead.take()
    mine = living.take()
    kept = dead.take()
    dead.assign(kept, "sb-kept")
    os.symlink("sb-x", tmp_path / f".7.{'dead'}")  # killed in the middle of an assignment
    living.sweep("dead")
    assert sorted(os.listdir(tmp_path)) == sorted([str(mine), str(kept)])


@given(
    st.sampled_from([0, 1, 1000, 65533]),
    st.integers(1, 2**31),
    st.integers(0, 2**31),
    st.integers(0, 200_000),
)
def test_maps_around_the_caller(user: int, caller: int, first: int, count: int) -> None:
    lines = _around(user, caller, [(first, count)])
    if lines is None:
        assert count + 1 <= AGENT_UID or first <= caller < first + count
        return
    inside = sorted((line.inside, line.inside + line.count) for line in lines)
    outside = sorted((line.outside, line.outside + line.count) for line in lines)
    for spans in (inside, outside):
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), lines
    assert inside[0][0] == 0
    assert inside[-1][1] <= MAP_SIZE
    assert any(line.inside <= AGENT_UID < line.inside + line.count for line in lines)
    assert [line.outside for line in lines if line.inside == user and line.count == 1] == [caller]


def test_without_newuidmap_there_is_one_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.setattr(os, "getegid", lambda: 99)
    identities.identity_as_user.cache_clear()
    identity = identities.identity_as_user(1000)
    identities.identity_as_user.cache_clear()
    assert not identity.helper
    assert identity.host_uid(1000) == 1234
    assert identity.agent_uid == 1000
    assert identity.gid_maps[0].outside == 99
