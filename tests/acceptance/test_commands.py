"""doctor, probe and bench on this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time

import pytest

from ringfence.cli import inside
from ringfence.node.service import Node


@pytest.mark.timeout(1200)  # two machines are booted each time, emulated where there is no KVM
def test_doctor(ringfence):
    shown = ringfence.json("doctor", "--json")
    assert shown["ok"]
    runtimes = {runtime["runtime"]: runtime for runtime in shown["runtimes"]}
    assert {"jail", "bubblewrap", "fake"} <= set(runtimes)
    assert runtimes["jail"]["level"] == "L2"
    assert runtimes["fake"]["boundary"] == "none"
    for runtime in runtimes.values():
        assert runtime["health"] in ("healthy", "degraded", "unavailable")
        if runtime["health"] != "healthy":
            assert runtime["reason"]
    assert {"kernel", "cgroups", "landlock", "user namespaces"} <= {check["name"] for check in shown["host"]}
    assert shown["rootless_losses"]
    text = ringfence("doctor").stdout.decode()
    for name in runtimes:
        assert name in text
    assert "\x1b" not in text


@pytest.mark.parametrize("runtime", ["jail", "bubblewrap", "gvisor", "wasm"])
def test_every_promise_holds(ringfence, runtime):
    if runtime == "gvisor" and os.geteuid() != 0:
        pytest.skip("gvisor needs root")
    if runtime == "wasm":
        asyncio.run(compile_interpreters(ringfence.env["RINGFENCE_HOME"]))
    shown = ringfence.json("probe", "--json", "--runtime", runtime)
    (found,) = shown["runtimes"]
    assert found["ok"]
    assert set(found["promises"]) >= set(inside.ATTEMPTS)
    assert {promise["state"] for promise in found["promises"].values()} == {"held"}
    assert found["boundary"]["runtime"] == runtime


async def compile_interpreters(home):
    """Once a machine, and for longer than a start waits: into what RINGFENCE_MODULES names for all tests."""
    async with await Node.open(home) as node:
        await (await node.runtime("wasm")).driver.prepare(f"{home}/sandboxes/none")


def test_as_root_of_its_own_user_namespace_too(ringfence):
    shown = ringfence.json("probe", "--json", "--runtime", "jail", "--user", "0")
    assert shown["ok"]


def test_the_probe_finds_what_is_open(ringfence):
    # The positive control: without a wall the same attempts succeed, and the exit code says so.
    shown = ringfence.json("probe", "--json", "--runtime", "fake", code=1)
    (found,) = shown["runtimes"]
    states = {name: promise["state"] for name, promise in found["promises"].items()}
    for name in ("host-files", "host-loopback", "host-sockets", "seccomp", "interfaces", "namespaces"):
        assert states[name] == "violated", name
    text = ringfence("probe", "--runtime", "fake").stdout.decode()
    assert "violated" in text


def test_bench(ringfence):
    against = ["bwrap"] if shutil.which("bwrap") else []
    done = ringfence.json_any("bench", "--quick", "--json", "--only", "cold", "--only", "exec", "--against",
                              ",".join(against))  # fmt: skip
    names = [figure["name"] for figure in done["figures"]]
    assert "jail: cold start to first output" in names
    assert "jail: command in a running sandbox" in names
    for figure in done["figures"]:
        if "p50" in figure:
            assert figure["n"] > 0
            assert figure["min"] <= figure["p50"] <= figure["p95"] <= figure["p99"]
    assert done["boundaries"][0]["seccomp"] == "filter"
    # Whether a promise holds is the machine's to say, not this test's.
    assert {promise["held"] for promise in done["promises"]} <= {True, False}


def test_bench_of_the_command_line(ringfence):
    done = ringfence.json_any("bench", "--quick", "--json", "--only", "cli", "--against", "")
    assert [promise["unit"] for promise in done["promises"]] == ["ms", "ms"]


def test_bench_of_webassembly(ringfence):
    asyncio.run(compile_interpreters(ringfence.env["RINGFENCE_HOME"]))
    options = ("--quick", "--json", "--only", "exec", "--against", "")
    done = ringfence.json_any("bench", "--runtime", "wasm", *options)
    names = {figure["name"] for figure in done["figures"]}
    assert names == {"wasm: command in a running sandbox", "wasm: call of an exported function"}
    (promise,) = done["promises"]
    assert promise["what"] == "wasm: call of an exported function, p50"
    assert promise["measured"] > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_probe_that_is_ended_leaves_nothing_and_says_nothing(ringfence, tmp_path, number):
    """Also to the whole group, as a terminal does it: the canary process has nothing to say either."""
    env = ringfence.env | {"TMPDIR": str(tmp_path)}
    running = ringfence.start("probe", "--runtime", "jail", env=env, start_new_session=True)
    end = time.monotonic() + 120
    while not list(tmp_path.glob("ringfence-probe-*")) and time.monotonic() < end:
        assert running.poll() is None
        time.sleep(0.001)
    os.killpg(running.pid, number)
    _, err = running.communicate(timeout=120)
    assert (running.returncode, err) == (128 + number, b"")
    assert list(tmp_path.glob("ringfence-*")) == []
