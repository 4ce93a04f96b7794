"""The bench that compares the two stores: its server comes and goes, and it measures what it says."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence.cli import bench, bench_api
from ringfence.cli.bench_stores import LIMIT, compare
from support.postgres import programs
from support.serving import needs_root_or_users


async def test_both_stores_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_root_or_users()
    folders: list[str] = []
    make = tempfile.mkdtemp

    def noted(*arguments: Any, **options: Any) -> str:
        folders.append(make(*arguments, **options))
        return folders[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", noted)
    made = bench.Bench(bench.QUICK, "", None, quiet=True)
    effort = replace(bench_api.QUICK, creates=6, execs=6, codes=6, pool=4)
    await compare(effort, made, "")
    if programs() is None:
        assert "PostgreSQL" in made.absent["PostgreSQL beside SQLite"]
        return
    assert not made.absent
    assert len(made.promises) == 5 and all(each.limit == LIMIT for each in made.promises)
    assert all(each.value > 0 and "beside" in each.reference for each in made.promises)
    names = [figure["name"] for figure in made.figures]
    for name in ("SQLite", "PostgreSQL"):
        assert f"API on {name}: create from a pool, 20 at once" in names
    assert len(folders) >= 3 and not [each for each in folders if Path(each).exists()]  # nothing is left
