"""Sandboxes of the runtime `wasm`: what the general suites test with a shell, and what it alone has."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from pathlib import Path

import pytest

from ringfence.conformance.harness import Kit, alive, eventually, finish, python, read_until, run
from ringfence.guest.processes import FROM_NOW, Output, ProcessSpec
from ringfence.model.errors import GuestRefused
from ringfence.model.levels import Cause
from ringfence.runtimes.wasm.commands import DEADLINE, FUEL
from support.modules import HELLO, SPIN, START_SPINS, wasm

MIB = 1 << 20


def script(code: str) -> tuple[str, ...]:
    return ("python3", "-I", "-S", "-c", code)


async def test_exit_codes_and_streams(kit: Kit) -> None:
    link = await kit.started()
    done = await python(link, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(37)")
    assert (done.exit.code, done.stdout, done.stderr) == (37, b"out\n", b"err\n")
    merged = await python(
        link, "import sys; print('a', flush=True); print('b', file=sys.stderr)", merge_stderr=True
    )
    assert (merged.stdout, merged.stderr) == (b"a\nb\n", b"")
    assert (await run(link, "true")).exit.code == 0
    assert (await run(link, "false")).exit.code == 1


async def test_environment_arguments_and_working_directory(kit: Kit) -> None:
    os.environ["RINGFENCE_TEST_HOST"] = "secret"
    try:
        link = await kit.started(env={"MINE": "1"})
    finally:
        del os.environ["RINGFENCE_TEST_HOST"]
    await link.files.mkdir("deep/er", parents=True)
    code = (
        "import os, sys; print(sorted(os.environ.items())); print(sys.argv[1:]); open('here', 'w').write('x')"
    )
    done = await python(link, code, "ü", "a b", "", env={"OTHER": "2"}, cwd="deep/er")
    assert done.exit.code == 0, done.stderr
    assert "('MINE', '1')" in done.text
    assert "('OTHER', '2')" in done.text
    assert "RINGFENCE_TEST_HOST" not in done.text
    assert "['ü', 'a b', '']" in done.text
    assert await link.files.read_bytes("/workspace/deep/er/here") == b"x"


async def test_quickjs(kit: Kit) -> None:
    link = await kit.started()
    code = (
        "console.log(1 + 1, scriptArgs.join()); setTimeout(() => console.log('timer'), 5);"
        "let n = 0; const i = setInterval(() => { console.log('tick'); if (++n == 2) clearInterval(i); }, 1);"
        "Promise.resolve().then(() => console.log('micro'))"
    )
    done = await run(link, "qjs", "-e", code, "a", "b")
    assert done.exit.code == 0, done.stderr
    lines = done.text.splitlines()
    assert lines[:2] == ["2 a,b", "micro"]
    assert sorted(lines[2:]) == ["tick", "tick", "timer"]
    await link.files.write("m.mjs", b"export const x = 42; console.log('module', await x)")
    assert (await run(link, "qjs", "m.mjs")).text == "module 42"
    assert (await run(link, "qjs", "-", stdin=b"console.log('input')")).text == "input"
    failed = await run(link, "qjs", "-e", "throw new Error('mine')")
    assert failed.exit.code == 1
    assert b"mine" in failed.stderr
    assert (await run(link, "qjs", "-e", "std.exit(9)")).exit.code == 9


async def test_any_module(kit: Kit) -> None:
    link = await kit.started()
    await link.files.write("hello.wasm", wasm(HELLO))
    done = await run(link, "./hello.wasm")
    assert (done.exit.code, done.stdout) == (7, b"hello\n")
    await link.files.write("bad.wasm", b"\0asm garbage")
    done = await run(link, "bad.wasm")
    assert done.exit.code == 126
    assert b"bad.wasm" in done.stderr


async def test_a_mounted_module_is_compiled_by_the_host_once(kit: Kit, tmp_path: Path) -> None:
    path = tmp_path / "hello.wasm"
    path.write_bytes(wasm(HELLO) + b"\0\5\1x" + os.urandom(3))  # a custom section: a digest of its own
    path.chmod(0o644)
    before = set(os.listdir(os.environ["RINGFENCE_MODULES"]))
    for _ in range(2):
        link = await kit.started(mounts=[(str(path), "/app/hello.wasm", True)])
        assert (await run(link, "/app/hello.wasm")).stdout == b"hello\n"
    made = set(os.listdir(os.environ["RINGFENCE_MODULES"])) - before
    assert len(made) == 2  # the module and its note
    for name in made:
        os.unlink(os.path.join(os.environ["RINGFENCE_MODULES"], name))


async def test_deadline_and_fuel_of_a_command(kit: Kit) -> None:
    link = await kit.started()
    await link.files.write("spin.wasm", wasm(SPIN))
    await link.files.write("start.wasm", wasm(START_SPINS))
    done = await run(link, "spin.wasm", env={DEADLINE: "0.1"})
    assert (done.exit.code, b"deadline" in done.stderr) == (124, True)
    done = await run(link, "start.wasm", env={DEADLINE: "0.1"})
    assert (done.exit.code, b"deadline" in done.stderr) == (124, True)
    done = await run(link, "spin.wasm", env={FUEL: "100000"})
    assert (done.exit.code, b"fuel" in done.stderr) == (124, True)
    done = await run(link, "start.wasm", env={FUEL: "100000"})
    assert done.exit.code == 124
    with pytest.raises(GuestRefused) as caught:
        await run(link, "spin.wasm", env={FUEL: "much"})
    assert caught.value.errno == errno.EINVAL


@pytest.mark.parametrize("rest", ["while True: pass", "import time; time.sleep(60)"])
async def test_a_deadline_ends_an_interpreter_whatever_it_does(kit: Kit, rest: str) -> None:
    link = await kit.started()
    process = await link.start(ProcessSpec(script(f"print(1, flush=True)\n{rest}"), env={DEADLINE: "10"}))
    await read_until(process, b"1\n")
    assert (await process.wait()).code == 124
    assert (await run(link, *script("print(2)"), env={DEADLINE: "60"})).stdout == b"2\n"


async def test_signals(kit: Kit) -> None:
    link = await kit.started()
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        process = await link.start(ProcessSpec(script("print(1, flush=True)\nwhile True: pass")))
        await read_until(process, b"1\n")
        await process.signal(number)
        assert (await process.wait()).signal == number
        with pytest.raises(GuestRefused) as caught:
            await process.signal(number)
        assert caught.value.errno == errno.ESRCH


async def test_input_attach_and_resume(kit: Kit) -> None:
    sandbox = await kit.sandbox()
    link = await kit.link(sandbox)
    code = "import sys\nfor line in sys.stdin: print('got', line, end='', flush=True)"
    first = await link.start(ProcessSpec(script(code), id="kept", stdin=True))
    await first.write(b"one\n")
    assert await read_until(first, b"one\n") == b"got one\n"
    await link.close()
    link = await kit.link(sandbox)
    again, now = await link.attach("kept", stdout=0), await link.attach("kept", stdout=FROM_NOW)
    assert again.stdin_offset == 4
    late, again = again, await link.attach("kept", stdout=0, alone=True)
    await late.displaced.wait()
    with pytest.raises(GuestRefused):
        await late.write(b"late\n")
    late.displaced.clear()  # a host that has not heard of it yet
    await late.write(b"late\n")
    await late.close_stdin()
    await late.close()
    await again.write(b"two\n")
    await again.close_stdin()
    assert (await finish(again)).text == "got one\ngot two"
    assert (await finish(now)).text == "got two"
    assert [(p.id, p.state, p.code) for p in await link.processes()] == [("kept", "exited", 0)]
    with pytest.raises(GuestRefused) as caught:
        await link.start(ProcessSpec(("true",), id="kept"))
    assert caught.value.errno == errno.EEXIST
    await link.remove("kept")
    assert await link.processes() == []


async def test_much_input(kit: Kit) -> None:
    link = await kit.started()
    data = bytes(range(251)) * (4 * MIB // 251)
    code = "import sys, hashlib; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())"
    import hashlib

    assert (await python(link, code, stdin=data)).text == hashlib.sha256(data).hexdigest()
    process = await link.start(ProcessSpec(script("print('deaf')"), stdin=True))
    with pytest.raises(GuestRefused) as caught:
        await process.write(data)
    assert caught.value.errno == errno.EPIPE
    assert (await finish(process)).text == "deaf"


async def test_what_it_has_not_is_refused_by_name(kit: Kit) -> None:
    link = await kit.started()
    with pytest.raises(GuestRefused) as caught:
        await link.start(ProcessSpec(("true",), pty=True))
    assert caught.value.errno == errno.ENOTSUP
    for call in (link.dial(80), link.listen(), link.files.watch("/workspace"), link.quiesce(0.1)):
        with pytest.raises(GuestRefused) as caught:
            await call
        assert caught.value.errno == errno.ENOTSUP
    with pytest.raises(GuestRefused) as caught:
        await run(link, "/bin/sh", "-c", "true")
    assert caught.value.errno == errno.ENOEXEC


async def test_secrets_and_late_environment(kit: Kit) -> None:
    link = await kit.started()
    await link.bind(env={"TOKEN": "late"}, secrets={"key": b"s3cret\0\xff"})
    done = await python(link, "import os; print(os.environ['TOKEN'], open('/run/secrets/key', 'rb').read())")
    assert done.text == r"late b's3cret\x00\xff'", done.stderr
    assert (await python(link, "open('/run/secrets/key', 'wb')")).exit.code == 1


async def test_a_crash_of_a_module_harms_nobody(kit: Kit) -> None:
    sandbox = await kit.sandbox()
    link = await kit.link(sandbox)
    await link.files.write("deep.wasm", wasm('(module (func $f (export "_start") call $f))'))
    other = await link.start(ProcessSpec(("cat",), stdin=True))
    done = await run(link, "deep.wasm")
    assert done.exit.signal == signal.SIGABRT
    assert b"stack" in done.stderr
    await other.write(b"still here\n")
    await other.close_stdin()
    assert (await finish(other)).text == "still here"


async def test_causes(kit: Kit) -> None:
    spin, flood = "while True: pass", "import sys\nwhile True: sys.stdout.write('x' * 4096)"
    for code, wishes, cause in (
        (spin, {"timeout": 1.0}, Cause.DEADLINE),
        (spin, {"cpu_time": 0.5}, Cause.CPU_TIME),
        (flood, {"output": 100_000}, Cause.OUTPUT_LIMIT),
    ):
        sandbox = await kit.sandbox(**wishes)
        seen = bytearray()

        def take(output: Output, seen: bytearray = seen) -> None:
            seen.extend(output.data)

        result = await sandbox.run(ProcessSpec(script(code)), take)
        assert result.end.cause is cause
        assert len(seen) <= 100_000
        await eventually(lambda sandbox=sandbox: not alive(sandbox.handle), "the wall outlived its end")  # type: ignore[misc]


async def test_file_changes_are_seen_by_the_host(kit: Kit) -> None:
    sandbox = await kit.sandbox()
    link = await kit.link(sandbox)
    await python(link, "import os; open('new', 'w').write('new\\n'); os.mkdir('d')")
    changes = {change.path: (change.kind, change.type, change.size) for change in await sandbox.changes()}
    assert changes == {"/workspace/new": ("added", "file", 4), "/workspace/d": ("added", "directory", 0)}


async def test_several_at_once(kit: Kit) -> None:
    link = await kit.started()
    results = await asyncio.gather(*(run(link, "echo", str(n)) for n in range(6)))
    assert [done.text for done in results] == [str(n) for n in range(6)]
