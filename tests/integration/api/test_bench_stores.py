"""The bench that compares the two stores: its server comes and goes, and it measures what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ringfence.cli import bench, bench_api
from ringfence.cli.bench_stores import LIMIT, compare
from support.postgres import programs
from support.serving import needs_root_or_users


async def test_both_stores_in_one_run() -> None:
    needs_root_or_users()
    made = bench.Bench(bench.QUICK, "", None, quiet=True)
    before = set(Path("/tmp").glob("ringfence-bench-*"))
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
    assert set(Path("/tmp").glob("ringfence-bench-*")) <= before  # nothing of it is left
