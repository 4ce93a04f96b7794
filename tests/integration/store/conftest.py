"""Stores of both kinds: every test here that asks for an address runs on SQLite and on a real PostgreSQL."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.postgres import PostgresServer, postgres

__all__ = ["postgres"]


@pytest.fixture(params=["sqlite", "postgres"])
def ringfence_store_address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/state/store.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.fresh()
