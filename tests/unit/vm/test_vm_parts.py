"""The parts of a virtual machine without one: archives, kernels, disks, QEMU's arguments, QMP."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence import _native
from ringfence.model.errors import HostLimit, InvalidRequest, LinkLost, RuntimeUnavailable, Unsupported
from ringfence.model.levels import Boundary
from ringfence.runtimes.contract import (
    AGENT_UID,
    Bind,
    CgroupPlace,
    Disk,
    Identity,
    IdMap,
    RootFs,
    StartSpec,
)
from ringfence.runtimes.qemu import FullRuntime, MicrovmRuntime
from ringfence.runtimes.vm import (
    cleaning,
    disks,
    driver,
    images,
    initramfs,
    kernel,
    machines,
    probing,
    qmp,
    vmm,
)


def spec(folder: Path, **changes: object) -> StartSpec:
    """A sandbox's specification."""
    made = StartSpec(
        id="sb-unit",
        folder=str(folder),
        hostname="unit",
        root=RootFs(("/lower",), (), Disk("tmpfs", 64 << 20, 8192), template="sha256:abc"),
        identity=Identity(1000, 1000, (IdMap(0, 100_000, 65536),), AGENT_UID),
        cgroup=CgroupPlace(),
        max_processes=32,
        max_open_files=256,
        memory=256 << 20,
        cpus=1,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def machine(kind: str = "microvm", **changes: object) -> machines.Machine:
    """A machine."""
    return replace(machines.Machine(kind, False, 10, 11, 12, "erofs"), **changes)  # type: ignore[arg-type]


# -- the first file system


def test_archives_are_what_cpio_reads(tmp_path: Path) -> None:
    entries = [
        initramfs.Entry("folder"),
        initramfs.Entry("folder/file", b"content\n", 0o640),
        initramfs.Entry("e", b""),
    ]
    whole = initramfs.archive(entries) + initramfs.archive([initramfs.Entry("second", b"x" * 5000)])
    assert len(whole) % 512 == 0
    if shutil.which("cpio") is None:
        pytest.skip("cpio is not installed")
    for part in (initramfs.archive(entries), initramfs.archive([initramfs.Entry("second", b"x" * 5000)])):
        subprocess.run(["cpio", "-idm", "--quiet"], input=part, cwd=tmp_path, check=True)
    assert (tmp_path / "folder" / "file").read_bytes() == b"content\n"
    assert (tmp_path / "folder" / "file").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "e").read_bytes() == b""
    assert (tmp_path / "second").read_bytes() == b"x" * 5000


def test_a_config_keeps_whatever_an_environment_holds() -> None:
    config = initramfs.Config((("env", "A=1\n2 ü"), ("hostname", "x")), b"rules")
    assert b"env=A=1\n2 \xc3\xbc\0hostname=x\0" in config.encode()
    assert b"rules" in config.encode()


def test_the_first_file_system_is_written_for_its_owner_alone(tmp_path: Path) -> None:
    first = tmp_path / "base"
    first.write_bytes(initramfs.archive([initramfs.Entry("a", b"1")]))
    target = tmp_path / "initrd"
    initramfs.compose(str(first), initramfs.Config((("hostname", "x"),)), str(target), os.geteuid())
    assert target.stat().st_mode & 0o777 == 0o400
    assert target.read_bytes().startswith(first.read_bytes())
    with pytest.raises(OSError, match="exists"):
        initramfs.compose(str(first), initramfs.Config(()), str(target), os.geteuid())


def test_the_guests_init_does_nothing_on_a_host() -> None:
    done = subprocess.run([_native.path("vminit")], capture_output=True, timeout=120)
    assert done.returncode == 1
    assert machines.counter() > 100_000  # kHz


# -- kernels


def kernel_folder(folder: Path) -> Path:
    """A made-up kernel folder."""
    (folder / "modules").mkdir(parents=True)
    files = {"vmlinuz": b"kernel", "modules/virtio.ko": b"v", "modules/overlay.ko": b"o"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    digests = {name: kernel._digest(folder / name) for name in files}
    (folder / "kernel.json").write_text(json.dumps({"release": "6.0-test", "files": digests}))
    return folder


def test_a_kernel_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel.VARIABLE, str(kernel_folder(tmp_path / "good")))
    found = kernel.find()
    assert found.release == "6.0-test"
    assert found.needed("virtio_pci", "erofs") == ["/modules/virtio.ko", "/modules/overlay.ko"]


