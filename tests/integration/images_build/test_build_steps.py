"""Builds on a real node, in real sandboxes: what steps leave, what is known from before, what fails how."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence.images import importing
from ringfence.images.building import keeping
from ringfence.images.building.definition import parse
from ringfence.images.contract import Layer, Template
from ringfence.images.importing import ImportOptions
from ringfence.images.merged import Merged
from ringfence.images.store import TemplateStore
from ringfence.model.errors import (
    BuildFailed,
    HostLimit,
    InvalidRequest,
    NotFound,
    RingfenceError,
    StartFailed,
    Unsupported,
    WrongState,
)
from ringfence.model.policy import MIB, Limits
from ringfence.model.sandbox import SandboxRequest
from ringfence.node.building import BuildOptions, Built, build
from ringfence.node.collecting import collect
from ringfence.node.refreshing import Refreshing, refresh_all
from ringfence.node.service import Node
from ringfence.node.warming import warm
from support import images
from support.leaks import Leaks
from support.nodes import ask, run

ROOT = os.geteuid() == 0
BASE = "FROM busybox:1\n"


class Listening:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.said = b""
        self.notes: list[str] = []

    def step(self, number: int, count: int, text: str) -> None:
        self.steps.append(f"{number}/{count} {text}")

    def output(self, stream: int, data: bytes) -> None:
        self.said += data

    def ended(self, number: int, seconds: float, layer: Layer | None, *, cached: bool) -> None:
        self.steps.append("known" if cached else "made")

    def note(self, text: str) -> None:
        self.notes.append(text)


class Builder:
    """Builds in few words; whatever happens, nothing of it may be left beside layers and names."""

    def __init__(self, node: Node, store: TemplateStore, context: Path) -> None:
        self.node, self.store, self.context = node, store, context
        self.listening = Listening()

    async def __call__(self, text: str, name: str = "made", *, base: str = BASE, **options: object) -> Built:
        self.listening = Listening()
        policy = replace(ask(memory=128 * MIB, disk=16 * MIB).policy, name="build")
        changes = options.pop("policy", None)
        if callable(changes):
            policy = changes(policy)
        made = BuildOptions(name, policy=policy, **options)  # type: ignore[arg-type]
        try:
            return await build(
                self.node, self.store, parse((base + text).encode()), str(self.context), made, self.listening
            )
        finally:
            self.nothing_left()

    def nothing_left(self) -> None:
        known = self.store.digests()
        for digest in known:  # no half-built template
            assert "ringfence.building" not in dict(self.store.resolve(digest).config.labels)
        assert self.node.snapshots.all(temporary=True) == ()
        fittings = os.listdir(self.store.private / "fittings")
        assert {"sha256:" + name.partition("-")[0] for name in fittings} <= set(known)

    def read(self, template: Template, path: str) -> bytes | None:
        return Merged(template.lowers).read(path)


@pytest.fixture
async def node(no_leaks: Leaks) -> AsyncIterator[Node]:
    async with await Node.open() as made:
        yield made


@pytest.fixture
def store(no_leaks: Leaks) -> Iterator[TemplateStore]:
    assert no_leaks.home is not None
    with TemplateStore.open(no_leaks.home / "images") as made:
        importing.add(made, f"rootfs:{images.busybox()}", ImportOptions(name="busybox:1"))
        yield made


@pytest.fixture
def make(node: Node, store: TemplateStore, tmp_path: Path) -> Builder:
    context = tmp_path / "context"
    (context / "app").mkdir(parents=True)
    (context / "app/hello").write_text("hello\n")
    return Builder(node, store, context)


async def output(node: Node, template: str, *argv: str, **words: object) -> str:
    sandbox = await node.create(ask(template=template, **words))  # type: ignore[arg-type]
    try:
        result, text = await run(sandbox, *argv)
        assert result.end.exit_code == 0, text
        return text
    finally:
        await sandbox.destroy()


async def test_a_collection_between_a_step_s_template_and_its_sandbox_takes_nothing(
    make: Builder, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = node.create
    moments = []

    async def create(request: SandboxRequest, **words: object) -> object:
        with TemplateStore.open(make.store.folder) as another:  # as `ringfence template gc` does
            found = await asyncio.to_thread(collect, node.state.path, another)
        moments.append([kind for kind, _, _ in found.removed])
        assert request.template in make.store.digests()
        return await real(request, **words)  # type: ignore[arg-type]

    monkeypatch.setattr(node, "create", create)
    built = await make("RUN echo one > /one\nRUN cat /one > /two\n")
    assert make.read(built.template, "two") == b"one\n"
    assert moments == [[], []]
    # What a build holds it lets go: the unnamed templates of its steps are not kept by anything.
    sessions = make.store.folder / "tmp"
    assert list(sessions.glob("*/holds/*")) == []


async def test_what_a_dead_build_held_is_collected(make: Builder, node: Node) -> None:
    base = make.store.resolve("busybox:1")
    dead = TemplateStore.open(make.store.folder)
    held = dead.put("", base.layers, replace(base.config, labels=(("a", "b"),)), hold=True)
    assert collect(node.state.path, make.store).removed == ()
    os.close(dead._session_lock)  # as the kernel does when its process is killed
    removed = collect(node.state.path, make.store).removed
    assert ("template", held.digest, 0) in removed
    assert held.digest not in make.store.digests()


async def test_a_template_is_built_and_runs(make: Builder, node: Node) -> None:
    built = await make(
        "ENV GREETING=hello\nCOPY app /srv/app\n"
        "RUN id -u && pwd && test $GREETING = hello && echo run > /srv/app/run\n"
        "RUN rm /srv/app/hello && mkdir /empty && ln -s hello /srv/app/link\n"
        'WORKDIR /srv/app\nLABEL a=b\nCMD ["cat", "run"]\n'
    )
    assert make.listening.said == b"0\n/\n"  # root of the sandbox, in the root
    assert built.cached == 0 and built.steps == 7
    template = built.template
    assert template.source == "build" and template.base_digest == make.store.resolve("busybox:1").digest
    assert template.config.cmd == ("cat", "run") and template.config.workdir == "/srv/app"
    assert await output(node, "made", "sh", "-c", "cat run; ls; ls -d /empty; echo $GREETING") == (
        "run\nlink\nrun\n/empty\nhello\n"
    )


async def test_the_same_input_gives_the_same_digest(make: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "COPY app /srv\nRUN date; mkdir -p /b /a; echo x > /b/x; echo $SOURCE_DATE_EPOCH > /a/e\n"
    first = await make(text)
    again = await make(text, "again", cache=False)
    assert again.cached == 0 and again.template.digest == first.template.digest
    assert make.read(again.template, "/a/e") == b"315619200\n"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    other = await make(text, "other")  # the control: the epoch is part of it
    assert other.template.digest != first.template.digest
    folder = Merged(other.template.lowers).find("/b")
    assert folder is not None and folder[1].st_mtime == 1_000_000_000


async def test_what_is_known_is_not_built_again(make: Builder) -> None:
    text = "COPY app /srv\nRUN cp /srv/hello /made\nRUN true\n"
    first = await make(text)
    assert (await make(text)).cached == 3
    os.utime(make.context / "app/hello", (1, 1))  # times of the context's files don't count
    assert (await make(text)).template.digest == first.template.digest
    (make.context / "app/hello").write_text("changed\n")
    changed = await make(text)
    assert changed.cached == 0 and make.read(changed.template, "/made") == b"changed\n"
    assert (await make("COPY app /srv\nRUN cp /srv/hello /other\n", "third")).cached == 1


async def test_a_step_that_writes_nothing_brings_no_layer(make: Builder) -> None:
    built = await make("RUN true\nRUN ls / > /dev/null\n")
    assert len(built.template.layers) == 1


async def test_build_arguments(make: Builder) -> None:
    text = "ARG V=1\nRUN echo $V > /v\n"
    assert make.read((await make(text)).template, "/v") == b"1\n"
    given = await make(text, arguments={"V": "2"})
    assert given.cached == 0 and make.read(given.template, "/v") == b"2\n"
    assert "V" not in dict(given.template.config.env)


async def test_users(make: Builder, node: Node) -> None:
    built = await make(
        "RUN echo job:x:1234:1234::/home/job:/bin/sh >> /etc/passwd && echo job:x:1234: >> /etc/group "
        "&& mkdir -p /home/job && chown job:job /home/job\n"
        "COPY --chown=job app/hello /home/job/\nUSER job\nWORKDIR /home/job\nRUN id -u > who && rm -f hello\n"
        if ROOT
        else "RUN echo job:x:0:0::/home/job:/bin/sh >> /etc/passwd\nUSER job\nRUN id -u > /who\n"
    )
    passwd = (make.read(built.template, "/etc/passwd") or b"").decode()
    assert "job:x:" in passwd
    assert "guest agent" not in passwd and "agent:x:" not in passwd  # what a sandbox has on top is not kept
    if ROOT:
        assert make.read(built.template, "/home/job/who") == b"1234\n"
        assert (built.template.config.uid, built.template.config.gid) == (1234, 1234)
        assert await output(node, "made", "sh", "-c", "ls; id -u", user=1234) == "who\n1234\n"
    with pytest.raises(InvalidRequest, match="line 3, RUN: the template knows no user 'nobody-here'"):
        await make("USER nobody-here\nRUN true\n", "other")


async def test_a_step_that_fails_says_its_last_words_and_changes_nothing(make: Builder) -> None:
    before = (await make("RUN echo one > /x\n")).template.digest
    with pytest.raises(
        BuildFailed, match=r"(?s)^Dockerfile line 3, RUN: its command ended with 7:\n.*sorry$"
    ) as caught:
        await make(
            "RUN echo two > /x\nRUN for i in $(seq 500); do echo line $i; done; echo sorry >&2; exit 7\n"
        )
    details = caught.value.details
    assert (details["line"], details["exit_code"], details["cause"]) == (3, 7, "exited")
    assert caught.value.message.count("\n") == 20 and details["output"].startswith("line 1\n")
    assert make.store.resolve("made").digest == before
    assert (await make("RUN echo two > /x\n", "other")).cached == 1  # what was done is not done again


async def test_a_lack_of_network_is_said(make: Builder) -> None:
    with pytest.raises(BuildFailed) as caught:
        await make("RUN wget -q http://packages.example/x\n")
    assert "build steps have no network" in caught.value.hint and "COPY" in caught.value.hint
    with pytest.raises(BuildFailed) as caught:  # the control
        await make("RUN false\n")
    assert "network" not in caught.value.hint


async def test_a_step_has_no_network_and_nothing_of_the_host(make: Builder, tmp_path: Path) -> None:
    (tmp_path / "host-secret").write_text("secret")
    await make(f"RUN ls /sys/class/net > /nets; test ! -e {tmp_path}/host-secret; test ! -e {make.context}\n")
    nets = make.read(make.store.resolve("made"), "/nets")
    assert nets in (b"lo\n", b"")


async def test_a_full_disk_is_said(make: Builder) -> None:
    with pytest.raises(BuildFailed, match="disk of 16MiB is full") as caught:
        await make("RUN head -c 100000000 /dev/zero > /big\n")
    assert "--disk" in caught.value.hint


async def test_memory_and_time_are_said(make: Builder) -> None:
    with pytest.raises(BuildFailed, match=r"line 2, RUN: .*more than 128MiB") as caught:
        await make("RUN head -c 400000000 /dev/zero | tail -c 399999999 > /dev/null\n")
    assert "--memory" in caught.value.hint
    with pytest.raises(BuildFailed, match="its time was up") as caught:
        await make("RUN sleep 1000\n", policy=lambda p: p.with_door(limits=Limits(timeout=5.0)))
    assert "--timeout" in caught.value.hint


async def test_what_a_hostile_step_leaves_is_harmless(make: Builder, node: Node, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("untouched")
    built = await make(
        f"RUN ln -s {target} /srv-link && ln -s / /rooted && ln -s ../../../../../../../.. /up && "
        "mkfifo /pipe && touch /.wh.etc /a$(printf '\\\\001')b && truncate -s 64M /sparse; "
        "chmod 4755 /bin/busybox 2>/dev/null; true\n"
        "COPY app/hello /up/etc/hello\nCOPY app/hello /rooted/hello\n"
    )
    assert target.read_text() == "untouched"
    assert make.read(built.template, "/etc/hello") == b"hello\n" == make.read(built.template, "/hello")
    assert not os.path.exists("/etc/hello")
    assert Merged(built.template.lowers).find("/etc") is not None  # the false whiteout hid nothing
    for layer in built.template.layers[1:]:
        for here, folders, files in os.walk(layer.folder):
            for name in (*folders, *files):
                assert not os.lstat(os.path.join(here, name)).st_mode & 0o6000
    assert any(".wh.etc" in note for note in built.notes)
    assert await output(node, "made", "cat", "/hello") == "hello\n"


async def test_holes_beyond_all_measure_are_refused(make: Builder) -> None:
    with pytest.raises(HostLimit, match="most of it holes"):
        await make("RUN truncate -s 2199023255552 /sparse\n")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("COPY nothing /x\n", NotFound, "line 2, COPY: there is no nothing"),
        ("COPY out /x\n", InvalidRequest, "line 2, COPY: out is a link that leads out"),
        ("WORKDIR /bin/busybox\n", InvalidRequest, "line 2, WORKDIR: /bin/busybox is a file"),
        ("COPY app /bin/busybox/x\n", InvalidRequest, "line 2, COPY: /bin/busybox is a file"),
    ],
)
async def test_mistakes(make: Builder, text: str, error: type[RingfenceError], message: str) -> None:
    (make.context / "out").symlink_to("/etc/passwd")
    with pytest.raises(error, match=message):
        await make(text)
    assert make.store.names() == ["busybox:1"]


@pytest.mark.parametrize(
    ("base", "error", "message"),
    [
        ("FROM nothing:1\n", NotFound, "line 1, FROM: no template"),
        ("FROM host\n", InvalidRequest, "line 1, FROM: no template can be built on host"),
        ("FROM docker:python\n", InvalidRequest, "can be built on docker:python"),
        ("FROM rootfs:/etc/passwd\n", InvalidRequest, "only oci: and debian: are fetched"),
        ("FROM scratch\nRUN true\n", InvalidRequest, "line 2, RUN: there is no program in an empty template"),
        ("FROM scratch\n", InvalidRequest, "would have no files"),
    ],
)
async def test_bases(make: Builder, base: str, error: type[RingfenceError], message: str) -> None:
    with pytest.raises(error, match=message):
        await make("", base=base)


async def test_from_nothing(make: Builder) -> None:
    built = await make("COPY app /\n", base="FROM scratch\n")
    assert make.read(built.template, "/hello") == b"hello\n"


async def test_a_runtime_that_keeps_no_layer_is_refused_before_the_step(make: Builder) -> None:
    images.need("bwrap")
    bwrap = ask(runtime="bubblewrap", memory=128 * MIB, disk=16 * MIB).policy
    runtime = await make.node.runtime("bubblewrap")
    if runtime.capabilities().disk_snapshot:
        pytest.skip("bubblewrap has disk snapshots")
    with pytest.raises(Unsupported, match=r"line 2, RUN: runtime bubblewrap"):
        await make("RUN echo ran > /x\n", policy=lambda p: bwrap)
    assert make.listening.said == b""


@pytest.mark.parametrize("runtime", ["nsjail", "runc", "gvisor"])
async def test_other_runtimes_give_the_same_layer(make: Builder, runtime: str) -> None:
    if runtime != "nsjail":
        images.need({"runc": "runc", "gvisor": "runsc"}[runtime])
    if not ROOT:
        pytest.skip(f"{runtime} wants more ids than this user may have")
    probe = await make.node.probe(runtime)
    if probe.health == "unavailable":
        pytest.skip(f"{runtime}: {probe.reason}")
    text = "RUN mkdir -p /a/b && echo x > /a/b/c && rm -r /etc/keep && ln /a/b/c /a/d\n"
    expected = await make(text)
    other = ask(runtime=runtime, memory=256 * MIB, disk=16 * MIB).policy
    made = await make(text, "other", cache=False, policy=lambda p: other)
    assert made.template.digest == expected.template.digest


async def test_given_up_in_the_middle_nothing_is_left(make: Builder, node: Node) -> None:
    task = asyncio.ensure_future(make("RUN echo begun; sleep 1000\n"))
    for _ in range(6000):
        if make.listening.said or task.done():
            break
        await asyncio.sleep(0.01)
    assert make.listening.said == b"begun\n"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert node.sandboxes() == []
    assert make.store.names() == ["busybox:1"]


# -- start and ready


async def test_start_and_ready_come_up_with_each_sandbox(make: Builder, node: Node) -> None:
    await make("START echo up > /tmp/up; exec sleep 1000\nREADY test -e /tmp/up\n")
    assert await output(node, "made", "cat", "/tmp/up") == "up\n"
    # A template that is built on it brings them, too; its own steps run without.
    await make("RUN test ! -e /tmp/up\n", "child", base="FROM made\n")
    assert await output(node, "child", "cat", "/tmp/up") == "up\n"


async def test_start_and_ready_come_up_again_after_a_reset_and_in_what_is_restored(
    make: Builder, node: Node
) -> None:
    # Each time it comes up it adds a line to what it finds, whatever was saved.
    await make("START echo up >> /tmp/up; exec sleep 1000\nREADY test -e /tmp/up\n")
    sandbox = await node.create(ask(template="made"))
    await sandbox.snapshot("saved", kind="disk")
    copy = await node.restore("saved")
    assert (await run(copy, "cat", "/tmp/up"))[1] == "up\nup\n"
    await copy.destroy()
    for _ in range(2):
        await sandbox.reset()
        assert (await run(sandbox, "cat", "/tmp/up"))[1] == "up\n"
    await sandbox.destroy()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("START echo sorry; exit 3\nREADY test -e /tmp/up\n", r"start command ended with 3:\nsorry"),
        ('START ["/not-there"]\n', "start command can't be run"),
        ('READY ["/not-there"]\n', "ready command can't be run"),
        ("READY false\n", r"ready command never succeeded: the sandbox ended \(deadline\)"),
    ],
)
async def test_what_does_not_come_up_is_no_sandbox(
    make: Builder, node: Node, text: str, message: str
) -> None:
    await make(text)
    with pytest.raises(StartFailed, match=message) as caught:
        # Only what never succeeds waits for it.
        await node.create(ask(template="made", timeout=5.0 if "READY false" in text else 60.0))
    assert "template show made" in caught.value.hint
    assert node.sandboxes() == []


# -- age, refresh, warm


def older(store: TemplateStore, name: str, seconds: float) -> None:
    """Set back when a template was put into the store."""
    import json

    for path in (store.folder / "names" / f"{name}.json",):
        record = json.loads(path.read_text())
        record["made_at"] -= seconds
        path.write_text(json.dumps(record))


async def test_a_policy_refuses_what_is_too_old_until_it_is_refreshed(make: Builder, node: Node) -> None:
    older(make.store, "busybox:1", 40 * 86400)
    await make("RUN echo x > /x\n")
    request = ask(template="made")
    limited = request.policy.with_door(
        limits=replace(request.policy.door.limits, max_template_age=30 * 86400.0)
    )
    with pytest.raises(WrongState, match="made:latest is 40d old") as caught:
        await node.create(SandboxRequest(policy=limited, template="made"))
    assert caught.value.hint == "ringfence template refresh made:latest"
    # Its base is an archive: that is taken again if it is asked for by name, and then what is built on it.
    refreshing = Refreshing(node, make.store, Listening())
    for name in ("busybox:1", "made"):
        assert not (await refreshing.refresh(name)).changed
    sandbox = await node.create(SandboxRequest(policy=limited, template="made"))
    await sandbox.destroy()


async def test_refresh_builds_again_on_a_newer_base(make: Builder, node: Node) -> None:
    await make("RUN echo 1 > /version\n", "base")
    before = await make(
        "ARG V=0\nRUN cat /version > /seen; echo $V >> /seen\n", base="FROM base\n", arguments={"V": "7"}
    )
    assert make.read(before.template, "/seen") == b"1\n7\n"
    assert not (await Refreshing(node, make.store, Listening()).refresh("made")).changed
    await make("RUN echo 2 > /version\n", "base")
    made = await Refreshing(node, make.store, Listening()).refresh("made")
    assert made.changed and make.read(made.template, "/seen") == b"2\n7\n"
    assert made.template.base_digest == make.store.resolve("base").digest
    make.nothing_left()


async def test_what_can_not_be_refreshed_says_why_and_stays(make: Builder, node: Node) -> None:
    built = await make("COPY app /srv\n")
    make.store.put("copied", built.template.layers, source="snapshot:sn-1")
    keeping.forget_recipe(make.store, "made")
    done, failed = await refresh_all(
        Refreshing(node, make.store, Listening()), ["made", "copied", "busybox:1", "nothing"]
    )
    assert [each.name for each in done] == ["busybox:1"]
    assert [name for name, _ in failed] == ["made", "copied", "nothing"]
    assert "is not known here" in failed[0][1].message and "can't be made again" in failed[1][1].message
    assert make.store.resolve("made").digest == built.template.digest
    with pytest.raises(InvalidRequest, match="never changes"):
        await Refreshing(node, make.store, Listening()).refresh(built.template.digest)


async def test_a_context_that_is_gone_is_said(make: Builder, node: Node) -> None:
    await make("COPY app /srv\n")
    make.context.rename(make.context.with_name("elsewhere"))
    with pytest.raises(NotFound, match="was built from is gone"):
        await Refreshing(node, make.store, Listening()).refresh("made")


async def test_templates_built_on_one_another(make: Builder, node: Node) -> None:
    await make("RUN echo 1 > /x\n", "a")
    await make("RUN echo 1 > /y\n", "b", base="FROM a\n")
    await make("RUN echo 2 > /x\n", "a", base="FROM b\n")
    with pytest.raises(InvalidRequest, match="built on itself"):
        await Refreshing(node, make.store, Listening()).refresh("a")


async def test_warm_makes_what_the_first_start_would_make(make: Builder, node: Node) -> None:
    template = (await make("RUN echo x > /x\n")).template
    fittings = make.store.private / "fittings"
    own = template.digest.removeprefix("sha256:")
    assert not [name for name in os.listdir(fittings) if name.startswith(own)]
    warmed = await warm(node, template, "jail", ask().policy)
    assert warmed.what == "fittings" and [name for name in os.listdir(fittings) if name.startswith(own)]
    if ROOT:
        images.need("mkfs.erofs")
        warmed = await warm(node, template, "qemu-microvm", ask().policy)
        assert os.path.exists(warmed.what.split()[1])


async def test_a_collection_leaves_a_store_that_builds_again(make: Builder, node: Node) -> None:
    text = "RUN echo x > /x\n"
    digest = (await make(text)).template.digest
    make.store.remove("made")
    make.store.close()  # layers that it has added are safe until then
    collect(node.state.path, make.store)
    again = await make(text)
    assert again.cached == 0 and again.template.digest == digest
