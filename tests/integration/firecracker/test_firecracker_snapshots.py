"""Saving and restoring machines through the published interface; what a guest's memory does isn't seen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ringfence.model.errors import HostLimit, InvalidRequest, StartFailed
from support.firecracker_bench import Bench


async def saved(bench: Bench, *, memory: bool = True) -> tuple[str, dict[str, Any]]:
    handle = await bench.start()
    with open(bench.jail(handle) / "disk", "r+b") as disk:
        disk.write(b"written by the guest")
    folder = str(bench.base / "saved")
    data = await bench.driver.snapshot(handle, folder, memory=memory)
    assert await bench.run(handle, "echo on") == "on"  # it goes on, and its agent hears again
    return folder, data


async def test_a_machine_is_saved_and_goes_on(bench: Bench) -> None:
    folder, data = await saved(bench)
    assert sorted(os.listdir(folder)) == ["disk", "memory", "state"]
    assert os.stat(folder).st_mode & 0o777 == 0o700
    assert Path(folder, "disk").read_bytes()[:20] == b"written by the guest"
    assert (data["memory"], data["firecracker"]) == (True, "1.15.1")
    paths = [(call["path"], (call["body"] or {}).get("state")) for call in bench.calls() if "path" in call]
    at = paths.index(("/snapshot/create", None))
    assert (paths[at - 1], paths[at + 1]) == (("/vm", "Paused"), ("/vm", "Resumed"))
    assert bench.guest_heard(bench.made[0]) == ["wake"]
    assert not {"snapshot.state", "snapshot.memory"} & set(os.listdir(bench.jail(bench.made[0])))


async def test_restored_twice_each_has_an_identity_of_its_own(bench: Bench) -> None:
    folder, data = await saved(bench)
    first = await bench.driver.restore(bench.spec(), folder, data)
    second = await bench.driver.restore(bench.spec(hostname="second"), folder, data)
    bench.made += [first, second]
    heard = [bench.guest_heard(handle) for handle in (first, second)]
    assert [line.split()[0] for line in heard[0]] == ["hostname", "machine-id", "seed", "clock", "wake"]
    assert heard[1][0] == "hostname second"
    assert heard[0][1:3] != heard[1][1:3]
    assert len(heard[0][2].split()[1]) == 128
    assert (bench.jail(second) / "disk").read_bytes()[:20] == b"written by the guest"
    assert await bench.run(second, "echo back") == "back"
    loads = [call["body"] for call in bench.calls() if call.get("path") == "/snapshot/load"]
    assert [body["resume_vm"] for body in loads] == [True, True]


async def test_copies_write_to_disks_of_their_own(bench: Bench) -> None:
    folder, data = await saved(bench)
    handle = await bench.driver.restore(bench.spec(), folder, data)
    bench.made.append(handle)
    with open(bench.jail(handle) / "disk", "r+b") as disk:
        disk.write(b"by the copy")
    assert Path(folder, "disk").read_bytes()[:20] == b"written by the guest"


async def test_the_disk_alone(bench: Bench) -> None:
    folder, data = await saved(bench, memory=False)
    assert os.listdir(folder) == ["disk"]
    assert bench.guest_heard(bench.made[0]) == ["freeze", "thaw"]
    handle = await bench.driver.restore(bench.spec(), folder, data)
    bench.made.append(handle)
    assert (bench.jail(handle) / "disk").read_bytes()[:20] == b"written by the guest"
    assert not any(call.get("path") == "/snapshot/load" for call in bench.calls())


async def test_a_refused_snapshot_leaves_nothing_and_the_machine_goes_on(bench: Bench) -> None:
    bench.faults(refuse={"/snapshot/create": "Cannot write memory file: No space left on device"})
    handle = await bench.start()
    folder = str(bench.base / "saved")
    with pytest.raises(HostLimit, match="No space left"):
        await bench.driver.snapshot(handle, folder)
    assert not os.path.exists(folder)
    assert await bench.run(handle, "echo on") == "on"
    assert [call["body"]["state"] for call in bench.calls() if call.get("path") == "/vm"] == [
        "Paused",
        "Resumed",
    ]


async def test_a_foreign_one_is_refused(bench: Bench) -> None:
    folder, data = await saved(bench)
    before = len(bench.calls())
    foreign: dict[str, dict[str, Any]] = {
        "firecracker 1.14.0": {"firecracker": "1.14.0"},
        "kernel other": {"kernel": "other"},
        "template sha256:2": {"template": "sha256:2"},
        "size": {"size": [1, 1]},
        "another driver or version": {"format": 2},
    }
    for words, change in foreign.items():
        with pytest.raises(InvalidRequest, match=words):
            await bench.driver.restore(bench.spec(), folder, data | change)
    assert len(bench.calls()) == before  # nothing was started


async def test_a_file_that_is_none_is_refused(bench: Bench) -> None:
    folder, data = await saved(bench)
    before = len(bench.calls())
    for name in ("state", "memory", "disk"):
        os.rename(f"{folder}/{name}", f"{folder}/kept")
        with pytest.raises(InvalidRequest, match=f"no file {name}"):
            await bench.driver.restore(bench.spec(), folder, data)
        os.symlink("/etc/passwd", f"{folder}/{name}")
        with pytest.raises(InvalidRequest, match=f"no file {name}"):
            await bench.driver.restore(bench.spec(), folder, data)
        os.rename(f"{folder}/kept", f"{folder}/{name}")
    assert len(bench.calls()) == before


async def test_damaged_state_fails_with_firecrackers_words(bench: Bench) -> None:
    folder, data = await saved(bench)
    Path(folder, "state").chmod(0o600)
    Path(folder, "state").write_text("damaged")
    Path(folder, "state").chmod(0o444)
    with pytest.raises(StartFailed, match="Cannot deserialize the microVM state"):
        await bench.driver.restore(bench.spec(), folder, data)