@pytest.mark.parametrize("defect", ["content", "missing", "manifest", "empty"])
def test_a_kernel_that_is_not_what_was_put_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    folder = kernel_folder(tmp_path / defect)
    if defect == "content":
        (folder / "vmlinuz").write_bytes(b"evil")
    elif defect == "missing":
        (folder / "modules" / "overlay.ko").unlink()
    elif defect == "manifest":
        (folder / "kernel.json").write_text("{")
    else:
        (folder / "kernel.json").write_text(json.dumps({"release": "x", "files": {}}))
    monkeypatch.setenv(kernel.VARIABLE, str(folder))
    with pytest.raises(RuntimeUnavailable) as caught:
        kernel.find()
    assert caught.value.hint


# -- disks


def test_what_no_disk_can_be_made_of() -> None:
    good = RootFs(("/lower",), (), Disk("tmpfs", 1 << 20, 64), template="sha256:abc")
    disks.check(good)
    for bad in (
        replace(good, template="host"),
        replace(good, image="busybox"),
        replace(good, binds=(Bind("/usr", "/usr"),)),
    ):
        with pytest.raises(Unsupported) as caught:
            disks.check(bad)
        assert caught.value.hint


def test_a_disks_name_follows_its_layers(tmp_path: Path) -> None:
    one = RootFs((str(tmp_path / "a"), str(tmp_path / "b")), (), Disk("tmpfs", 1, 1), template="t")
    assert disks.name_of(one) == disks.name_of(replace(one, readonly=True))
    assert disks.name_of(one) != disks.name_of(replace(one, lowers=tuple(reversed(one.lowers))))
    assert disks.name_of(one) != disks.name_of(replace(one, template="u"))


def test_copies_of_disks_keep_their_holes(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    with open(source, "wb") as file:
        file.truncate(64 << 20)
        file.seek(10 << 20)
        file.write(b"data")
    disks.copy(str(source), str(target))
    assert target.stat().st_size == 64 << 20
    assert target.stat().st_blocks * 512 < 4 << 20
    with open(target, "rb") as file:
        file.seek(10 << 20)
        assert file.read(4) == b"data"
    with pytest.raises(FileExistsError):
        disks.copy(str(source), str(target))


def test_cleaning_leaves_what_is_in_use(tmp_path: Path) -> None:
    names = (
        "template-a.erofs", "template-b.erofs", "ext4-1-1.img", "initramfs-1", "initramfs-2", "vmm-1",
        "vmm-2", "vmlinux-1", "other",
    )  # fmt: skip
    for age, name in enumerate(names):
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (10**9 + age, 10**9 + age))
    cleaning.used(str(tmp_path / "initramfs-1"))  # used again
    kept = cleaning.keeper(str(tmp_path), {"template-a"}, busy=False)
    assert [name for name in names if not kept(name)] == ["template-b.erofs", "initramfs-2", "vmm-1"]
    kept = cleaning.keeper(str(tmp_path), {"template-a"}, busy=True)
    assert [name for name in names if not kept(name)] == ["template-b.erofs", "initramfs-2"]
    assert not cleaning.keeper(str(tmp_path / "nowhere"), set(), busy=False)("template-a.erofs")


def test_template_gc_cleans_the_vm_store(tmp_path: Path) -> None:
    from ringfence.images.store import TemplateStore
    from ringfence.node.collecting import collect

    place = tmp_path / "vm"
    place.mkdir()
    for age, name in enumerate(("template-gone.erofs", "ext4-1-1.img", "initramfs-1", "initramfs-2")):
        (place / name).write_bytes(b"x")
        os.utime(place / name, (10**9 + age, 10**9 + age))
    (place / "template-new.erofs").write_bytes(b"x")  # somebody may be about to use it
    store = TemplateStore.open(tmp_path / "images")
    assert sorted(name for _, name, _ in collect(tmp_path, store, dry_run=True).removed) == [
        "initramfs-1",
        "template-gone.erofs",
    ]
    assert len(os.listdir(place)) == 5
    collect(tmp_path, store)
    assert sorted(os.listdir(place)) == ["ext4-1-1.img", "initramfs-2", "template-new.erofs"]


