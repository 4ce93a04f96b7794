"""Identifiers."""

from __future__ import annotations

from ringfence.model.ids import SANDBOX_ID, new_id


def test_they_sort_by_birth_also_within_a_millisecond() -> None:
    made = [new_id("sb") for _ in range(20_000)]
    assert sorted(set(made)) == made
    assert all(SANDBOX_ID.fullmatch(each) for each in made)
