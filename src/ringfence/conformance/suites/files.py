"""Files: every operation, hostile names, atomic writes, archives, watching."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import os
import tarfile
import time
from collections.abc import AsyncIterator

import pytest

from ringfence.conformance.harness import Kit, RuntimeSuite, python, run
from ringfence.conformance.plugin import needs
from ringfence.guest.files import Watch, WatchEvent
from ringfence.guest.link import GuestLink
from ringfence.model.errors import GuestRefused

MIB = 1024 * 1024
# Surrogate-escaped where the bytes are no UTF-8.
NAMES = [
    "new\nline",
    "x" * 255,
    os.fsdecode(b"\xff\xfe\x80"),
    " ",
    "-rf",
    "*",
    "ü",
    "a\\b",
    "tab\t",
    "quote'\"",
    "\x1b[2J",
    "...",
]


async def refused(number: int, call: object) -> None:
    """The guest must answer with this errno."""
    with pytest.raises(GuestRefused) as caught:
        await call  # type: ignore[misc]
    assert caught.value.errno == number, errno.errorcode.get(caught.value.errno)


class FileSuite(RuntimeSuite):
    """file.* and tar.*"""

    @needs("programs")
    async def test_write_and_read(self, kit: Kit) -> None:
        link = await kit.started()
        data = bytes(range(256)) * 5000
        assert await link.files.write("data.bin", data) == len(data)
        assert await link.files.read_bytes("/workspace/data.bin") == data
        assert b"".join([piece async for piece in link.files.read("data.bin", 100, 77)]) == data[100:177]
        assert b"".join([piece async for piece in link.files.read("data.bin", len(data) + 9)]) == b""
        done = await run(link, "sha256sum", "data.bin")
        assert done.text.split()[0] == hashlib.sha256(data).hexdigest()

    async def test_an_empty_file(self, kit: Kit) -> None:
        link = await kit.started()
        assert await link.files.write("empty", b"") == 0
        assert await link.files.read_bytes("empty") == b""

    @needs("programs")
    async def test_modes_and_owner(self, kit: Kit) -> None:
        link = await kit.started()
        await link.files.write("run.sh", b"#!/bin/sh\necho ran\n", 0o755)
        info = await link.files.stat("run.sh")
        assert (info.type, info.mode, info.size) == ("file", 0o755, 19)
        assert (await run(link, "./run.sh")).text == "ran"
        uid = int((await run(link, "id", "-u")).text)
        assert info.uid == uid

    async def test_flags_of_writing(self, kit: Kit) -> None:
        link = await kit.started()
        await refused(errno.ENOENT, link.files.write("a/b/c", b"x"))
        await link.files.write("a/b/c", b"one", parents=True)
        await link.files.write("a/b/c", b"two", append=True)
        assert await link.files.read_bytes("a/b/c") == b"onetwo"
        await refused(errno.EEXIST, link.files.write("a/b/c", b"x", exclusive=True))
        assert await link.files.read_bytes("a/b/c") == b"onetwo"

    async def test_what_is_refused(self, kit: Kit) -> None:
        link = await kit.started()
        await refused(errno.ENOENT, link.files.read_bytes("none"))
        await refused(errno.EISDIR, link.files.read_bytes("/workspace"))
        await refused(errno.ENOENT, link.files.stat("none"))
        await refused(errno.ENOENT, link.files.list("none"))
        await refused(errno.ENOENT, link.files.remove("none"))
        await link.files.remove("none", missing_ok=True)
        await link.files.write("file", b"x")
        await refused(errno.ENOTDIR, link.files.stat("file/below"))
        await refused(errno.EFBIG, link.files.read_bytes("file", limit=0))
        with pytest.raises(GuestRefused):
            await link.files.write("/proc/forged", b"x")

    async def test_a_write_that_breaks_off_leaves_the_old_file(self, kit: Kit) -> None:
        link = await kit.started()
        await link.files.write("keep", b"old")

        async def breaking() -> AsyncIterator[bytes]:
            yield b"new" * 1000
            raise RuntimeError("the source broke")

        with pytest.raises(RuntimeError):
            await link.files.write("keep", breaking())
        assert await link.files.read_bytes("keep") == b"old"
        await self._only(link, {"keep"})

    async def _only(self, link: GuestLink, names: set[str]) -> None:
        """No temporary file stays (its removal needs no answer, so it may take a moment)."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            seen = {info.path for info in await link.files.list("/workspace")}
            if seen == names:
                return
        assert seen == names

    async def test_a_reader_never_sees_half_a_file(self, kit: Kit) -> None:
        link = await kit.started()
        await link.files.write("swap", b"0" * 300_000)
        code = (
            "seen=set()\nfor n in range(3000):\n d=open('swap','rb').read()\n"
            " assert len(d)==300000 and d==d[:1]*300000, (len(d), set(d))\n"
            " seen.add(d[:1])\nprint(len(seen)>0)"
        )
        reading = asyncio.create_task(python(link, code))
        turn = 0
        while not reading.done():
            turn += 1
            await link.files.write("swap", str(turn % 10).encode() * 300_000)
        assert reading.result().text == "True", reading.result().stderr

    @needs("programs")
    async def test_listing(self, kit: Kit) -> None:
        link = await kit.started()
        await link.files.mkdir("tree/one/two", parents=True)
        await link.files.write("tree/one/two/file", b"12345")
        await run(link, "ln", "-s", "/etc/passwd", "tree/link")
        flat = {info.path: info for info in await link.files.list("tree")}
        assert set(flat) == {"one", "link"}
        assert (flat["link"].type, flat["link"].target) == ("symlink", "/etc/passwd")
        deep = {info.path: info for info in await link.files.list("tree", depth=9)}
        assert set(deep) == {"one", "one/two", "one/two/file", "link"}
        assert deep["one/two/file"].size == 5

    @needs("programs")
    async def test_symlinks_are_told_from_their_targets(self, kit: Kit) -> None:
        link = await kit.started()
        await link.files.write("target", b"12345")
        await run(link, "ln", "-s", "target", "link")
        assert (await link.files.stat("link")).type == "file"
        assert (await link.files.stat("link", follow=False)).type == "symlink"

    async def test_move_and_remove(self, kit: Kit) -> None:
        link = await kit.started()
        await link.files.write("a", b"a")
        await link.files.write("b", b"b")
        await refused(errno.EEXIST, link.files.move("a", "b", exclusive=True))
        await link.files.move("a", "b")
        assert await link.files.read_bytes("b") == b"a"
        await link.files.mkdir("full")
        await link.files.write("full/file", b"x")
        await refused(errno.ENOTEMPTY, link.files.remove("full"))
        await link.files.remove("full", recursive=True)
        await refused(errno.EEXIST, link.files.mkdir("b"))
        await link.files.mkdir("p/q", parents=True)
        await link.files.mkdir("p/q", parents=True)

    @needs("programs")
    async def test_removing_does_not_follow_links(self, kit: Kit) -> None:
        link = await kit.started()
        await link.files.write("precious/file", b"x", parents=True)
        await link.files.mkdir("doomed")
        await run(link, "ln", "-s", "/workspace/precious", "doomed/link")
        await link.files.remove("doomed", recursive=True)
        assert await link.files.read_bytes("precious/file") == b"x"

    @pytest.mark.parametrize("name", NAMES, ids=ascii)
    async def test_hostile_names(self, kit: Kit, name: str) -> None:
        link = await kit.started()
        await link.files.write(f"odd/{name}", b"content", parents=True)
        assert [info.path for info in await link.files.list("odd")] == [name]
        assert await link.files.read_bytes(f"odd/{name}") == b"content"
        if kit.capabilities.programs or name.encode(errors="ignore").decode() == name:  # UTF-8 to WebAssembly
            assert (await python(link, "import os; print(ascii(os.listdir('odd')))")).text == ascii([name])
        await link.files.move(f"odd/{name}", "odd/plain")
        await link.files.move("odd/plain", f"odd/{name}")
        await link.files.remove(f"odd/{name}")
        assert await link.files.list("odd") == []

    async def test_a_name_that_is_too_long(self, kit: Kit) -> None:
        link = await kit.started()
        await refused(errno.ENAMETOOLONG, link.files.write("x" * 256, b""))

    async def test_large_files(self, kit: Kit) -> None:
        link = await kit.started()
        block = bytes(range(253)) * 4096

        async def blocks() -> AsyncIterator[bytes]:
            for _ in range(24):
                yield block

        assert await link.files.write("large", blocks()) == 24 * len(block)
        digest = hashlib.sha256()
        async for piece in link.files.read("large"):
            digest.update(piece)
        assert digest.hexdigest() == hashlib.sha256(block * 24).hexdigest()

    async def test_archives_round_trip(self, kit: Kit) -> None:
        link = await kit.started()
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for name, data in (("a/plain", b"1"), ("a/" + "n" * 200, b"2"), ("a/ü\nx", b"3" * 100_000)):
                info = tarfile.TarInfo(name)
                info.size, info.mode = len(data), 0o640
                archive.addfile(info, io.BytesIO(data))
            info = tarfile.TarInfo("a/link")
            info.type, info.linkname = tarfile.SYMTYPE, "plain"
            archive.addfile(info)
        assert await link.files.tar_in("into", made.getvalue()) >= 4
        back = io.BytesIO(b"".join([piece async for piece in link.files.tar_out("into")]))
        with tarfile.open(fileobj=back) as archive:
            found = {member.name.partition("a/")[2]: member for member in archive.getmembers()}
            assert found["link"].linkname == "plain"
            member = archive.extractfile(found["ü\nx"])
            assert member is not None
            assert member.read() == b"3" * 100_000
        assert (await link.files.stat("into/a/plain")).mode == 0o640

    @pytest.mark.parametrize(
        "attack", ["absolute", "climbing", "through-link", "device", "hard-link", "garbage"]
    )
    async def test_hostile_archives_are_refused(self, kit: Kit, attack: str) -> None:
        link = await kit.started()
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT) as archive:
            info = tarfile.TarInfo(
                {"absolute": "/tmp/forged", "climbing": "a/../../../tmp/forged"}.get(attack, "d")
            )
            if attack == "through-link":
                info.type, info.linkname = tarfile.SYMTYPE, "/tmp"
                archive.addfile(info)
                info = tarfile.TarInfo("d/forged")
            elif attack == "device":
                info.type, info.devmajor, info.devminor = tarfile.CHRTYPE, 1, 3
            elif attack == "hard-link":
                info.type, info.linkname = tarfile.LNKTYPE, "../../etc/passwd"
            archive.addfile(info)
        data = made.getvalue() if attack != "garbage" else b"\xa5" * 2048
        await refused(errno.EINVAL, link.files.tar_in("into", data))
        await refused(errno.ENOENT, link.files.stat("/tmp/forged"))


