"""Volumes against those who write to them: quota, hostile archives, links planted for the host."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import tarfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from ringfence.conformance.harness import eventually
from ringfence.conformance.suites.placements import MIB, SMALL, pieces, run, spec, tar_of
from ringfence.model.errors import (
    GuestRefused,
    InvalidRequest,
    NodeUnavailable,
    RingfenceError,
    RuntimeUnavailable,
    Unsupported,
    WrongState,
)
from ringfence.model.ids import new_id
from ringfence.model.policy import Isolation, Policy, Process
from ringfence.node.volumes import RUNTIMES
from ringfence.placement.attaching import Attachments
from ringfence.placement.contract import Placement, VolumeMount
from ringfence.placement.local import LocalPlacement
from support.leaks import loop_devices, mounts
from support.service_nodes import NodeProcess

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="volumes need root")
READY_MADE = 32 * MIB


@pytest.fixture
async def placement(node: NodeProcess) -> AsyncIterator[LocalPlacement]:
    made = LocalPlacement(node.socket, patience=60)
    yield made
    for each in await made.list():
        await made.destroy(each.id)
    await made.close()


@pytest.fixture
async def volume(placement: Placement) -> AsyncIterator[str]:
    name = new_id("vo")
    await placement.make_volume(name, READY_MADE)
    yield name
    for each in await placement.list():
        await placement.destroy(each.id)
    await until_free(lambda: placement.remove_volume(name))


async def until_free(work: Callable[[], Awaitable[None]]) -> None:
    """Do it once a transfer whose other end has died is noticed to be over."""
    end = asyncio.get_running_loop().time() + 60
    while True:
        try:
            return await work()
        except WrongState as error:
            if "export or import" not in error.message or asyncio.get_running_loop().time() > end:
                raise
        await asyncio.sleep(0.02)


async def attached(placement: Placement, volume: str, *, read_only: bool = False, **parts: object) -> str:
    wanted = spec(volumes=(VolumeMount(volume, "/data", read_only=read_only),), **parts)  # type: ignore[arg-type]
    return (await placement.start(wanted)).id


async def test_the_kernel_keeps_the_quota(placement: Placement, volume: str) -> None:
    id = await attached(placement, volume)
    fill = "dd if=/dev/zero of=/data/{} bs=1M count={} 2>&1"
    code, _ = await run(placement, id, "sh", "-c", fill.format("fits", 16))
    assert code == 0  # the control: what is within it can be written
    code, said = await run(placement, id, "sh", "-c", fill.format("more", 64))
    assert code != 0
    assert b"No space left" in said
    assert await placement.volume_size(volume) <= READY_MADE
    many = "touch $(seq -f /data/f%.0f 1 20000)"
    code, _ = await run(placement, id, "sh", "-c", many)
    assert code != 0  # nor does it take more files than there are inodes


async def test_an_import_is_held_to_the_quota(placement: Placement, volume: str) -> None:
    with pytest.raises(GuestRefused) as caught:
        await placement.import_volume(volume, pieces(tar_of({"big": bytes(range(256)) * 4096 * 48})))
    assert caught.value.details["errno"] == "ENOSPC"
    assert "does not fit into the volume" in caught.value.message
    await placement.import_volume(volume, pieces(tar_of({"small": b"x"})))  # and it goes on working


async def test_it_survives_the_nodes_death(node: NodeProcess, placement: Placement, volume: str) -> None:
    id = await attached(placement, volume)
    await run(placement, id, "sh", "-c", "echo before > /data/file")
    await asyncio.to_thread(node.stop, signal.SIGKILL)
    await asyncio.to_thread(node.start)
    assert await run(placement, id, "sh", "-c", "cat /data/file; echo after > /data/file") == (0, b"before\n")
    with pytest.raises(RingfenceError):  # who has what is known to the next node
        await attached(placement, volume)
    await placement.destroy(id)
    other = await attached(placement, volume, read_only=True)
    assert await run(placement, other, "cat", "/data/file") == (0, b"after\n")
    await placement.destroy(other)
    # Nobody has it: it is not mounted, and no loop device holds its image.
    await eventually(lambda: not any(volume in line for line in mounts()), "it stays mounted")
    await eventually(
        lambda: not any(volume in file for file in loop_devices().values()), "a loop device stays"
    )


async def test_other_users_inside_share_it(placement: Placement, volume: str) -> None:
    for user in (1000, 2000, 0):
        id = await attached(placement, volume, policy=Policy().with_wall(process=Process(user=user)))
        script = f"touch /data/of-{user} && stat -c %u /data/of-{user}"
        assert await run(placement, id, "sh", "-c", script) == (0, f"{user}\n".encode())
        await placement.destroy(id)


def hostile() -> dict[str, bytes]:
    def entry(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.mode = kind, link, 0o777
        return info

    through = io.BytesIO()
    with tarfile.open(fileobj=through, mode="w") as tar:
        tar.addfile(entry("out", tarfile.SYMTYPE, "/tmp"))
        file = tarfile.TarInfo("out/rf-canary")
        file.size = 1
        tar.addfile(file, io.BytesIO(b"x"))
    return {
        "climbs": tar_of({"../../rf-canary": b"x"}),
        "absolute": tar_of({"/tmp/rf-canary": b"x"}),
        "through a link of its own": through.getvalue(),
        "hard link to the host": tar_of({}, entry("l", tarfile.LNKTYPE, "/etc/passwd")),
        "hard link that climbs": tar_of({}, entry("l", tarfile.LNKTYPE, "../../../../etc/passwd")),
        "cut off": tar_of({"a": b"x" * 5000})[:2000],
        "no tar": b"\x00\x01" * 4000,
    }


@pytest.mark.parametrize("name", hostile())
async def test_hostile_archives_are_refused(placement: Placement, volume: str, name: str) -> None:
    with pytest.raises(RingfenceError) as caught:
        await placement.import_volume(volume, pieces(hostile()[name]))
    assert caught.value.code in ("protocol_violation", "invalid_request", "host_limit")
    assert not os.path.lexists("/tmp/rf-canary")
    data = b"".join([piece async for piece in placement.export_volume(volume)])
    assert b"root:" not in data


async def test_devices_and_setuid_bits_are_left_out(placement: Placement, volume: str) -> None:
    device = tarfile.TarInfo("device")
    device.type, device.devmajor, device.devminor, device.mode = tarfile.CHRTYPE, 1, 8, 0o666
    setuid = tarfile.TarInfo("setuid")
    setuid.mode = 0o6755
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/shadow"
    await placement.import_volume(volume, pieces(tar_of({"good": b"x"}, device, setuid, link)))
    id = await attached(placement, volume)
    _, found = await run(placement, id, "sh", "-c", "cd /data; stat -c '%n %A %u' *")
    assert found.decode().splitlines() == [
        "good -rw-r--r-- 1000",
        "link lrwxrwxrwx 1000",
        "setuid -rwxr-xr-x 1000",
    ]


async def test_links_that_the_workload_plants_lead_the_host_nowhere(
    node: NodeProcess, placement: Placement, volume: str, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    canary.mkdir()
    (canary / "secret").write_text("of the host")
    id = await attached(placement, volume)
    script = f"cd /data; ln -s {canary} folder; ln -s {canary}/secret file; mkdir real; echo y > real/y"
    assert (await run(placement, id, "sh", "-c", script))[0] == 0
    # While it writes on: import through the planted link, export over it.
    with pytest.raises(RingfenceError):
        await placement.import_volume(volume, pieces(tar_of({"folder/planted": b"x"})))
    assert sorted(os.listdir(canary)) == ["secret"]
    await placement.import_volume(volume, pieces(tar_of({"real/z": b"z"})))  # the control: a real folder
    data = b"".join([piece async for piece in placement.export_volume(volume)])
    assert b"of the host" not in data
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        kinds = {member.name: member.type for member in tar}
    assert kinds["folder"] == kinds["file"] == tarfile.SYMTYPE
    assert {"real", "real/y", "real/z"} <= set(kinds)


async def test_files_of_holes_and_deep_folders_do_not_hold_up_an_export(
    placement: Placement, volume: str
) -> None:
    id = await attached(placement, volume)
    await run(placement, id, "sh", "-c", "truncate -s 1T /data/holes")
    with pytest.raises(InvalidRequest) as caught:
        async for _ in placement.export_volume(volume):
            pass
    assert "holes" in caught.value.message
    deep = "import os\nos.chdir('/data')\nfor _ in range(3000):\n os.mkdir('d'); os.chdir('d')"
    await run(placement, id, "sh", "-c", f'rm /data/holes; python3 -c "{deep}"')
    with pytest.raises(InvalidRequest) as caught:
        async for _ in placement.export_volume(volume):
            pass
    assert "folders below each other" in caught.value.message


async def test_an_export_that_nobody_reads_on_ends(placement: Placement, volume: str) -> None:
    await placement.import_volume(volume, pieces(tar_of({"big": os.urandom(8 * MIB)})))
    async for piece in placement.export_volume(volume):
        assert piece
        break
    await placement.import_volume(volume, pieces(tar_of({"small": b"x"})))


async def test_an_import_whose_sender_dies_ends(node: NodeProcess, placement: Placement, volume: str) -> None:
    async def forever() -> AsyncIterator[bytes]:
        yield tar_of({"a": bytes(MIB)})[: MIB // 2]
        raise RuntimeError("the sender failed")

    with pytest.raises(RuntimeError):
        await placement.import_volume(volume, forever())
    dying = LocalPlacement(node.socket)
    task = asyncio.create_task(dying.import_volume(volume, _stuck()))
    await asyncio.sleep(0)
    while not dying._link:
        await asyncio.sleep(0.01)
    await dying.close()
    with pytest.raises(NodeUnavailable):
        await task
    await placement.import_volume(volume, pieces(tar_of({"small": b"x"})))


async def test_imports_at_once_take_turns(placement: Placement, volume: str) -> None:
    tars = [tar_of({f"{n}": bytes([each]) * 70_000 for n in range(20)}) for each in range(6)]
    for _ in range(5):
        await asyncio.gather(*(placement.import_volume(volume, pieces(tar)) for tar in tars))
    id = await attached(placement, volume, read_only=True)
    kinds = await run(
        placement, id, "sh", "-c", "cd /data && sha256sum * | cut -c1-64 | sort -u | wc -l; ls | wc -l"
    )
    assert kinds == (0, b"1\n20\n")  # the last one's, all of them


async def _stuck() -> AsyncIterator[bytes]:
    yield tar_of({"a": bytes(MIB)})[: MIB // 2]
    await asyncio.Event().wait()


@pytest.mark.parametrize("runtime", sorted(RUNTIMES))
async def test_owners_and_modes_are_those_inside(placement: Placement, volume: str, runtime: str) -> None:
    policy = Policy(wall=SMALL).with_wall(isolation=Isolation(runtime=runtime))
    try:
        writer = await attached(placement, volume, policy=policy)
    except RuntimeUnavailable as error:
        pytest.skip(f"{runtime}: {error.message}")
    script = "umask 077; echo mine > /data/file && stat -c '%u %a' /data/file"
    assert await run(placement, writer, "sh", "-c", script) == (0, b"1000 600\n")
    await placement.destroy(writer)
    reader = await attached(placement, volume, policy=policy, read_only=True)
    assert await run(placement, reader, "cat", "/data/file") == (0, b"mine\n")
    code, _ = await run(placement, reader, "sh", "-c", "echo x > /data/file")
    assert code != 0


@pytest.mark.parametrize(("runtime", "capability"), [("bubblewrap", "volumes"), ("fake", "boundary")])
async def test_runtimes_that_cannot_show_owners_are_refused(
    placement: Placement, volume: str, runtime: str, capability: str
) -> None:
    policy = Policy(wall=SMALL).with_wall(isolation=Isolation(runtime=runtime))
    with pytest.raises(Unsupported) as caught:
        await attached(placement, volume, policy=policy)
    assert caught.value.details["capability"] == capability
    assert await placement.list() == []
    await attached(placement, volume)  # and it is free


@pytest.mark.parametrize("path", ["/", "/etc", "/proc/x", "relative", "/a/../b", "/usr/x"])
async def test_impossible_places(placement: Placement, volume: str, path: str) -> None:
    with pytest.raises(InvalidRequest):
        await placement.start(spec(volumes=(VolumeMount(volume, path),)))
    twice = (VolumeMount(volume, "/data"), VolumeMount(volume, "/data"))
    with pytest.raises(InvalidRequest):
        await placement.start(spec(volumes=twice))


class _SlowVolumes:
    """Volumes whose mount takes until it is let go on; knows how many are at it."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.inside, self.most, self.begun = 0, 0, 0

    def get(self, name: str) -> None: ...

    def size(self, name: str) -> int:
        self.begun += 1
        self.inside += 1
        self.most = max(self.most, self.inside)
        assert self.go.wait(60)
        self.inside -= 1
        return 1

    def release(self, name: str) -> bool:
        assert not self.inside, "unmounted while it is being mounted"
        return True


async def test_a_mount_that_is_given_up_is_waited_for() -> None:
    """A cancelled call leaves a thread behind, and the next one must not meet it."""
    volumes = _SlowVolumes()
    attachments = Attachments(volumes, lambda: None)  # type: ignore[arg-type]
    first = asyncio.create_task(attachments.size("vo-one"))
    while not volumes.begun:
        await asyncio.sleep(0.01)
    for _ in range(3):
        first.cancel()
        await asyncio.sleep(0.01)
    second = asyncio.create_task(attachments.size("vo-one"))
    await asyncio.sleep(0.1)
    volumes.go.set()
    assert await second == 1
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (volumes.begun, volumes.most) == (2, 1)
