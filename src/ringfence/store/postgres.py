"""The store in PostgreSQL, shared by any number of processes on any number of machines."""

from __future__ import annotations

from ringfence.model.errors import Unsupported
from ringfence.store.contract import Store


class PostgresStore:
    """A store in PostgreSQL."""

    @classmethod
    async def open(cls, url: str) -> Store:
        """Open it."""
        raise Unsupported("PostgreSQL is not there yet", capability="postgresql")
