"""Python contexts in a real jail."""

from __future__ import annotations

import asyncio

import pytest

from ringfence.guest.contexts import Contexts, Failure, Finished, Result, Text
from ringfence.guest.link import GuestLink
from ringfence.model.errors import Conflict, GuestRefused, InvalidRequest, NotFound, Unsupported
from ringfence.node.sandboxes import NodeSandbox


async def test_variables_live_on_and_the_last_expression_is_shown(contexts: Contexts) -> None:
    await contexts.create(id="a")
    first = await contexts.run("a", "x = 20\nprint('set')")
    second = await contexts.run("a", "x += 1\nx * 2")
    assert (first.stdout, first.results, first.error, first.status, first.count) == (
        "set\n",
        (),
        None,
        "ok",
        1,
    )
    assert second.text == "42" and second.results[0].main and second.count == 2
    assert (await contexts.run("a", "x;")).results == ()


async def test_events_come_in_order(contexts: Contexts) -> None:
    await contexts.create(id="a")
    code = "import sys, os\nprint('one')\nos.system('echo two')\ndisplay(3)\nsys.stderr.write('four\\n')\n1/0"
    call = await contexts.execute("a", code)
    events = [event async for event in call]
    assert events[:4] == [
        Text("stdout", "one\n"),
        Text("stdout", "two\n"),
        Result(text="3"),
        Text("stderr", "four\n"),
    ]
    failure, end = events[4:]
    assert isinstance(failure, Failure) and failure.name == "ZeroDivisionError"
    assert 'File "<cell 1>", line 6' in failure.traceback and "ringfence" not in failure.traceback
    assert end == Finished("error", 1)


async def test_top_level_await(contexts: Contexts) -> None:
    await contexts.create(id="a")
    await contexts.run("a", "import asyncio\nq = asyncio.Queue()\nasync def f():\n    await q.put(7)")
    ran = await contexts.run("a", "t = asyncio.ensure_future(f())\nawait t\nawait q.get()")
    assert (ran.text, ran.error) == ("7", None)


async def test_an_interrupt_leaves_the_context_alive(contexts: Contexts) -> None:
    await contexts.create(id="a")
    await contexts.run("a", "kept = 'yes'")
    call = await contexts.execute("a", "print('go', flush=True)\nwhile True: pass")
    assert await call.__anext__() == Text("stdout", "go\n")
    await contexts.interrupt("a")
    ran = await call.collect()
    assert ran.error is not None and ran.error.name == "KeyboardInterrupt" and ran.status == "error"
    assert (await contexts.run("a", "kept")).text == "'yes'"
    await contexts.interrupt("a")  # while nothing runs
    assert (await contexts.run("a", "kept")).text == "'yes'"


async def test_interrupts_reach_waiting_and_awaiting_code(contexts: Contexts) -> None:
    await contexts.create(id="a")
    # Not while something is imported: there an interrupt may be printed and lost, as in any Python.
    await contexts.run("a", "import time, asyncio, subprocess")
    for wait in ("time.sleep(600)", "await asyncio.sleep(600)", "subprocess.run(['sleep', '600'])"):
        call = await contexts.execute("a", "print('go', flush=True)\n" + wait)
        await call.__anext__()
        await call.interrupt()
        ran = await call.collect()
        assert ran.error is not None and ran.error.name == "KeyboardInterrupt", ran
    assert (await contexts.run("a", "1")).text == "1"


async def test_over_its_time_a_call_is_interrupted(contexts: Contexts) -> None:
    await contexts.create(id="a")
    await contexts.run("a", "x = 1")
    ran = await contexts.run("a", "while True: pass", timeout=0.3)
    assert ran.status == "timeout" and ran.error is not None
    assert (await contexts.run("a", "x")).text == "1"


