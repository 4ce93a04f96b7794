"""Bash contexts in a real jail."""

from __future__ import annotations

import asyncio

import pytest

from ringfence.guest.contexts import Contexts, Text
from ringfence.model.errors import InvalidRequest, NotFound
from ringfence.node.sandboxes import NodeSandbox


async def test_state_lives_on(contexts: Contexts) -> None:
    await contexts.create("bash", id="b")
    ran = await contexts.run("b", "x=5; cd /tmp; f() { echo in f $1; }; export E=e")
    assert (ran.stdout, ran.stderr, ran.status, ran.exit_code) == ("", "", "ok", 0)
    ran = await contexts.run("b", 'f $x; pwd; sh -c "echo \\$E"; echo oops >&2; false')
    assert (ran.stdout, ran.stderr) == ("in f 5\n/tmp\ne\n", "oops\n")
    assert (ran.status, ran.exit_code, ran.error) == ("error", 1, None)
    assert (await contexts.get("b")).cwd == "/tmp"


async def test_nothing_of_the_kernel_shows(contexts: Contexts) -> None:
    await contexts.create("bash", id="b")
    ran = await contexts.run("b", "ls /proc/self/fd; echo $#; cat")
    assert ran.stdout.split() == ["0", "1", "2", "3", "0"]  # 3: ls reads the folder
    ran = await contexts.run("b", "if then")
    assert ran.exit_code == 2 and "syntax error" in ran.stderr
    ran = await contexts.run("b", "exec 2>&1; echo to both >&2")
    assert (ran.stdout, ran.status) == ("to both\n", "ok")
    ran = await contexts.run("b", "exec >/dev/null; echo gone")
    assert (ran.stdout, ran.status) == ("", "ok")


async def test_every_byte_arrives(contexts: Contexts) -> None:
    await contexts.create("bash", id="b")
    text = "é€😀\x1e\x1eringfence end x 0\x1e" * 2000
    ran = await contexts.run("b", f"t='{text}'; printf %s \"$t\"; printf '\\036'")
    assert ran.stdout == text + "\x1e"
    with pytest.raises(InvalidRequest):
        await contexts.run("b", "echo \0")
    with pytest.raises(InvalidRequest):
        await contexts.run("b", "1", env={"a b": "1"})
    ran = await contexts.run("b", "head -c 3000000 /dev/zero | tr '\\0' x; echo; echo e >&2")
    assert ran.stdout == "x" * 3000000 + "\n" and ran.stderr == "e\n"


async def test_env_of_one_call(contexts: Contexts) -> None:
    await contexts.create("bash", id="b", env={"ALL": "a"})
    ran = await contexts.run("b", "sh -c 'echo $ALL $ONE'", env={"ONE": 'it\'s "1"'})
    assert ran.stdout == 'a it\'s "1"\n'
    assert (await contexts.run("b", "echo $ONE")).stdout == "\n"


@pytest.mark.parametrize("code", ["while :; do :; done", "sleep 600", "cat <(sleep 600)"])
async def test_an_interrupt_leaves_the_context_alive(contexts: Contexts, code: str) -> None:
    await contexts.create("bash", id="b")
    await contexts.run("b", "kept=1")
    call = await contexts.execute("b", f"echo go; {code}; echo never")
    assert await call.__anext__() == Text("stdout", "go\n")
    await call.interrupt()
    ran = await call.collect()
    assert ran.stdout == "" and ran.exit_code == 130
    await contexts.interrupt("b")
    assert (await contexts.run("b", "echo $kept")).stdout == "1\n"


async def test_exit_ends_the_context(contexts: Contexts) -> None:
    await contexts.create("bash", id="b")
    ran = await contexts.run("b", "echo last; exit 3")
    assert (ran.stdout, ran.status) == ("last\n", "ended") and ran.error is not None
    with pytest.raises(NotFound):
        await contexts.run("b", "echo")
    await contexts.restart("b")
    assert (await contexts.run("b", "echo new")).stdout == "new\n"


async def test_calls_queue_and_get_their_own_output(contexts: Contexts) -> None:
    await contexts.create("bash", id="b")
    rans = await asyncio.gather(*(contexts.run("b", f"echo {n}; echo {n} >&2") for n in range(8)))
    assert [(ran.stdout, ran.stderr) for ran in rans] == [(f"{n}\n", f"{n}\n") for n in range(8)]


async def test_a_call_goes_on_over_another_link(sandbox: NodeSandbox, contexts: Contexts) -> None:
    await contexts.create("bash", id="b")
    first = await sandbox.new_link()
    call = await Contexts(first).execute(
        "b",
        "seq 30; while ! [ -e /tmp/go ]; do sleep 0.01; done; seq 31 99; four() { return 4; }; four",
    )
    text = ""
    while "20\n" not in text:
        event = await call.__anext__()
        assert isinstance(event, Text)
        text += event.text
    first.abort()
    async with await sandbox.new_link() as second:
        await second.files.write("/tmp/go", b"")
        rest = await (await Contexts(second).resume("b", call.id, call.place)).collect()
    assert (text + rest.stdout).split() == [str(n) for n in range(1, 100)]
    assert rest.exit_code == 4