def test_what_booted_before_need_not_boot_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "_PROVED", str(tmp_path / "machine"))
    assert probing._remembered("key") is None
    probing._remember("key", 1234.5)
    found = probing._remembered("key")
    assert found is not None
    assert found[0] == 1234.5
    assert probing._remembered("another") is None  # of other programs
    record = json.loads((tmp_path / "machine").read_text())
    for changed in ({"when": record["when"] - 10**6}, {"when": record["when"] + 10**6}, {"when": "x"}):
        (tmp_path / "machine").write_text(json.dumps(record | changed))
        assert probing._remembered("key") is None
    (tmp_path / "machine").unlink()
    (tmp_path / "real").write_text(json.dumps(record))
    (tmp_path / "machine").symlink_to(tmp_path / "real")
    assert probing._remembered("key") is None
    assert sorted(os.listdir(tmp_path)) == ["machine", "real"]


def test_modules_lose_their_signatures(tmp_path: Path) -> None:
    end = b"~Module signature appended~\n"
    for size in (0, 1, 681):
        assert initramfs.unsigned(b"module" + b"s" * size + struct.pack(">8xI", size) + end) == b"module"
    for other in (b"", b"module", end, b"x" + end, b"module" + struct.pack(">8xI", 6) + end):
        assert initramfs.unsigned(other) == other


def test_threads_may_make_the_same_archive(tmp_path: Path) -> None:
    init = tmp_path / "init"
    init.write_bytes(b"i" * (8 << 20))
    (tmp_path / "module.ko").write_bytes(b"module")
    for turn in range(8):
        found = kernel.Kernel("image", "6.1", (str(tmp_path / "module.ko"),), f"digest{turn}")
        begin = threading.Barrier(3)

        def make(found: kernel.Kernel = found, begin: threading.Barrier = begin) -> int:
            begin.wait(60)
            return os.path.getsize(initramfs.base(found, str(init), str(init), str(tmp_path / "store")))

        with ThreadPoolExecutor(3) as threads:
            sizes = {done.result() for done in [threads.submit(make) for _ in range(3)]}
        assert len(sizes) == 1
        assert sizes.pop() > 16 << 20
    assert len(os.listdir(tmp_path / "store")) == 8


# -- QEMU's arguments


@pytest.mark.parametrize("kind", ["microvm", "q35"])
def test_a_machine_has_no_card_and_no_default_device(tmp_path: Path, kind: str) -> None:
    words = machines.arguments(machine(kind), spec(tmp_path))
    assert {"-nodefaults", "-no-user-config"} <= set(words)
    assert words[words.index("-sandbox") + 1].startswith("on,")
    assert "spawn=deny" in words[words.index("-sandbox") + 1]
    text = " ".join(words)
    assert not any(word in text for word in ("netdev", "-nic", "virtio-net", "usb-", "vga", "vnc", "9p"))
    assert "readonly=on" in next(word for word in words if word.startswith("if=none,id=template"))
    assert "-incoming" not in words
    assert "fd:13" in machines.arguments(machine(kind, incoming=13), spec(tmp_path))


def test_an_emulated_machine_begins_with_a_lean_firmware(tmp_path: Path) -> None:
    assert vmm.firmware(str(tmp_path), False) == ""  # QEMU was installed without it
    (tmp_path / "firmware").mkdir()
    (tmp_path / "firmware/qboot.rom").touch()
    lean = vmm.firmware(str(tmp_path), False)
    assert (lean, vmm.firmware(str(tmp_path), True)) == ("/firmware/qboot.rom", "")
    words = machines.arguments(machine("q35", firmware=lean), spec(tmp_path))
    assert words[words.index("-bios") + 1] == lean
    assert "-bios" not in machines.arguments(machine("q35"), spec(tmp_path))


def test_an_emulated_machine_is_a_pc() -> None:
    for kind in (MicrovmRuntime, FullRuntime):
        made = object.__new__(kind)  # with nothing but what is asked for here
        made.boundary = Boundary.EMULATED
        assert made.machine == "q35"
        made.boundary = Boundary.HARDWARE
        assert made.machine == kind.kind


def test_a_guest_has_more_memory_than_its_workload(tmp_path: Path) -> None:
    memory = 256 << 20
    assert machines.guest_memory(memory) > memory + (100 << 20)
    assert machines.overhead(memory) > machines.guest_memory(memory) - memory
    lines = dict(machines.config(machine(), spec(tmp_path), _kernel(), b"f").lines)
    assert lines["memory"] == str(memory)
    assert lines["processes"] == "32"
    assert lines["capabilities"] != "0"


