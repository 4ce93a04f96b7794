"""The store and its verbs on a real node: names, secrets, foreign ones, full disks, paused sandboxes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence.model.errors import HostLimit, InvalidRequest, NotFound, Unsupported, WrongState
from ringfence.model.policy import Filesystem, Resources
from ringfence.model.sandbox import Owner
from ringfence.node import disks, kept, saving, snapshots
from ringfence.node.service import Node
from support.leaks import Leaks
from support.nodes import ask, run


async def text(sandbox: object, script: str) -> str:
    return (await run(sandbox, "/bin/sh", "-c", script))[1].strip()  # type: ignore[arg-type]


def seal(folder: Path, **changes: object) -> None:
    """Change a manifest as somebody would who knows how."""
    path = folder / "manifest.json"
    value = json.loads(path.read_text())
    value.update(changes)
    stated = {key: each for key, each in value.items() if key not in ("format", "digest")}
    value["digest"] = snapshots._digest(stated)
    path.write_text(json.dumps(value))


async def test_names(node: Node) -> None:
    sandbox = await node.create(ask())
    made = await sandbox.snapshot("ready")
    assert (made.kind, made.name, made.consistency) == (
        "disk",
        "ready",
        "frozen" if node.root else "unchanged",
    )
    assert node.snapshots.get(made.id).name == "ready"
    with pytest.raises(InvalidRequest, match="there is a snapshot ready already"):
        await sandbox.snapshot("ready")
    for wrong in ("", "..", "../x", "A", "x" * 64, ".x", "a/b", "a\nb"):
        with pytest.raises(InvalidRequest, match="no name of a snapshot"):
            await sandbox.snapshot(wrong)
    with pytest.raises(NotFound) as error:
        node.snapshots.get("redy")
    assert "ready" in error.value.hint
    with pytest.raises(NotFound):
        node.snapshots.get("../../sandboxes")
    nameless = await sandbox.snapshot()
    assert [each.name for each in node.snapshots.all()] == ["ready", nameless.id]
    await sandbox.destroy()
    for each in node.snapshots.all():
        node.snapshots.remove(each.name)
    assert node.snapshots.all() == ()


async def test_foreign_ones_are_refused_with_the_reason(node: Node) -> None:
    sandbox = await node.create(ask())
    made = await sandbox.snapshot("mine")
    await sandbox.destroy()
    manifest = made.folder / "manifest.json"
    whole = manifest.read_text()

    async def refused(words: str, asked: object = None, **changes: object) -> None:
        if changes:
            seal(made.folder, **changes)
        with pytest.raises((InvalidRequest, NotFound), match=words):
            await node.restore("mine", asked)  # type: ignore[arg-type]
        manifest.write_text(whole)

    await refused("another kind: sparc64", machine="sparc64")
    await refused("another wall than it says", wall_digest="sha256:" + "0" * 64)
    await refused("over a state of this host's template that is gone", template="host-0000000000000000")
    await refused("made by runtime nonesuch, not jail", runtime="nonesuch")
    await refused("manifest is of 'other'", name="other")
    await refused("made by another version", format=99)
    await refused("makes no sense", surprise=1)
    await refused("no request that makes sense", request={"policy": {}})
    wall = made.wanted().policy
    other = wall.with_wall(resources=Resources(cpus=1, memory=300 << 20, disk=32 << 20))
    await refused("under another wall", replace(made.wanted(), policy=other))
    named = wall.with_wall(isolation=replace(wall.wall.isolation, runtime="bubblewrap"))
    await refused("made by runtime jail, not bubblewrap", replace(made.wanted(), policy=named))
    manifest.write_text(whole.replace('"kind": "disk"', '"kind": "tape"'))
    await refused("its manifest is")
    (await node.restore("mine")).id  # noqa: B018 - the control: as it was, it is taken
    for copy in node.sandboxes():
        await copy.destroy()


async def test_what_held_secrets_stays_in_its_project(node: Node) -> None:
    owner = Owner(project="red")
    sandbox = await node.create(ask(owner=owner))
    plain = await sandbox.snapshot("plain")
    assert not plain.secrets
    await sandbox.bind_secrets({"token": b"abc"})
    assert await text(sandbox, "cat /run/secrets/token") == "abc"
    made = await sandbox.snapshot("secret")
    assert made.secrets
    with pytest.raises(InvalidRequest, match="held secrets of project 'red'"):
        await node.restore("secret", owner=Owner(project="blue"))
    with pytest.raises(InvalidRequest, match="a template is for everybody"):
        snapshots.may_be_template(made)
    copy = await node.restore("secret", owner=owner)
    assert copy.held_secrets  # and so on, for ever
    assert await text(copy, "ls /run/secrets") == ""  # the secret itself is not in it
    second = await copy.snapshot("second")
    assert second.secrets
    await (await node.restore("plain", owner=Owner(project="blue"))).destroy()  # the control
    snapshots.may_be_template(plain)
    asked = await node.create(replace(ask(), secrets=True))
    assert (await asked.snapshot("asked")).secrets
    for each in (sandbox, copy, asked):
        await each.destroy()


async def test_nobody_but_root_gets_at_what_is_saved(node: Node) -> None:
    sandbox = await node.create(ask())
    await text(sandbox, "cp /bin/true /workspace/x; chmod 6777 /workspace/x")
    made = await sandbox.snapshot("private")
    await sandbox.destroy()
    assert made.folder.stat().st_mode & 0o077 == 0
    file = made.folder / "layer/workspace/x"
    assert file.stat().st_mode & 0o6000 == 0
    if os.geteuid() == 0:
        assert file.stat().st_uid == 1000  # a number of the host's, too: hence all this
        tried = subprocess.run(
            ["setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups", "cat", str(file)],
            capture_output=True, check=False,
        )  # fmt: skip
        assert b"Permission denied" in tried.stderr


async def test_a_full_disk_leaves_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = await node.create(ask())
    await text(sandbox, "echo x > /workspace/x")
    monkeypatch.setattr(disks, "HOST_RESERVE", 1 << 60)
    with pytest.raises(HostLimit, match="does not fit"):
        await sandbox.snapshot("full")
    monkeypatch.undo()
    assert node.snapshots.all() == ()
    assert [name for name in os.listdir(node.snapshots.folder) if name != ".lock"] == []
    assert (await text(sandbox, "cat /workspace/x")) == "x"
    await sandbox.destroy()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
async def test_a_disk_that_fills_up_meanwhile_leaves_nothing(
    no_leaks: Leaks, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disks, "HOST_RESERVE", 0)
    sandbox = await node.create(ask())
    await text(sandbox, "head -c 4M /dev/urandom > /workspace/x")
    monkeypatch.setattr(saving, "_check_room", lambda *_: None)
    place = str(node.snapshots.folder)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=0711", "small", place], check=True)
    try:
        with pytest.raises(HostLimit, match="the disk is full") as error:
            await sandbox.snapshot("full")
        assert "free some space" in error.value.hint
        assert os.listdir(place) == []
        await text(sandbox, "rm /workspace/x; echo small > /workspace/y")
        await sandbox.snapshot("fits")  # the control
    finally:
        subprocess.run(["umount", place], check=True)
    await sandbox.destroy()


async def test_what_is_used_is_not_removed(node: Node) -> None:
    sandbox = await node.create(ask())
    await text(sandbox, "echo x > /workspace/x")
    await sandbox.snapshot("used")
    copy = await node.restore("used")
    with pytest.raises(WrongState, match=f"in use by {copy.id}"):
        node.snapshots.remove("used")
    assert await text(copy, "cat /workspace/x") == "x"
    await copy.reset()  # to its template: then the snapshot is free
    assert await text(copy, "ls /workspace") == ""
    node.snapshots.remove("used")
    await sandbox.destroy()
    await copy.destroy()


async def test_a_template_with_mounts_and_a_disk_image(node: Node, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("images need root")
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if str(parent) not in ("/", "/tmp"):
            parent.chmod(parent.stat().st_mode | 0o011)
    (tmp_path / "shown").write_text("host's")
    (tmp_path / "shown").chmod(0o644)
    from ringfence.model.policy import Mount

    files = Filesystem(mounts=(Mount(str(tmp_path), "/data/deep"),))
    sandbox = await node.create(ask(disk=300 << 20, files=files))
    await text(sandbox, "echo x > /workspace/x")
    await sandbox.snapshot("image")
    copy = await node.restore("image")
    assert await text(copy, "cat /workspace/x /data/deep/shown") == "x\nhost's"
    await copy.reset()
    assert await text(copy, "ls /workspace; cat /data/deep/shown") == "host's"
    await sandbox.destroy()
    await copy.destroy()


async def test_paused_it_stays_paused(node: Node) -> None:
    if os.geteuid() != 0:
        pytest.skip("pausing needs a cgroup")
    sandbox = await node.create(ask())
    await text(sandbox, "echo x > /workspace/x")
    await sandbox.pause()
    await sandbox.pause()
    made = await sandbox.snapshot("paused")
    assert made.consistency == "frozen"
    assert sandbox.paused
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await (await sandbox.new_link()).ping()
    await sandbox.resume()
    assert await text(sandbox, "cat /workspace/x") == "x"
    await sandbox.pause()
    await sandbox.reset()
    assert not sandbox.paused
    assert await text(sandbox, "ls /workspace") == ""
    await sandbox.pause()
    await sandbox.destroy()  # frozen, it dies all the same


async def test_bubblewrap_says_that_it_can_not(node: Node) -> None:
    sandbox = await node.create(ask(runtime="bubblewrap"))
    with pytest.raises(Unsupported, match="bubblewrap has no disk snapshots") as error:
        await sandbox.snapshot("no")
    assert "gvisor" in error.value.hint
    await sandbox.destroy()


async def test_cancelled_it_leaves_nothing_and_the_sandbox_goes_on(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await node.create(ask())
    await text(sandbox, "echo x > /workspace/x")
    began = asyncio.Event()
    loop = asyncio.get_running_loop()
    real = saving.layers.copy

    def slow(*words: object, stop: object = None, **more: object) -> object:
        loop.call_soon_threadsafe(began.set)
        stop.wait(60)  # type: ignore[attr-defined]
        return real(*words, stop=stop, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(saving.layers, "copy", slow)
    task = asyncio.ensure_future(sandbox.snapshot("cancelled"))
    await asyncio.wait_for(began.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [name for name in os.listdir(node.snapshots.folder) if name != ".lock"] == []
    assert await text(sandbox, "cat /workspace/x") == "x"
    await sandbox.destroy()


async def test_a_fork_that_fails_leaves_no_copy(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = await node.create(ask())
    real, count = node.create_from, 0

    async def third(*words: object) -> object:
        nonlocal count
        count += 1
        if count == 3:
            raise HostLimit("no more")
        return await real(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(node, "create_from", third)
    with pytest.raises(HostLimit, match="no more"):
        await sandbox.fork(3)
    assert node.sandboxes() == [sandbox]
    assert node.snapshots.all(temporary=True) == ()
    for wrong in (0, -1, 257):
        with pytest.raises(InvalidRequest, match="impossible"):
            await sandbox.fork(wrong)
    await sandbox.destroy()


async def test_a_reset_that_fails_leaves_the_sandbox_as_it_was(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await node.create(ask())
    await text(sandbox, "echo x > /workspace/x")

    def full(*_: object, **__: object) -> None:
        raise HostLimit("the disk is full")

    monkeypatch.setattr(disks, "prepare", full)
    with pytest.raises(HostLimit, match="full"):
        await sandbox.reset()
    monkeypatch.undo()
    assert await text(sandbox, "cat /workspace/x") == "x"
    assert os.listdir(sandbox.journal.folder).count("w1") == 0
    await sandbox.reset()
    assert await text(sandbox, "ls /workspace") == ""
    await sandbox.destroy()


async def test_limits_count_on_through_a_reset(node: Node) -> None:
    sandbox = await node.create(ask(output=1000))
    await text(sandbox, "head -c 700 /dev/zero")
    before = (await sandbox.usage()).cpu_seconds or 0
    await sandbox.reset()
    after = await sandbox.usage()
    assert after.output_bytes == 700
    assert (after.cpu_seconds or 0) >= before
    result, _ = await run(sandbox, "head", "-c", "700", "/dev/zero")
    assert result.end.cause.value == "output_limit"
    with pytest.raises(WrongState, match="has ended"):
        await sandbox.snapshot("dead")
    with pytest.raises(WrongState, match="has ended"):
        await sandbox.reset()
    await sandbox.destroy()


async def test_one_holds_it_others_visit(no_leaks: Leaks) -> None:
    async with await Node.open() as first:
        sandbox = await first.create(ask(keep=True))
        await text(sandbox, "echo x > /workspace/x")
        async with await Node.open(adopt=False) as second:
            assert kept.names(second) == [sandbox.id]
            shown = kept.look(second, sandbox.id)
            assert shown is not None
            assert (shown["state"], shown["holder"]) == ("running", os.getpid())
            guest = await kept.visit(second, sandbox.id)
            assert await text(guest, "cat /workspace/x") == "x"
            await guest.detach()
            with pytest.raises(WrongState, match="in the hands of process"):
                await kept.take(second, sandbox.id)
            with pytest.raises(NotFound) as error:
                await kept.take(second, sandbox.id[:-1] + ("0" if sandbox.id[-1] != "0" else "1"))
            assert sandbox.id in error.value.hint
    async with await Node.open(adopt=False) as third:
        taken = await kept.take(third, sandbox.id)
        assert await text(taken, "cat /workspace/x") == "x"
        await taken.reset()
        await taken.reset()
        assert await text(taken, "ls /workspace") == ""
    async with await Node.open() as last:  # what was reset is adopted as any other
        (again,) = last.sandboxes()
        assert again.id == sandbox.id
        assert await text(again, "hostname") == sandbox.id
        await again.destroy()


async def test_a_template_from_a_snapshot(node: Node) -> None:
    from ringfence.images import importing
    from ringfence.images.importing import ImportOptions
    from ringfence.node import templating
    from support import images

    store = node.images.store
    importing.add(store, str(images.docker_archive()), ImportOptions(name="base"))
    base = store.resolve("base")
    sandbox = await node.create(replace(ask(user=0), template="base"))
    await text(sandbox, "echo made > /made; rm -rf /etc/motd; mkdir -p /opt/tool; echo t > /opt/tool/t")
    made = await sandbox.snapshot("baked")
    assert made.template == base.digest
    assert store.pinned(base.digest) == [made.id]
    copy = await node.restore("baked")
    assert await text(copy, "cat /made /opt/tool/t") == "made\nt"
    template, left_out = await templating.template_from(node, "baked", "tool")
    assert left_out == ()
    assert len(template.layers) == len(base.layers) + 1
    assert template.base_digest == base.digest
    assert template.source == "snapshot:baked"
    other = await node.create(replace(ask(user=0, memory=300 << 20), template="tool"))  # under any wall
    assert await text(other, "cat /made /opt/tool/t; hostname") == f"made\nt\n{other.id}"
    await copy.reset()  # to the image
    assert await text(copy, "ls /made 2>&1") != "/made"
    hosts = await node.create(ask())
    await hosts.snapshot("hosts")
    with pytest.raises(InvalidRequest, match="host's own programs"):
        await templating.template_from(node, "hosts", "no")
    await sandbox.bind_secrets({"token": b"abc"})
    await sandbox.snapshot("secret")
    with pytest.raises(InvalidRequest, match="held secrets"):
        await templating.template_from(node, "secret", "no")
    for each in node.sandboxes():
        await each.destroy()
    for snapshot in node.snapshots.all():
        node.snapshots.remove(snapshot.name)
    assert store.pinned(base.digest) == []
