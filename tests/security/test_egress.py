"""Every way out is tried on every runtime, all in one sandbox each; each has its control.

What counts is what the servers of the made-up internet have heard, not what the attacker says.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence.conformance import templates
from ringfence.conformance.harness import request_for
from ringfence.conformance.plugin import LISTED
from ringfence.guest.processes import ProcessSpec
from ringfence.model.errors import RingfenceError
from ringfence.node.sandboxes import NodeSandbox
from ringfence.node.service import Node
from ringfence.runtimes import networking
from ringfence.runtimes.vm import kernel
from security import egress_document
from security.payloads import FOLDER
from security.tables.egress import IN_MACHINES, NETWORK, SECRET, WAYS, Way
from support.egress import connected, doors_into
from support.internet import Internet

MACHINES = ("qemu-microvm", "qemu")
RUNTIMES = ("jail", "bubblewrap", "nsjail", "runc", "crun", "gvisor", "docker", "podman", *MACHINES)
PARTS = ("egress.py", "egress_base.py", "egress_more.py")
RELAY = """
import socket
server = socket.create_server(("", 7777))
print("relay", flush=True)
while True:
    sock, _ = server.accept()
    sock.recv(65536)
    sock.sendall(b"HTTP/1.1 200 OK\\r\\nConnection: close\\r\\n\\r\\nrelayed")
    sock.close()
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the made-up internet needs root")


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    """The made-up internet."""
    made = Internet()
    try:
        yield made
    finally:
        made.close()


def ready_for_machines(state: Path) -> None:
    """A template for virtual machines; skips where there can be none."""
    if shutil.which("qemu-system-x86_64") is None:
        pytest.skip("virtual machines need QEMU")
    try:
        kernel.find()
    except RingfenceError as error:
        pytest.skip(error.message)
    templates.ensure(state)


def judge(way: Way, word: str, seen: list[dict[str, Any]]) -> str:
    """``reached`` or ``stopped: HOW``."""
    marked = [line for line in seen if f"mark-{way.name}" in json.dumps(line)]
    if way.aim is not None:
        came = any(map(way.aim, marked)) or (not marked and word == "reached")
    else:
        came = bool(marked) or word == "reached"
    return "reached" if came else f"stopped: {word}"


def words(output: str) -> dict[str, str]:
    """What the payload said of each way."""
    found = [json.loads(line) for line in output.splitlines() if line.startswith('{"attack"')]
    return {entry["attack"]: entry["word"] for entry in found}


def test_the_table_in_the_documentation_is_todays() -> None:
    assert egress_document.DOCUMENT.read_text() == egress_document.document(), (
        "run tests/security/egress_document.py"
    )


def test_controls(internet: Internet) -> None:
    """Without a door in between every way leads to its aim."""
    names = [way.name for way in WAYS if not way.control]
    mark = internet.mark()
    done = subprocess.run(
        internet.command(sys.executable, str(FOLDER / PARTS[0]), "direct", *names),
        capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "RELAY": internet.relay, "PLACEHOLDER": SECRET},
    )  # fmt: skip
    said, seen = words(done.stdout), internet.since(mark)
    wrong = [
        f"{way.name}: {judge(way, said.get(way.name, 'nothing said'), seen)}"
        for way in WAYS
        if not way.control and judge(way, said.get(way.name, ""), seen) != "reached"
    ]
    assert not wrong, "\n".join(wrong) + done.stderr[-2000:]


def chosen(request: pytest.FixtureRequest, runtime: str) -> None:
    """Skip what --ringfence-runtime leaves out; start the engine that is needed."""
    names = request.config.getoption("--ringfence-runtime")
    if names and runtime not in names:
        pytest.skip(f"{LISTED}another runtime was chosen")
    if runtime == "qemu" and not names:
        pytest.skip(f"{LISTED}qemu boots a whole system: --ringfence-runtime=qemu runs it")
    if runtime in ("docker", "podman"):
        request.getfixturevalue(f"{runtime}_engine")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_ways_out(
    runtime: str, attack_state: Path, internet: Internet, request: pytest.FixtureRequest
) -> None:
    chosen(request, runtime)
    ways: tuple[Way, ...] = WAYS
    if runtime in MACHINES:
        ready_for_machines(attack_state)
        if not request.config.getoption("--ringfence-runtime"):
            ways = tuple(way for way in WAYS if way.name in IN_MACHINES)
    async with (
        await Node.open(attack_state) as node,
        doors_into(internet, attack_state / f"egress-{runtime}") as doors,
    ):
        asked = request_for(runtime, max_processes=512, max_open_files=4096)
        await doors.secret_put("project", "token", SECRET)
        async with connected(node, doors, internet, asked, NETWORK, project="project") as sandbox:
            placeholder = (await doors.placeholders(sandbox.id, ["token"]))["token"]
            transparent = networking.transparent(sandbox.handle)
            assert transparent == sandbox.runtime.capabilities().transparent
            neighbour = None if runtime in MACHINES else await node.create(request_for(runtime))
            try:
                if neighbour is not None:
                    await relay_in(neighbour)
                mark = internet.mark()
                names = [way.name for way in ways]
                output = await tried(sandbox, names, RELAY=internet.relay, PLACEHOLDER=placeholder)
            finally:
                if neighbour is not None:
                    await neighbour.destroy()
    said, seen = words(output), internet.since(mark)
    wrong = []
    for way in ways:
        outcome = judge(way, said.get(way.name, "nothing said"), seen)
        odd = "broken" in outcome or "nothing said" in outcome  # of the payload, not of the attack
        if odd or outcome.partition(":")[0] != way.expected(transparent):
            wrong.append(f"{way.name}: {outcome}, not {way.expected(transparent)}")
    assert not wrong, f"{runtime}:\n" + "\n".join(wrong) + f"\n{output[-1500:] if not said else ''}"


async def tried(sandbox: NodeSandbox, names: list[str], **env: str) -> str:
    """The payload's output after trying these ways."""
    link = await sandbox.link()
    for name in PARTS:
        await link.files.write(f"/workspace/{name}", (FOLDER / name).read_bytes())
    seen = bytearray()
    spec = ProcessSpec(("/usr/bin/python3", f"/workspace/{PARTS[0]}", "inside", *names), env=env)
    await sandbox.run(spec, lambda output: seen.extend(output.data))
    return seen.decode(errors="replace")


async def relay_in(sandbox: NodeSandbox) -> None:
    """A relay in another sandbox, on every address that it has; it works there."""
    process = await sandbox.start(ProcessSpec(("/usr/bin/python3", "-c", RELAY)))
    async for output in process:
        assert output.data.strip() == b"relay"
        break
    stream = await (await sandbox.link()).dial(7777)
    await stream.write(b"GET / HTTP/1.1\r\n\r\n")
    assert (await stream.read()).startswith(b"HTTP/1.1 200")
    await stream.close()