async def wanted(watch: Watch, path: str, kinds: set[str]) -> WatchEvent:
    """The next event about ``path`` of one of the kinds."""
    async for event in watch:
        if event.path == path and event.kind in kinds:
            return event
    raise AssertionError("the watch ended")


@needs("watch")
class WatchSuite(RuntimeSuite):
    """file.watch"""

    async def test_changes_are_seen(self, kit: Kit) -> None:
        link = await kit.started()
        await link.files.mkdir("watched")
        watch = await link.files.watch("watched")
        await run(link, "/bin/sh", "-c", "cd watched; echo 1 > new; mkdir folder")
        await wanted(watch, "new", {"created"})
        await wanted(watch, "new", {"modified"})
        assert (await wanted(watch, "folder", {"created"})).directory
        await run(link, "/bin/sh", "-c", "cd watched; rm new")
        await wanted(watch, "new", {"deleted"})
        await watch.close()
        assert (await run(link, "echo", "on")).text == "on"

    async def test_recursively_into_new_folders(self, kit: Kit) -> None:
        link = await kit.started()
        await link.files.mkdir("watched/deep", parents=True)
        watch = await link.files.watch("watched", recursive=True)
        await link.files.write("watched/deep/file", b"x")
        await wanted(watch, "deep/file", {"created", "moved", "modified"})
        await run(link, "mkdir", "watched/fresh")
        assert (await wanted(watch, "fresh", {"created"})).directory
        await link.files.write("watched/fresh/file", b"x")
        await wanted(watch, "fresh/file", {"created", "moved", "modified"})

    async def test_what_can_not_be_watched(self, kit: Kit) -> None:
        link = await kit.started()
        await refused(errno.ENOENT, link.files.watch("none"))