def test_the_agents_arguments_name_the_port(tmp_path: Path) -> None:
    lines = machines.config(machine(), spec(tmp_path), _kernel(), b"f").lines
    words = [value for key, value in lines if key == "arg"]
    assert "mux=3" in words
    assert "filter=4" in words
    assert "cgroup=5" in words
    assert not any(word.startswith("listen=") for word in words)


def _kernel() -> kernel.Kernel:
    return kernel.Kernel("/k", "r", ("/m/virtio.ko", "/m/virtio_mmio.ko"), "d")


def test_the_telling_line_of_a_console() -> None:
    text = (
        "[1.0] boring\x1b[0m\r\nringfence-vminit: disk: /dev/vda:erofs: Invalid argument\r\n[2.0] reboot\r\n"
    )
    assert driver.last_words(text) == "ringfence-vminit: disk: /dev/vda:erofs: Invalid argument"
    assert driver.last_words("one\ntwo\x07\n") == "two"
    assert driver.last_words("") == ""
    assert len(driver.last_words("x" * 5000)) <= 300


# -- snapshots


def test_snapshots_that_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "disk").write_bytes(b"disk")
    mine = images.fitting("qemu", spec(tmp_path), "kernel", "7.2", "q35", "/firmware/qboot.rom")
    data = images.describe(str(tmp_path), mine, memory=False)
    assert json.loads(json.dumps(data)) == data
    images.check(str(tmp_path), data, mine)
    images.check(str(tmp_path), data, mine | {"memory": 1})  # a disk fits any memory
    with pytest.raises(InvalidRequest, match="its template is"):
        images.check(str(tmp_path), data, mine | {"template": "other"})
    (tmp_path / "disk").write_bytes(b"dusk")
    with pytest.raises(InvalidRequest, match="disk is not what was saved"):
        images.check(str(tmp_path), data, mine)
    (tmp_path / "disk").unlink()
    (tmp_path / "disk").symlink_to("/etc/passwd")
    with pytest.raises(InvalidRequest, match="damaged"):
        images.check(str(tmp_path), data, mine)


# -- QMP


Answer = Callable[[dict[str, object]], bytes | None]


@asynccontextmanager
async def _server(folder: Path, answer: Answer) -> AsyncIterator[None]:
    writers = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(b'{"QMP": {}}\n')
        with suppress(ConnectionError, asyncio.CancelledError):
            while line := await reader.readline():
                said = answer(json.loads(line))
                if said is None:
                    break
                writer.write(said)
        writer.close()

    server = await asyncio.start_unix_server(serve, str(folder / qmp.NAME))
    try:
        yield
    finally:
        server.close()
        for writer in writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


def _echo(call: dict[str, object]) -> bytes:
    return b'{"event": "X"}\n{"return": {"asked": "%s"}}\n' % str(call["execute"]).encode()


async def test_calls_are_answered_whatever_events_come_between(tmp_path: Path) -> None:
    async with _server(tmp_path, _echo), await qmp.Qmp.open(str(tmp_path)) as machine:
        assert await machine.call("query-status") == {"asked": "query-status"}


async def _refused(folder: Path, answer: Answer, kind: type[Exception]) -> None:
    # What is awaited in vain is not awaited for long; an answer may take its time.
    within = 1.0 if kind is LinkLost else 60.0
    async with _server(folder, answer):
        with pytest.raises(kind):
            async with await qmp.Qmp.open(str(folder), within) as machine:
                await machine.call("stop", within=within)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (
            lambda call: b'{"error": {"desc": "no"}}\n' if call["execute"] == "stop" else b'{"return": {}}\n',
            HostLimit,
        ),
        (lambda call: b"\xff\xfe\n", LinkLost),
        (lambda call: b"[]\n", LinkLost),
        (lambda call: b'{"return": ' + b"x" * (2 << 20), LinkLost),
        (lambda call: None, LinkLost),
        (lambda call: b"" if call["execute"] == "stop" else b'{"return": {}}\n', LinkLost),
    ],
    ids=["error", "no text", "no object", "endless", "gone", "silent"],
)
async def test_a_machine_that_answers_badly(tmp_path: Path, answer: Answer, kind: type[Exception]) -> None:
    await _refused(tmp_path, answer, kind)


async def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(LinkLost):
        await qmp.Qmp.open(str(tmp_path))
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(str(tmp_path / qmp.NAME))
    bound.listen()
    with pytest.raises(LinkLost):  # accepts, and says nothing
        await qmp.Qmp.open(str(tmp_path), 0.3)
    bound.close()
