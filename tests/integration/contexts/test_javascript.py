"""JavaScript contexts in a real jail."""

from __future__ import annotations

import shutil

import pytest

from ringfence.guest.contexts import Contexts, Failure, Result, Text
from ringfence.model.errors import Unsupported

pytestmark = pytest.mark.skipif(shutil.which("node", path="/usr/bin:/bin") is None, reason="no Node in /usr")


async def test_variables_live_on_and_the_last_value_is_shown(contexts: Contexts) -> None:
    await contexts.create("javascript", id="j")
    first = await contexts.run(
        "j", "const a = 20; let b = {n: [a, 1]}; class K {}; function f(x) { return x + a }"
    )
    assert (first.results, first.error, first.status) == ((), None, "ok")
    ran = await contexts.run("j", "console.log('out'); console.error('err'); b.n.push(f(2)); b")
    assert (ran.stdout, ran.stderr) == ("out\n", "err\n")
    assert ran.results == (Result(text="{ n: [ 20, 1, 22 ] }", json={"n": [20, 1, 22]}, main=True),)
    assert (await contexts.run("j", "new K();")).results == ()


async def test_top_level_await_and_require(contexts: Contexts) -> None:
    await contexts.create("js", id="j")
    code = "const os = require('os'); const v = await new Promise(done => setTimeout(() => done(7), 5)); v"
    assert (await contexts.run("j", code)).text == "7"
    assert (await contexts.run("j", "v + (await import('fs')).constants.F_OK")).text == "7"


async def test_errors(contexts: Contexts) -> None:
    await contexts.create("javascript", id="j")
    ran = await contexts.run("j", "function deep() { null.x }\ndeep()")
    assert ran.error is not None and ran.error.name == "TypeError" and "deep" in ran.error.traceback
    for code, name in (
        ("throw 'text'", "Error"),
        ("let 1", "SyntaxError"),
        ("await Promise.reject(new RangeError('r'))", "RangeError"),
        ("if (", "SyntaxError"),
    ):
        ran = await contexts.run("j", code)
        assert ran.error is not None and ran.error.name == name, (code, ran)
    ran = await contexts.run(
        "j", "setTimeout(() => { throw new Error('later') }, 1); await new Promise(d => setTimeout(d, 50)); 1"
    )
    assert ran.text == "1" and "later" in ran.stderr
    ran = await contexts.run("j", "process.exit(4)")
    assert ran.status == "ended"


@pytest.mark.parametrize("code", ["while (true) {}", "await new Promise(() => setInterval(() => {}, 1000))"])
async def test_an_interrupt_leaves_the_context_alive(contexts: Contexts, code: str) -> None:
    await contexts.create("javascript", id="j")
    await contexts.run("j", "const kept = 1")
    call = await contexts.execute("j", "console.log('go')\n" + code)
    assert await call.__anext__() == Text("stdout", "go\n")
    await call.interrupt()
    ran = await call.collect()
    assert ran.error is not None and ran.error.name == "KeyboardInterrupt"
    await contexts.interrupt("j")
    assert (await contexts.run("j", "kept")).text == "1"


async def test_rich_display_and_large_values(contexts: Contexts) -> None:
    await contexts.create("javascript", id="j")
    code = (
        "({[Symbol.for('Jupyter.display')]() { return {'text/html': '<b>', 'text/plain': 'p', 'x/y': 1} }})"
    )
    assert (await contexts.run("j", code)).results[0] == Result(
        text="p", html="<b>", extra={"x/y": 1}, main=True
    )
    ran = await contexts.run("j", "display([1]); const s = 'é'.repeat(300000); console.log(s); s.length")
    assert ran.results[0] == Result(text="[ 1 ]", json=[1]) and ran.stdout == "é" * 300000 + "\n"
    assert ran.text == "300000"


async def test_env_of_one_call(contexts: Contexts) -> None:
    await contexts.create("javascript", id="j", env={"ALL": "a"})
    ran = await contexts.run("j", "process.env.ALL + process.env.ONE", env={"ONE": "1"})
    assert ran.text == "'a1'"
    assert (await contexts.run("j", "process.env.ONE")).results == ()


async def test_no_node(contexts: Contexts) -> None:
    with pytest.raises(Unsupported, match="has no node or nodejs"):
        await contexts.create("javascript", env={"PATH": "/nowhere:/bin/nothing"})


async def test_failures_are_events(contexts: Contexts) -> None:
    await contexts.create("javascript", id="j")
    events = [event async for event in await contexts.execute("j", "console.log(1); nope")]
    assert events[0] == Text("stdout", "1\n")
    assert isinstance(events[1], Failure) and events[1].value == "nope is not defined"
