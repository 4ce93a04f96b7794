"""Attacks around WebAssembly that are no single payload (test_wasm_attacks.py has those): planted links,
compiled modules, the compiler, the worker. Each has its control.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ringfence.conformance.harness import Kit, gone, opened, python, run
from ringfence.guest.link import GuestLink
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import InvalidRequest
from ringfence.model.levels import Cause
from ringfence.runtimes.wasm import cache, packages
from security.stage import Stage
from support.modules import wasm

MIB = 1 << 20
# Reads one of several paths; succeeds if the mark is found in any.
READ = """
import sys, os
mark, paths = sys.argv[1], sys.argv[2:]
found = []
for path in paths:
    try:
        if mark in open(path, errors="replace").read(): found.append("succeeded")
        else: found.append("different")
    except OSError as e: found.append("invisible")
print("succeeded" if "succeeded" in found else "+".join(sorted(set(found))))
"""


@pytest.fixture
async def kit() -> AsyncIterator[Kit]:
    with tempfile.TemporaryDirectory(prefix="rf-wasm-", ignore_cleanup_errors=True) as folder:
        state = Path(folder)
        state.chmod(0o711)
        async with opened(state, "wasm") as made:
            yield made


async def test_files_of_the_host(kit: Kit, stage: Stage) -> None:
    up = "../" * 12
    ways = ("", up, "/workspace/" + up, "/proc/1/root", "/proc/self/cwd/" + up, "//", "/tmp/" + up)
    paths = [way + stage.decoy for way in ways]
    link = await kit.started()
    assert (await python(link, READ, stage.marker, *paths)).text == "invisible"
    # Control: the same program, and the decoy's folder opened by the policy.
    link = await kit.started(mounts=[(str(stage.folder), "/shown", True)])
    assert (await python(link, READ, stage.marker, "/shown/secret")).text == "succeeded"
    done = await python(link, "open('/shown/writable', 'w')")
    assert done.exit.code == 1, "a folder that is shown read-only was written"
    assert Path(stage.writable).read_text() == f"{stage.marker}\n"


async def test_files_of_its_own_wall_that_are_not_opened(kit: Kit) -> None:
    link = await kit.started()
    names = [
        "/etc/passwd",
        "/proc/self/status",
        "/proc/1/cmdline",
        "/sys/modules/python",
        "/sys/site/ringfence/py.typed",
        "/dev/null",
        "/usr/bin/env",
        "/workspace/../etc/passwd",
        "../etc/passwd",
    ]
    for name in names:
        done = await python(link, READ, "root", name)
        assert done.text == "invisible", name
    # Control: they are there, for the worker.
    for name in names[:3]:
        assert await link.files.read_bytes(name)


async def test_symlinks_lead_nowhere(kit: Kit) -> None:
    link = await kit.started()
    code = (
        "import os\n"
        "for n, to in enumerate(['/etc/passwd', '../etc/passwd', '/workspace/../etc', '/proc/1']):\n"
        " try: os.symlink(to, f'link{n}')\n"
        " except OSError: pass\n"
    )
    await python(link, code)
    tar = _archive_with_link("planted", "../etc/passwd")
    with pytest.raises(Exception, match="leaves"):
        await link.files.tar_in("/workspace", tar)
    for name in ("link0", "link1", "link2/passwd", "link3/cmdline", "planted"):
        assert (await python(link, READ, "root", name)).text == "invisible", name
    # Control: a link that stays inside is followed.
    await link.files.write("/workspace/plain", b"root")
    await python(link, "import os; os.symlink('plain', 'inner')")
    assert (await python(link, READ, "root", "inner")).text == "succeeded"


def _archive_with_link(name: str, target: str) -> bytes:
    import io
    import tarfile

    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = tarfile.SYMTYPE, target
        archive.addfile(info)
    return made.getvalue()


async def test_a_compiled_module_of_its_own_is_not_loaded(kit: Kit) -> None:
    """Machine code in the place of WebAssembly: only what the host compiled and verified is loaded as such."""  # noqa: E501
    link = await kit.started()
    native = await cache.compiled(
        cache.require_library(), wasm('(module (func (export "_start")))'), fuel=False
    )
    await link.files.write("native.wasm", native)
    assert (await run(link, "native.wasm")).exit.code == 126
    with pytest.raises(Exception, match=r"Read-only|Permission|denied"):
        await link.files.write("/sys/modules/python", native)
    assert (await run(link, "true")).exit.code == 0


async def test_a_spoiled_cache_is_not_used(kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "m.wasm"
    source.write_bytes(wasm('(module (func (export "_start")))'))
    source.chmod(0o644)
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "modules"))
    store = cache.ModuleCache(str(tmp_path / "modules"), cache.require_library())
    path = Path(await store.get(str(source)))
    evil = await cache.compiled(
        cache.require_library(), wasm('(module (func (export "_start") unreachable))'), fuel=False
    )
    good = path.read_bytes()
    path.write_bytes(evil)
    link = await kit.started(mounts=[(str(source), "/m.wasm", True)])
    assert (await run(link, "/m.wasm")).exit.code == 0
    assert path.read_bytes() == good
    # Control: with its note changed too it would have been used, so the digest is what holds.
    path.write_bytes(evil)
    import hashlib

    Path(str(path) + ".sha256").write_text(hashlib.sha256(evil).hexdigest())
    link = await kit.started(mounts=[(str(source), "/m.wasm", True)])
    assert (await run(link, "/m.wasm")).exit.signal == signal.SIGABRT


async def test_the_worker_has_a_wall_of_its_own(kit: Kit) -> None:
    sandbox = await kit.sandbox()
    measured = await sandbox.boundary()
    assert (measured.level.value, measured.boundary.value) == ("L1", "instruction")
    assert {"user", "mnt", "pid", "net", "ipc", "uts"} <= set(measured.namespaces)
    assert (measured.seccomp, measured.no_new_privs, measured.capabilities) == ("filter", True, ())
    assert measured.host_uid != 0
    assert measured.network == "none"


async def test_the_compiler_has_given_up_its_rights() -> None:
    """What it locks itself into, tried by the same code with an attack in the place of the compiler."""
    import asyncio
    import sys

    import ringfence

    place = os.path.dirname(os.path.dirname(os.path.abspath(ringfence.__file__)))
    attack = (
        "import sys, os, socket; sys.path.insert(0, sys.argv[1])\n"
        "from ringfence.runtimes.wasm.compiling import lock_down\n"
        "if sys.argv[2] == 'on': lock_down(4 << 30, 60)\n"
        "def attempt(call):\n"
        " try: call(); return 'yes'\n"
        " except OSError: return 'no'\n"
        "print(attempt(lambda: open('/etc/passwd')), attempt(lambda: os.listdir('/')),"
        " attempt(lambda: os.unshare(0x10000000) if hasattr(os, 'unshare') else open('/etc/group')),"
        " attempt(lambda: os.execv('/bin/true', ['true']) if sys.argv[2] == 'on' else None), os.geteuid() != 0)\n"  # noqa: E501
    )
    outcomes = []
    for state in ("on", "off"):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-c", attack, place, state, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
        outcomes.append(output.decode().split())
    assert outcomes[0] == ["no", "no", "no", "no", "True"]
    assert outcomes[1][:4] == ["yes", "yes", "yes", "yes"]


async def test_a_hostile_module_for_the_compiler(tmp_path: Path) -> None:
    for code in (b"", b"\0asm\1\0\0\0" + os.urandom(2000), b"\xff" * 100_000):
        with pytest.raises(InvalidRequest):
            await cache.compiled(str(packages.library()), code, fuel=False)


async def test_a_dead_worker_takes_everything_with_it(kit: Kit) -> None:
    sandbox = await kit.sandbox()
    link = await kit.link(sandbox)
    await link.start(ProcessSpec(("sleep", "60"), detached=True))
    os.kill(sandbox.handle.pid, signal.SIGKILL)
    end = await sandbox.ended
    assert end.cause is Cause.RUNTIME_CRASH
    await gone(sandbox.handle)


async def test_files_of_another_sandbox(kit: Kit) -> None:
    neighbour = await kit.sandbox()
    theirs = await kit.link(neighbour)
    await theirs.files.write("/workspace/secret", b"neighbours-secret")
    link = await kit.started()
    pid, folder = neighbour.handle.pid, neighbour.handle.folder
    paths = [
        "/workspace/secret",
        f"/proc/{pid}/root/workspace/secret",
        f"/proc/{pid}/cwd/secret",
        f"{folder}/upper/workspace/secret",
        f"{folder}/guest.sock",
        "../../../../../.." + folder + "/guest.sock",
    ]
    for path in paths:
        assert (await python(link, READ, "neighbours-secret", path)).text == "invisible", path
    # Control: its own file of that name, by the same program; and the neighbour's is there all the while.
    await link.files.write("/workspace/secret", b"neighbours-secret")
    assert (await python(link, READ, "neighbours-secret", *paths)).text == "succeeded"
    assert await theirs.files.read_bytes("/workspace/secret") == b"neighbours-secret"


async def names(link: GuestLink) -> set[str]:
    return {os.path.basename(entry.path) for entry in await link.files.list("/workspace")}


HOSTILE_NAMES = ["new\nline", "\x1b[2J", "\r", "‮gpj.exe", "-rf", "..x", " ", "a" * 255, "'; true #", "%s%n"]


async def test_hostile_file_names(kit: Kit) -> None:
    sandbox = await kit.sandbox()
    link = await kit.link(sandbox)
    code = "import json, sys\nfor name in json.loads(sys.argv[1]): open(name, 'w').write(name)"
    import json

    done = await python(link, code, json.dumps(HOSTILE_NAMES))
    assert done.exit.code == 0, done.stderr
    assert await names(link) == set(HOSTILE_NAMES)
    changed = {change.path.removeprefix("/workspace/") for change in await sandbox.changes()}
    assert changed == set(HOSTILE_NAMES)
    # What no file system of WebAssembly may name: nothing climbs out, nothing is cut short.
    code = (
        "import os, sys\n"
        "for name in ('../out', 'x/../../out', '/tmp/../out', 'a' * 256, 'nul\\0byte', ''):\n"
        " try: open(name, 'w')\n"
        " except (OSError, ValueError): continue\n"
        " print('made', ascii(name))"
    )
    done = await python(link, code)
    assert (done.exit.code, done.text) == (0, ""), done.stderr
    assert await names(link) == set(HOSTILE_NAMES)
    # WASI knows no root: a name that begins there and is in no opened folder means the working directory.
    assert (await python(link, "open('/out', 'w')")).exit.code == 0
    assert await names(link) == {*HOSTILE_NAMES, "out"}


async def test_a_module_that_floods_the_service_with_answers(kit: Kit) -> None:
    """``ringfence.wasm``: the module's process is hostile, and speaks to us over its standard output."""
    from ringfence.wasm import Module, Trap

    async with await Module.open(wasm('(module (func (export "f")))'), node=kit.node) as module:
        assert await module.call("f") is None  # control
        module._seen += b"\xff\xff\xff\xff"  # as if it had said: four gigabytes follow
        with pytest.raises(Trap, match="nonsense"):
            await module.call("f")
    async with await Module.open(wasm('(module (func (export "f")))'), node=kit.node) as module:
        module._seen += b"\2\0\0\0[]"  # JSON, but no answer
        with pytest.raises(Trap, match="nonsense"):
            await module.call("f")
