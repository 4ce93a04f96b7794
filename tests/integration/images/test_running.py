"""One template, every wall: what is inside is the template's and nothing of the host."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence.images import importing
from ringfence.images.importing import ImportOptions
from ringfence.images.store import TemplateStore
from ringfence.model.errors import InvalidRequest, NotFound, Unsupported, WrongState
from ringfence.model.policy import MIB, Filesystem, Mount
from ringfence.node.fittings import ImageRoot
from ringfence.node.service import Node
from ringfence.runtimes.contract import Disk
from support import images
from support.commands import Ringfence
from support.leaks import Leaks
from support.nodes import ask, run

ROOT = os.geteuid() == 0
RUNTIMES = ["jail", "bubblewrap", "nsjail", "runc", "crun", "gvisor"]
PROGRAMS = {"bubblewrap": "bwrap", "runc": "runc", "crun": "crun", "gvisor": "runsc"}
LOOK = (
    "cat /etc/keep/one /etc/keep/hello; test ! -e /etc/gone && echo gone; ls /var/lib/old; pwd; "
    "echo $GREETING $HOME $TZ $LANG $PYTHONHASHSEED; id -u; id -un; echo x > /workspace/x; "
    "echo y > /home/agent/y; echo z > /tmp/z; cat /workspace/x; cat /etc/hostname /etc/hosts"
)


@pytest.fixture
async def node(no_leaks: Leaks) -> AsyncIterator[Node]:
    async with await Node.open() as made:
        yield made


@pytest.fixture
def tools(home: TemplateStore) -> str:
    return importing.add(home, str(images.docker_archive())).template.name


def need(runtime: str) -> None:
    if runtime in PROGRAMS:
        images.need(PROGRAMS[runtime])
    if not ROOT and runtime not in ("jail", "bubblewrap", "nsjail"):
        pytest.skip(f"{runtime} wants more ids than this user may have")


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("form", ["docker save", "layout"])
async def test_it_runs(runtime: str, form: str, home: TemplateStore, node: Node) -> None:
    need(runtime)
    source = images.docker_archive() if form == "docker save" else images.layout()
    name = importing.add(home, str(source), ImportOptions(name="tools:x")).template.name
    sandbox = await node.create(ask(runtime=runtime, template=name))
    result, text = await run(sandbox, "sh", "-c", LOOK)
    assert result.end.exit_code == 0, text
    lines = text.splitlines()
    assert lines[:5] == ["changed", "hello from the second layer", "gone", "hello", "/srv/work"]
    # The image's HOME is of its own user; ours is another one.
    assert lines[5] == "hello there /home/agent UTC C.UTF-8 0"
    assert lines[6:9] == ["1000", "agent", "x"]
    assert lines[9:11] == ["sandbox", "127.0.0.1 localhost"]
    _, text = await run(sandbox, "ls", "-A", "/")
    assert set(text.split()) == {
        ".ringfence", "bin", "dev", "etc", "home", "proc", "root", "run", "srv", "sys", "tmp", "usr", "var",
        "workspace",
    }  # fmt: skip
    _, text = await run(sandbox, "ls", "/usr/bin")
    assert text == ""  # the host's is full
    assert sandbox.root.binds == ()
    assert sandbox.root.template.startswith("sha256:")
    await sandbox.destroy()


async def test_owners_are_the_images_own(tools: str, node: Node) -> None:
    if not ROOT:
        pytest.skip("a normal user owns everything")
    sandbox = await node.create(ask(template=tools, user=0))
    result, text = await run(sandbox, "stat", "-c", "%u:%g %a %n", "/home/app/owned", "/bin/busybox", "/root")
    assert text.splitlines() == ["1234:1234 600 /home/app/owned", "0:0 755 /bin/busybox", "0:0 700 /root"]
    result, text = await run(sandbox, "sh", "-c", "cat /home/app/owned; chown 1234 /etc/passwd && echo mine")
    assert "app's" in text and "mine" in text
    await sandbox.destroy()
    sandbox = await node.create(ask(template=tools))
    result, text = await run(sandbox, "cat", "/home/app/owned")
    assert result.end.exit_code != 0
    assert "Permission denied" in text
    await sandbox.destroy()


async def test_one_sandbox_changes_nothing_for_the_next(tools: str, home: TemplateStore, node: Node) -> None:
    first = await node.create(ask(template=tools, user=0))
    await run(first, "sh", "-c", "echo evil > /etc/keep/one; rm /bin/ls; rm -r /var/lib/old")
    kinds = {change.path: change.kind for change in await first.changes()}
    assert kinds["/etc/keep/one"] == "modified"
    assert kinds["/bin/ls"] == "deleted"
    second = await node.create(ask(template=tools))
    _result, text = await run(second, "sh", "-c", "cat /etc/keep/one; ls /var/lib/old")
    assert text == "changed\nhello\n"
    await first.destroy()
    await second.destroy()
    lower = home.resolve(tools).lowers[-2]
    assert Path(lower, "etc/keep/one").read_text() == "changed\n"


@pytest.mark.parametrize("runtime", ["jail", "bubblewrap", "runc"])
async def test_mounts_and_folders_of_the_policy(runtime: str, tools: str, node: Node, tmp_path: Path) -> None:
    need(runtime)
    shown = tmp_path / "shown"
    shown.mkdir()
    for folder in (shown, *shown.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    (shown / "file").write_text("from the host\n")
    files = Filesystem(
        mounts=(Mount(str(shown), "/opt/deep/shown"),), read_write=("/workspace", "/tmp", "/srv/new/place")
    )
    sandbox = await node.create(ask(runtime=runtime, template=tools, files=files))
    script = "cat /opt/deep/shown/file; echo w > /srv/new/place/w && echo written; ls -d /etc/keep"
    result, text = await run(sandbox, "sh", "-c", script)
    assert text == "from the host\nwritten\n/etc/keep\n"
    result, _ = await run(sandbox, "sh", "-c", "echo x > /opt/deep/shown/new")
    assert result.end.exit_code != 0
    await sandbox.destroy()


async def test_a_readonly_root(tools: str, node: Node) -> None:
    files = replace(Filesystem(), root="readonly")
    sandbox = await node.create(ask(template=tools, files=files, user=0))
    _result, text = await run(sandbox, "sh", "-c", "echo x > /workspace/x && echo w; echo x > /etc/new")
    assert text.startswith("w\n") and "Read-only" in text
    await sandbox.destroy()


async def test_a_mount_over_something_else(tools: str, node: Node, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for target, words in (
        ("/bin/sh", "is a link"),
        ("/etc/passwd", "keeps for itself"),
        ("/bin/ls/x", "link"),
    ):
        files = Filesystem(mounts=(Mount(str(tmp_path), target),))
        with pytest.raises(InvalidRequest, match=words):
            await node.create(ask(template=tools, files=files))


# -- hostile templates


def hostile(home: TemplateStore, tmp_path: Path, name: str, links: dict[str, str], **files: bytes) -> str:
    """The busybox root with some of its names turned into links."""
    tar = tmp_path / f"{name}.tar"
    with tarfile.open(images.busybox()) as old, tarfile.open(tar, "w", format=tarfile.PAX_FORMAT) as new:
        for member in old:
            if not any(member.name == path or member.name.startswith(path + "/") for path in links):
                new.addfile(member, old.extractfile(member) if member.isfile() else None)
        for path, target in links.items():
            images.add(new, path, kind=tarfile.SYMTYPE, link=target)
        for path, data in files.items():
            images.add(new, path.replace("__", "/"), data)
    return importing.add(home, f"rootfs:{tar}", ImportOptions(name=name)).template.name


@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_links_in_place_of_everything(
    runtime: str, home: TemplateStore, node: Node, tmp_path: Path
) -> None:
    """Wherever a sandbox mounts or writes, this image has a link that leads out, up or round in a circle."""
    need(runtime)
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "word").write_text("the host's secret")
    out = "../" * 12 + str(secret).lstrip("/")
    links = {
        "proc": str(secret), "sys": "/etc", "dev": out, "run": "run", "tmp": str(secret), "etc": out,
        "home": "/proc/1/root", "workspace": "/proc/self/root", ".ringfence": str(secret), "srv": out,
        "var": "/var/var",
    }  # fmt: skip
    name = hostile(home, tmp_path, "links", links)
    before = sorted(secret.iterdir())
    sandbox = await node.create(ask(runtime=runtime, template=name))
    script = (
        "cat /*/word /secret/word; echo x > /workspace/x && cat /workspace/x; echo x > /tmp/x && echo tmp; "
        f"cat {secret}/word; test -d /proc/self && echo proc; test -c /dev/null && echo dev; id -un"
    )
    _result, text = await run(sandbox, "/bin/sh", "-c", script)
    assert "the host's secret" not in text
    lines = text.splitlines()
    for word in ("x", "tmp", "proc", "dev", "agent"):
        assert word in lines, text
    await sandbox.destroy()
    assert sorted(secret.iterdir()) == before
    assert (secret / "word").read_text() == "the host's secret"


def test_control_a_careless_maker_of_mount_points_is_led_astray(home: TemplateStore, tmp_path: Path) -> None:
    """The same image, and folders made in it as a program does that trusts paths."""
    secret = tmp_path / "secret"
    secret.mkdir()
    name = hostile(home, tmp_path, "links", {"etc": str(secret)})
    layer = home.resolve(name).lowers[0]
    Path(layer, "etc", "hosts").write_text("127.0.0.1 localhost\n")
    assert (secret / "hosts").exists()


async def test_etc_that_is_a_good_link_stays_one(home: TemplateStore, node: Node, tmp_path: Path) -> None:
    name = hostile(home, tmp_path, "moved", {"etc": "usr/etc"}, usr__etc__own=b"the image's own\n")
    sandbox = await node.create(ask(template=name))
    _result, text = await run(
        sandbox, "sh", "-c", "cat /etc/own; head -1 /usr/etc/hosts; readlink /etc; id -un"
    )
    assert text == "the image's own\n127.0.0.1 localhost\nusr/etc\nagent\n"
    await sandbox.destroy()


async def test_accounts_of_the_image_stay(home: TemplateStore, node: Node, tmp_path: Path) -> None:
    name = hostile(
        home, tmp_path, "users", {}, etc__passwd=b"root:x:0:0::/root:/bin/sh\nagent:x:77:77::/:/bin/sh\n"
    )
    sandbox = await node.create(ask(template=name))
    _result, text = await run(sandbox, "sh", "-c", "id -un; cat /etc/passwd")
    assert text.splitlines() == [
        "agent1000",
        "root:x:0:0::/root:/bin/sh",
        "agent:x:77:77::/:/bin/sh",
        "agent1000:x:1000:1000:agent:/home/agent:/bin/sh",
        "ringfence:x:64999:64999:guest agent:/:/usr/sbin/nologin",
    ]
    await sandbox.destroy()


# -- what a template starts


async def test_a_template_that_starts_something(home: TemplateStore, node: Node) -> None:
    start = (
        "sleep 0.2; echo up > /tmp/up; i=0; while [ $i -lt 20000 ]; do echo $i; i=$((i+1)); done; sleep 999"
    )
    options = ImportOptions(
        name="server", start=("/bin/sh", "-c", start), ready=("/bin/sh", "-c", "test -e /tmp/up")
    )
    importing.add(home, str(images.docker_archive()), options)
    sandbox = await node.create(ask(template="server"))
    _, text = await run(sandbox, "sh", "-c", "cat /tmp/up; ps | grep -c [s]leep")
    assert text.splitlines()[0] == "up"
    await sandbox.destroy()


# -- names


async def test_names_and_digests(tools: str, home: TemplateStore, node: Node) -> None:
    digest = home.resolve(tools).digest
    for name in (digest, digest[:20]):
        sandbox = await node.create(ask(template=name))
        assert sandbox.root.template == digest
        await sandbox.destroy()
    with pytest.raises(NotFound) as caught:
        await node.create(ask(template="tool:1"))
    assert "did you mean tools:1?" in caught.value.hint
    with pytest.raises(NotFound):
        await node.create(ask(template="sha256:" + "0" * 64))
    with pytest.raises(Unsupported, match="container engine"):
        await node.create(ask(template="docker:python:3"))


async def test_a_layer_that_somebody_removed(tools: str, home: TemplateStore, node: Node) -> None:
    shutil.rmtree(Path(home.resolve(tools).lowers[0]).parent)
    with pytest.raises(WrongState, match="lacks its layer") as caught:
        await node.create(ask(template=tools))
    assert "add it again" in caught.value.hint
    importing.add(home, str(images.docker_archive()))
    sandbox = await node.create(ask(template=tools))
    await sandbox.destroy()


def test_what_a_start_does_not_depend_on(home: TemplateStore, tools: str, no_leaks: Leaks) -> None:
    """The second sandbox of a template lists and stats no more than layers and mount points: no walk."""
    root = ImageRoot(home, home.resolve(tools))
    root.skeleton(1000)
    seen = []
    real = os.scandir

    def scandir(path: object = ".") -> object:
        seen.append(path)
        return real(path)  # type: ignore[call-overload]

    os.scandir = scandir  # type: ignore[assignment]
    try:
        assert no_leaks.home is not None
        root.root(Filesystem(), 1000, Disk("tmpfs", MIB, 100), no_leaks.home)
    finally:
        os.scandir = real
    assert seen == []


# -- the command line


def test_the_command_line(no_leaks: Leaks) -> None:
    ringfence = Ringfence(no_leaks.env)
    archive = str(images.docker_archive())
    done = ringfence("template", "add", archive)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"tools:1  sha256:")
    assert b"unpacking layer 1 of 4" in done.stderr
    done = ringfence("template", "add", archive, "--name", "other", "--json")
    told = json.loads(done.stdout)
    assert told["layers_reused"] == 4 and done.stderr == b""
    done = ringfence("run", "--template", "tools:1")
    assert (done.returncode, done.stdout) == (0, b"hello there in /srv/work\n")
    done = ringfence("run", "-t", "other", "--json", "--", "cat", "/etc/keep/one")
    assert json.loads(done.stdout)["stdout"] == "changed\n"
    done = ringfence(
        "run", "-t", "other", "-w", "/tmp", "--env", "GREETING=bye", "--", "sh", "-c", "pwd; echo $GREETING"
    )
    assert done.stdout == b"/tmp\nbye\n"
    names = [each["name"] for each in json.loads(ringfence("template", "ls", "--json").stdout)["templates"]]
    assert names == ["other:latest", "tools:1"]
    shown = json.loads(ringfence("template", "show", "other", "--json").stdout)["template"]
    assert shown["config"]["env"]["GREETING"] == "hello there"
    assert len(shown["layers"]) == 4
    assert b"/bin/sh -c" in ringfence("template", "show", "tools:1").stdout
    done = ringfence("template", "rm", "tools:1")
    assert (done.returncode, done.stdout) == (0, b"tools:1\n")
    assert ringfence("run", "-t", "other", "--", "true").returncode == 0  # it shares all layers
    done = ringfence("run", "-t", "tools:1", "--", "true")
    assert done.returncode == 125 and b"no template 'tools:1'" in done.stderr
    done = ringfence("template", "rm", "other", "--json")
    assert json.loads(done.stdout)["freed"] > 1_000_000
    done = ringfence("template", "ls")
    assert b"no templates but `host`" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["add", "/nowhere/image.tar"], b"there is no /nowhere/image.tar"),
        (["add", "rootfs:/etc/passwd"], b"not a tar archive"),
        (["add", "debian:bookworm", "--name", "Not A Name"], b"no name of a template"),
        (["add", "debian:bookworm", "--name", "host"], b"a meaning of its own"),
        (["add", "debian:bookworm", "--max-size", "huge"], b"--max-size"),
        (["add"], b"SOURCE"),
        (["show", "nothing"], b"no template 'nothing'"),
        (["rm", "nothing"], b"no template 'nothing'"),
        (["rm", "host"], b"host can't be removed: it is this machine's own files"),
        (["warm", "nothing", "--runtime", "jail", "--runtime", "jial"], b"no runtime"),
        (["gc", "--budget", "much"], b"--budget"),
        (["sho"], b"did you mean show"),
        ([], b"VERB"),
    ],
)
def test_mistakes(no_leaks: Leaks, arguments: list[str], words: bytes) -> None:
    done = Ringfence(no_leaks.env)("template", *arguments)
    assert done.returncode == 125
    assert words in done.stderr, done.stderr
    assert b"Traceback" not in done.stderr
