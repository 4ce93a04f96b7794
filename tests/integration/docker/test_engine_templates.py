"""Templates of ours on real engines: sent once, labelled, warmed, and collected when they are of no use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence.conformance.harness import Kit, nothing_left, request_for, run
from ringfence.node.service import Node
from ringfence.runtimes.engines import images
from ringfence.runtimes.engines.client import Client
from ringfence.runtimes.engines.endpoints import find
from support.commands import Ringfence
from support.engines import Engine, docker

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the daemon of these tests is root's")

LOOK = "stat -c '%u %g %a' /data/zero /data/mine /data/other; cat /data/zero; id -u; touch /data/x || echo no"


@pytest.fixture
def tar(root: Path, tmp_path: Path) -> Path:
    """The root file system as a tar, with files of several owners."""
    for name, owner, mode in (("zero", 0, 0o644), ("mine", 1000, 0o640), ("other", 77, 0o604)):
        (root / "data" / name).write_text(f"{name}\n")
        os.chown(root / "data" / name, owner, owner)
        (root / "data" / name).chmod(mode)
    subprocess.run(["tar", "-C", root, "--numeric-owner", "-cf", tmp_path / "root.tar", "."], check=True)
    return tmp_path / "root.tar"


@pytest.fixture
def command(kit: Kit) -> Ringfence:
    """The command line, in the kit's state root."""
    return Ringfence({**os.environ, "RINGFENCE_HOME": str(kit.state)})


def add(command: Ringfence, tar: Path) -> str:
    """The digest of the template ``small:1`` made of the tar."""
    done = command("template", "add", f"rootfs:{tar}", "--name", "small:1", "--json")
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["template"]["digest"])


def images_of_ours() -> dict[str, str]:
    """Name and id of each image of the docker daemon's that is a template's."""
    lines = docker("images", "--format", "{{.Repository}}:{{.Tag}} {{.ID}}").splitlines()
    return dict(line.split() for line in lines if line.startswith(images.REPOSITORY))


async def never(*_: object) -> None:
    """In place of sending an image."""
    raise AssertionError("it was sent again")


async def look(node: Node, runtime: str) -> list[str]:
    """What a sandbox of the template shows."""
    sandbox = await node.create(replace(request_for(runtime), template="small:1"))
    try:
        link = await sandbox.new_link()
        done = await run(link, "/bin/sh", "-c", LOOK)
        await link.close()
    finally:
        await sandbox.destroy()
    return done.stdout.decode().splitlines()


async def test_a_template_on_docker(
    kit: Kit, command: Ringfence, tar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = add(command, tar)
    before = images_of_ours()
    shown = await look(kit.node, "docker")
    # As of all programs of the host: the owner is nobody in the namespace that is the agent's own.
    assert shown == ["65534 65534 644", "65534 65534 640", "65534 65534 604", "zero", "1000", "no"]
    (name,) = set(images_of_ours()) - set(before)
    (found,) = json.loads(docker("inspect", name))
    assert found["Config"]["Labels"] == {"dev.ringfence.template": digest}
    assert found["Config"].get("Cmd") is None
    monkeypatch.setattr(images, "load", never)
    assert await look(kit.node, "docker") == shown
    other = await Node.open(kit.state)  # which remembers nothing
    try:
        assert await look(other, "docker") == shown
    finally:
        await other.close()
    assert images_of_ours()[name] in found["Id"]


async def test_owners_are_the_template_s_own(kit: Kit, command: Ringfence, tar: Path) -> None:
    if "runsc" not in json.loads(docker("info", "--format", "{{json .Runtimes}}")):
        pytest.skip("runsc is not installed: with the engine's own namespaces owners are not to be seen")
    add(command, tar)
    shown = await look(kit.node, "docker:runsc")
    assert shown == ["0 0 644", "1000 1000 640", "77 77 604", "zero", "1000", "no"]


async def test_a_command_on_a_template(kit: Kit, command: Ringfence, tar: Path) -> None:
    add(command, tar)
    done = command("run", "--runtime", "docker", "--template", "small:1", "--", "/bin/cat", "/data/zero")
    assert (done.returncode, done.stdout) == (0, b"zero\n"), done.stderr


async def test_warmed_it_starts_without_sending_and_collected_it_is_gone(
    kit: Kit, command: Ringfence, tar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(command, tar)
    before = set(images_of_ours())
    done = command("template", "warm", "small:1", "--runtime", "docker")
    assert done.returncode == 0, done.stderr
    (name,) = set(images_of_ours()) - before
    assert name.encode() in done.stdout + done.stderr
    assert docker("ps", "--all", "--quiet") == ""
    monkeypatch.setattr(images, "load", never)
    sandbox = await kit.node.create(replace(request_for("docker"), template="small:1"))
    kit.sandboxes.append(sandbox)
    kit.ids.add(sandbox.id)

    def collect(*options: str) -> list[str]:
        done = command("template", "gc", "--json", *options)
        assert done.returncode == 0, done.stderr
        return [gone["name"] for gone in json.loads(done.stdout)["removed"] if gone["kind"] == "image"]

    assert command("template", "rm", "small:1", "--keep-files").returncode == 0
    assert collect() == [], "a sandbox uses it"
    assert name in images_of_ours()
    await sandbox.destroy()
    assert collect("--dry-run") == [name]
    assert name in images_of_ours()
    assert collect() == [name]
    assert name not in images_of_ours()
    assert collect() == []
    assert not [note for note in (kit.state / "engines").iterdir() if name.partition(":")[2] in note.name]


async def test_an_engine_that_is_not_there_does_not_stop_a_collection(
    kit: Kit, command: Ringfence, tar: Path, tmp_path: Path
) -> None:
    add(command, tar)
    assert command("template", "warm", "small:1", "--runtime", "docker").returncode == 0
    (kit.state / "engines" / "docker-torn.json").write_text('{"engine": ')
    assert command("template", "rm", "small:1", "--keep-files").returncode == 0
    away = Ringfence({**command.env, "DOCKER_HOST": f"unix://{tmp_path}/none.sock"})
    assert away("template", "gc").returncode == 0
    assert not (kit.state / "engines" / "docker-torn.json").exists()
    here = command("template", "gc", "--json")  # the note is still there
    assert [gone["kind"] for gone in json.loads(here.stdout)["removed"]] == ["image"]


@pytest.fixture
def state() -> Iterator[Path]:
    """A state root that the sandbox's own user passes through."""
    made = Path(tempfile.mkdtemp(prefix="rf-podman-"))
    made.chmod(0o711)
    yield made
    shutil.rmtree(made, ignore_errors=True)


async def test_a_template_on_podman(
    podman_engine: Engine, state: Path, tar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = Ringfence({**os.environ, "RINGFENCE_HOME": str(state)})
    digest = add(command, tar)
    node = await Node.open(state)
    try:
        shown = await look(node, "podman")
        assert shown == ["65534 65534 644", "65534 65534 640", "65534 65534 604", "zero", "1000", "no"]
        found = await Client(find("podman")).call(
            "GET", "/images/json", {"filters": json.dumps({"label": [f"{images.LABEL}={digest}"]})}
        )
        assert len(found) == 1
        monkeypatch.setattr(images, "load", never)
        assert await look(node, "podman") == shown
        assert command("template", "rm", "small:1").returncode == 0  # and collects
        assert await Client(find("podman")).call(
            "GET", "/images/json", {"filters": json.dumps({"label": [f"{images.LABEL}={digest}"]})}
        ) in ([], None)
    finally:
        await node.close()
    await nothing_left(state, {node.state.owner})
