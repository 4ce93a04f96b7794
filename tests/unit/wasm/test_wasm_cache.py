"""The cache of compiled modules: machine code, so what is loaded must be what was made here."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from ringfence.model.errors import HostLimit, InvalidRequest
from ringfence.runtimes.wasm import cache, packages
from ringfence.runtimes.wasm.engine import Engine, Instance
from support.modules import PLAIN, wasm


@pytest.fixture
def store(tmp_path: Path) -> cache.ModuleCache:
    return cache.ModuleCache(str(tmp_path / "modules"), str(packages.library()))


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "plain.wasm"
    path.write_bytes(wasm(PLAIN))
    return str(path)


async def test_made_once_and_found_by_digest(store: cache.ModuleCache, source: str) -> None:
    paths = await asyncio.gather(*(store.get(source) for _ in range(3)))
    assert len(set(paths)) == 1
    engine = Engine(store.library)
    one = Instance(engine)
    one.instantiate(engine.load(paths[0]))
    assert one.call("add", 2, 3) == [5]
    again = cache.ModuleCache(store.root, store.library)
    assert again.find(again.digest(source)) == paths[0]
    assert sorted(os.listdir(store.root)) == sorted(Path(p).name for p in (paths[0], paths[0] + ".sha256"))


@pytest.mark.parametrize("how", ["changed", "writable", "no-note", "other-note", "symlink", "folder"])
async def test_an_entry_that_is_not_to_be_trusted_is_not_used(
    store: cache.ModuleCache, source: str, tmp_path: Path, how: str
) -> None:
    path = Path(await store.get(source))
    good = path.read_bytes()
    if how == "changed":
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    elif how == "writable":
        path.chmod(0o666)
    elif how == "no-note":
        Path(str(path) + ".sha256").unlink()
    elif how == "other-note":
        Path(str(path) + ".sha256").write_text("0" * 64)
    elif how == "symlink":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        Path(store.root).chmod(0o777)
    fresh = cache.ModuleCache(store.root, store.library)  # the one above remembers untouched files only
    digest = fresh.digest(source)
    if how not in ("no-note", "other-note"):
        assert store.find(digest) is None
    else:
        assert fresh.find(digest) is None
    if how == "folder":
        with pytest.raises(HostLimit):
            await fresh.get(source)
        Path(store.root).chmod(0o711)
    assert Path(await fresh.get(source)).read_bytes()  # made again
    assert fresh.find(digest) is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
async def test_an_entry_of_another_user(store: cache.ModuleCache, source: str) -> None:
    path = await store.get(source)
    os.chown(path, 65534, 65534)
    assert cache.ModuleCache(store.root, store.library).find(store.digest(source)) is None


async def test_what_is_no_module_is_said_so(store: cache.ModuleCache, tmp_path: Path) -> None:
    path = tmp_path / "bad.wasm"
    path.write_bytes(b"\0asm\1\0\0\0 garbage")
    with pytest.raises(InvalidRequest, match="no WebAssembly module"):
        await store.get(str(path))
    assert not Path(store.root).exists()


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    assert cache.root_for("/state/sandboxes/sb-1") == "/state/modules"
    monkeypatch.setenv("RINGFENCE_HOME", "/elsewhere")
    assert cache.root_for("/tmp/probe") == "/elsewhere/modules"
    monkeypatch.setenv(cache.VARIABLE, "/shared")
    assert cache.root_for("/state/sandboxes/sb-1") == "/shared"