async def test_the_time_of_a_call_begins_when_earlier_ones_are_over(contexts: Contexts) -> None:
    await contexts.create(id="a")
    await contexts.run("a", "import time, os")
    code = "print('go', flush=True)\nwhile not os.path.exists('/tmp/go'): time.sleep(0.01)\n'first'"
    first = await contexts.execute("a", code)
    await first.__anext__()
    second = asyncio.ensure_future(contexts.run("a", "'second'", timeout=8.0))
    third = asyncio.ensure_future(contexts.run("a", "while True: pass", timeout=0.2))
    await asyncio.sleep(8.5)  # more than theirs: nobody interrupts the first
    await contexts.run((await contexts.create("bash", id="b")).id, "touch /tmp/go")
    assert (await first.collect()).text == "'first'"
    assert (await second).text == "'second'"
    assert (await third).status == "timeout"


async def test_code_that_ignores_the_interrupt_costs_the_context(
    contexts: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringfence.guest.contexts.calls.PATIENCE", 0.3)
    await contexts.create(id="a")
    await contexts.run("a", "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)")
    ran = await contexts.run("a", "while True: pass", timeout=0.3)
    assert ran.status == "timeout" and ran.error is not None and ran.error.name == "TimeoutError"
    with pytest.raises(NotFound):
        await contexts.run("a", "1")
    await contexts.restart("a")
    assert (await contexts.run("a", "2")).text == "2"


async def test_several_contexts_at_once_know_nothing_of_one_another(contexts: Contexts) -> None:
    names = ["a", "b", "c"]
    await asyncio.gather(*(contexts.create(id=name) for name in names))
    await asyncio.gather(*(contexts.run(name, f"who = {name!r}") for name in names))
    rans = await asyncio.gather(*(contexts.run(name, "who") for name in names))
    assert [ran.text for ran in rans] == ["'a'", "'b'", "'c'"]
    assert [context.id for context in await contexts.list()] == names


async def test_calls_of_one_context_queue_and_get_their_own_output(contexts: Contexts) -> None:
    await contexts.create(id="a")
    rans = await asyncio.gather(*(contexts.run("a", f"print({n})\n{n}") for n in range(8)))
    assert [(ran.stdout, ran.text) for ran in rans] == [(f"{n}\n", str(n)) for n in range(8)]


async def test_life(contexts: Contexts) -> None:
    made = await contexts.create(id="a", cwd="/tmp", env={"WHO": "me"})
    assert (made.id, made.language) == ("a", "python")
    assert (await contexts.run("a", "import os\nos.getcwd(), os.environ['WHO']")).text == "('/tmp', 'me')"
    assert (await contexts.get("a")).cwd == "/tmp"
    with pytest.raises(Conflict):
        await contexts.create(id="a")
    await contexts.restart("a")
    assert (await contexts.run("a", "'os' in globals()")).text == "False"
    await contexts.close("a")
    assert await contexts.list() == []
    for wrong in (contexts.close, contexts.restart, contexts.interrupt, contexts.get):
        with pytest.raises(NotFound):
            await wrong("a")


async def test_env_of_one_call(contexts: Contexts) -> None:
    await contexts.create(id="a")
    assert (await contexts.run("a", "import os\nos.environ['ONE']", env={"ONE": "1"})).text == "'1'"
    assert (await contexts.run("a", "os.environ.get('ONE')")).results == ()


async def test_code_of_any_size_arrives_whole(contexts: Contexts) -> None:
    await contexts.create(id="a")
    text = "äö€😀" * 50_000
    ran = await contexts.run("a", f"t = {text!r}\nlen(t), t[-4:]")
    assert ran.text == "(200000, 'äö€😀')"
    assert (await contexts.run("a", "t")).text == repr(text)
    with pytest.raises(InvalidRequest):
        await contexts.run("a", "#" * (4 * 1024 * 1024 + 1))


async def test_a_call_goes_on_over_another_link(sandbox: NodeSandbox, contexts: Contexts) -> None:
    """As after kill -9 of the host process that made it: nothing is lost, nothing comes twice."""
    await contexts.create(id="a")
    code = (
        "import time, os\nfor n in range(400):\n    print(n, flush=True)\n"
        "    if n == 40:\n        while not os.path.exists('/tmp/go'): time.sleep(0.01)\n'done'"
    )
    first = await sandbox.new_link()
    call = await Contexts(first).execute("a", code)
    text = ""
    while "20\n" not in text:
        event = await call.__anext__()
        assert isinstance(event, Text)
        text += event.text
    first.abort()
    async with await sandbox.new_link() as second:
        await second.files.write("/tmp/go", b"")
        rest = await (await Contexts(second).resume("a", call.id, call.place)).collect()
    assert text + rest.stdout == "".join(f"{n}\n" for n in range(400))
    assert (rest.text, rest.status) == ("'done'", "ok")


async def test_a_flood_waits_for_its_reader(contexts: Contexts, link: GuestLink) -> None:
    """Without a reader the code stands still as soon as the ring is full."""
    await contexts.create(id="a")
    code = "import sys\nfor n in range(40000):\n    sys.stdout.write('x' * 999 + '\\n')\nprint('end')"
    call = await contexts.execute("a", code)
    first = await call.__anext__()
    assert isinstance(first, Text)
    held = -1
    while True:  # until it does not grow any more
        info = next(row for row in await link.processes() if row.id == "ctx.python.a")
        if info.stdout == held:
            break
        held = info.stdout
        await asyncio.sleep(0.3)
    assert held < 3 * 1024 * 1024
    ran = await call.collect(limit=100_000)
    assert ran.truncated and len(ran.stdout) == 100_000 and ran.status == "ok"


async def test_what_the_code_does_to_its_descriptors_is_its_own_affair(contexts: Contexts) -> None:
    await contexts.create(id="a")
    junk = (
        "import os, sys\n"
        "for fd in range(3, 20):\n"
        "    try: os.write(fd, b'{\"t\": \"stdout\", junk\\n\\xff\\n[[[[\\n' + b'[' * 5000 + b'\\n')\n"
        "    except OSError: pass\n"
        "print('alive')"
    )
    ran = await contexts.run("a", junk)
    assert ran.stdout == "alive\n"
    ran = await contexts.run("a", "import os\nos._exit(3)")
    assert ran.status == "ended" and ran.error is not None and "status 3" in ran.error.value
    with pytest.raises(NotFound):
        await contexts.run("a", "1")
    await contexts.create(id="a")
    assert (await contexts.run("a", "1")).text == "1"


async def test_input_is_empty_and_exit_ends_the_call_only(contexts: Contexts) -> None:
    await contexts.create(id="a")
    ran = await contexts.run("a", "input()")
    assert ran.error is not None and ran.error.name == "EOFError"
    ran = await contexts.run("a", "x = 1\nexit(3)")
    assert ran.error is not None and (ran.error.name, ran.error.value) == ("SystemExit", "3")
    ran = await contexts.run("a", "def (:")
    assert ran.error is not None and ran.error.name == "SyntaxError"
    assert (await contexts.run("a", "x")).text == "1"


async def test_threads_forks_and_children_print(contexts: Contexts) -> None:
    await contexts.create(id="a")
    code = (
        "import threading, os, subprocess, sys\n"
        "t = threading.Thread(target=print, args=('thread',)); t.start(); t.join()\n"
        "pid = os.fork()\n"
        "if not pid:\n    print('fork', flush=True); os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "subprocess.run(['echo', 'child'])\n"
        "subprocess.run('echo error >&2', shell=True, stdout=sys.stdout)"
    )
    ran = await contexts.run("a", code)
    assert ran.stdout.split() == ["thread", "fork", "child"] and ran.stderr == "error\n"
    assert ran.error is None


async def test_rich_display(contexts: Contexts) -> None:
    await contexts.create(id="a")
    code = (
        "class Rich:\n"
        "    def __repr__(self): return 'plain'\n"
        "    def _repr_html_(self): return '<b>h</b>'\n"
        "    def _repr_markdown_(self): return '**m**'\n"
        "    def _repr_png_(self): return b'\\x89PNG'\n"
        "    def _repr_svg_(self): return '<svg/>'\n"
        "    def _repr_latex_(self): return '$x$', {}\n"
        "    def _repr_json_(self): return {'a': [1, float('nan'), 2**70]}\n"
        "    def _repr_mimebundle_(self, **_): return {'application/x-own': {'k': 1}}\n"
        "    def _repr_pdf_(self): raise ValueError\n"
        "Rich()"
    )
    (result,) = (await contexts.run("a", code)).results
    assert result == Result(
        text="plain", html="<b>h</b>", markdown="**m**", png="iVBORw==", svg="<svg/>", latex="$x$",
        json={"a": [1, None, str(2**70)]}, extra={"application/x-own": {"k": 1}}, main=True,
    )  # fmt: skip
    ran = await contexts.run("a", "class Bad:\n    def __repr__(self): raise RuntimeError('no')\nBad()")
    assert ran.error is not None and ran.error.name == "RuntimeError"
    assert (await contexts.run("a", "{'k': [1, 2]}")).results[0].json == {"k": [1, 2]}


async def test_no_such_language_program_or_folder(contexts: Contexts) -> None:
    with pytest.raises(InvalidRequest, match="no context can run"):
        await contexts.create("cobol")
    with pytest.raises(InvalidRequest, match="no folder"):
        await contexts.create(cwd="/nowhere")
    with pytest.raises(Unsupported, match="has no python3 or python"):
        await contexts.create(env={"PATH": "/nowhere"})
    with pytest.raises(InvalidRequest):
        await contexts.create(id="../x")
    assert await contexts.list() == []
    with pytest.raises((NotFound, GuestRefused)):
        await contexts.run("never", "1")


async def test_a_fresh_call_finds_everything_and_changes_nothing(contexts: Contexts) -> None:
    await contexts.create(id="a")
    await contexts.run("a", "import random, asyncio\nx = [1]\nasync def f(): return 5")
    ran = await contexts.run("a", "x.append(2); y = 1; print('in', x)\nawait f()", fresh=True)
    assert (ran.stdout, ran.text, ran.status, ran.count) == ("in [1, 2]\n", "5", "ok", 2)
    assert (await contexts.run("a", "x, 'y' in globals()")).text == "([1], False)"
    drawn = {(await contexts.run("a", "random.random()", fresh=True)).text for _ in range(4)}
    assert len(drawn) == 4  # control: without new seeds they would be the same
    code = "import os\nos.fork() or os._exit(0)\nos.wait(); random.random()"
    ran = await contexts.run("a", code)
    assert ran.error is None
    call = await contexts.execute("a", "print('go', flush=True)\nwhile True: pass", fresh=True)
    await call.__anext__()
    await call.interrupt()
    stopped = await call.collect()
    assert stopped.error is not None and stopped.error.name == "KeyboardInterrupt"
    ran = await contexts.run("a", "import os\nos._exit(7)", fresh=True)
    assert ran.error is not None and "exit code 7" in ran.error.value and ran.status == "error"
    assert (await contexts.run("a", "x")).text == "[1]"
    await contexts.create("bash", id="b")
    with pytest.raises(Unsupported):
        await contexts.run("b", "true", fresh=True)


async def test_code_that_leaves_nothing_behind(contexts: Contexts) -> None:
    assert (await contexts.once("x = 1\nx + 41")).text == "42"
    await contexts.run("zygote", "import json")  # what later calls find
    assert (await contexts.once("json.dumps([1]), 'x' in globals()")).text == "('[1]', False)"
    assert (await contexts.once("y=2; echo $y", "bash")).stdout == "2\n"
    assert [each.id for each in await contexts.list()] == ["zygote"]


async def test_many_begin_with_a_context_that_is_being_made(contexts: Contexts, sandbox: NodeSandbox) -> None:
    async with await sandbox.new_link() as other:
        rans = await asyncio.gather(*(Contexts(other).once(f"{n}") for n in range(3)), contexts.once("3"))
        assert [ran.text for ran in rans] == ["0", "1", "2", "3"]
        made = asyncio.ensure_future(contexts.create(id="a"))
        while True:
            try:
                ran = await Contexts(other).run("a", "'early'")
                break
            except NotFound:
                await asyncio.sleep(0)
        assert ran.text == "'early'"
        await made
