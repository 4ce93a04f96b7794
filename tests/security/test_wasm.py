"""Attacks from inside a WebAssembly module, each with its control. The programs of the other tables can't run
there: there is no instruction for a system call. What a module has are the imports that it is given.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ringfence.conformance.harness import Kit, alive, nothing_left, python, run
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import InvalidRequest
from ringfence.model.levels import Cause
from ringfence.node.service import Node
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
        node = await Node.open(state)
        try:
            made = Kit(state, node, await node.runtime("wasm"))
            await made.runtime.driver.prepare(str(state / "sandboxes" / "none"))  # type: ignore[attr-defined]
            try:
                yield made
            finally:
                await made.close()
        finally:
            await node.close()
        await nothing_left(state, made.ids)


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


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.socket().connect(('127.0.0.1', int(sys.argv[1])))",
        "import socket; socket.create_connection(('127.0.0.1', int(sys.argv[1])))",
        "os.fork()",
        "os.execv('/bin/sh', ['sh'])",
        "os.posix_spawn('/bin/sh', ['sh'], {})",
        "import subprocess; subprocess.run(['true'])",
        "import ctypes; ctypes.CDLL(None)",
        "import threading; threading.Thread(target=print).start()",
        "os.kill(1, 9)",
        "os.setuid(0)",
        "os.mkfifo('pipe')",
        "os.link('/etc/passwd', 'hard')",
    ],
)
async def test_system_calls_are_not_there(kit: Kit, stage: Stage, code: str) -> None:
    link = await kit.started()
    body = f"import os, sys\ntry:\n {code}\nexcept (Exception, SystemExit) as e: print('denied', type(e).__name__)\n"  # noqa: E501
    done = await python(link, body + "else: print('succeeded')", str(stage.tcp))
    assert done.text.startswith("denied"), (done.text, done.stderr)
    control = body.replace(code, "os.listdir('.')")
    assert (await python(link, control + "else: print('succeeded')")).text == "succeeded"


async def test_memory_bomb(kit: Kit) -> None:
    sandbox = await kit.sandbox(memory=96 * MIB, disk=16 * MIB)
    code = "x = []\nwhile True: x.append(bytearray(b'1' * (1 << 20)))"
    result = await sandbox.run(ProcessSpec(("python3", "-I", "-S", "-c", code)))
    assert result.end.cause is Cause.OUT_OF_MEMORY
    small = await kit.sandbox(memory=96 * MIB, disk=16 * MIB)
    fine = await small.run(ProcessSpec(("python3", "-I", "-S", "-c", "x = bytearray(b'1' * (16 << 20))")))
    assert fine.end.exit_code == 0


@pytest.mark.parametrize(
    "text",
    [
        '(module (memory 65536) (func (export "_start")))',
        '(module (table 100000000 funcref) (func (export "_start")))',
        '(module (import "env" "system" (func (param i32))) (func (export "_start")))',
        '(module (import "wasi_snapshot_preview1" "none" (func)) (func (export "_start")))',
    ],
    ids=["memory", "table", "import", "wasi"],
)
async def test_modules_that_ask_for_too_much(kit: Kit, text: str) -> None:
    link = await kit.started(memory=96 * MIB, disk=16 * MIB)
    await link.files.write("m.wasm", wasm(text))
    assert (await run(link, "m.wasm")).exit.code == 126
    await link.files.write("m.wasm", wasm('(module (memory 1) (table 10 funcref) (func (export "_start")))'))
    assert (await run(link, "m.wasm")).exit.code == 0


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
    assert not alive(sandbox.handle)
