"""Opening a store by its address."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from ringfence.model.errors import InvalidRequest
from ringfence.store.contract import Store


async def open_store(url: str) -> Store:
    """``sqlite:///absolute/path``, ``sqlite:relative/path`` or a bare path; ``postgresql://…``.

    Brings the schema up to this version first, once, whoever else opens it at the same time.

    Raises:
        InvalidRequest: no such kind of address, or what is there is something else's.
        WrongState: a newer Ringfence wrote it.
        StoreUnavailable: it can't be reached or opened now.
    """
    if not url:
        raise InvalidRequest("a store needs an address", hint="a path, sqlite:///path or postgresql://…")
    scheme = urlsplit(url).scheme if ":" in url.split("/", 1)[0] else ""
    if scheme in ("postgresql", "postgres"):
        from ringfence.store.postgres import PostgresStore

        return await PostgresStore.open(url)
    if scheme in ("", "sqlite"):
        from ringfence.store.sqlite import SqliteStore

        return await SqliteStore.open(_path(url) if scheme else url)
    raise InvalidRequest(
        f"{scheme}: is no kind of store", hint="a path, sqlite:///path or postgresql://user@host/database"
    )


def _path(url: str) -> str:
    parts = urlsplit(url)
    if parts.query or parts.fragment or parts.netloc not in ("", "localhost"):
        raise InvalidRequest(f"{url}: a path has no host and no options", hint="sqlite:///absolute/path")
    path = unquote(parts.path)
    if not path or path.endswith("/"):
        raise InvalidRequest(f"{url}: names no file", hint="sqlite:///absolute/path")
    return path
