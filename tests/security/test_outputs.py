"""What a hostile workload leaves for the host to read: names, links, marks, archives, many files."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ringfence
from ringfence.conformance.harness import python, request_for, run
from ringfence.guest.archives import extract_tar
from ringfence.guest.processes import ProcessSpec
from ringfence.node.sandboxes import NodeSandbox
from ringfence.node.service import Node
from security.stage import Stage

GIB = 1024**3
# Made inside, to be read from outside. {0} is a decoy of the host.
HOSTILE_TREE = """
import os, sys, socket
decoy = sys.argv[1]
os.makedirs("tree/sub"); os.chdir("tree")
for name in (b"new\\nline", b"x" * 255, b"\\xff\\xfe\\x80", b"-rf", b"\\x1b[2J", b" ", b"a\\\\b"):
    with open(name, "wb") as file: file.write(b"content")
for name, target in (
    ("to-file", decoy), ("to-folder", os.path.dirname(decoy)), ("climb", "../../../../../.." + decoy),
    ("root", "/"), ("loop", "loop"), ("self", "/proc/self/root"), ("zero", "/dev/zero"),
): os.symlink(target, name)
os.mkfifo("pipe"); s = socket.socket(socket.AF_UNIX); s.bind("socket")
open("suid", "w").close(); os.chmod("suid", 0o6777)
with open("sparse", "wb") as file: file.truncate(1 << 40)
for n in range(300):
    os.mkdir("d"); os.chdir("d")
"""


async def hostile(node: Node, wall: str, stage: Stage) -> NodeSandbox:
    sandbox = await node.create(request_for(wall))
    done = await python(await sandbox.link(), HOSTILE_TREE, stage.decoy)
    assert done.exit.code == 0, done.stderr
    return sandbox


async def test_the_list_of_changes_follows_nothing(wall: str, node: Node, stage: Stage) -> None:
    sandbox = await hostile(node, wall, stage)
    async with asyncio.timeout(60):
        changes = await sandbox.changes()
    secret = "sha256:" + hashlib.sha256(Path(stage.decoy).read_bytes()).hexdigest()
    found = {change.path.removeprefix("/workspace/tree/"): change for change in changes}
    assert secret not in {change.digest for change in changes}
    assert not any(stage.decoy in change.path for change in changes)
    for name in ("to-file", "to-folder", "climb", "root", "loop", "self", "zero"):
        assert (found[name].type, found[name].digest) == ("symlink", None)
    # gVisor keeps pipes and sockets in its own kernel: the host's layer never has them.
    for name in () if wall == "gvisor" else ("pipe", "socket"):
        assert (found[name].type, found[name].digest) == ("other", None)
    assert found["sparse"].digest is None  # a terabyte that takes no disk is not read
    assert {"new\nline", "x" * 255, os.fsdecode(b"\xff\xfe\x80"), "-rf", "\x1b[2J"} <= set(found)
    assert changes.cut  # the depth and the size that were cut off are said
    await sandbox.destroy()


async def test_changes_of_a_folder_that_turns_into_a_link(wall: str, node: Node, stage: Stage) -> None:
    """The workload swaps a folder and a symlink to the host's secrets while the host walks."""
    sandbox = await node.create(request_for(wall))
    link = await sandbox.link()
    code = (
        "import os,sys\nos.mkdir('d'); open('d/secret','w').write('mine')\nos.symlink(sys.argv[1],'link')\n"
        "print('ready',flush=True)\n"
        "while True:\n"
        " os.rename('d','aside'); os.rename('link','d'); os.rename('d','link'); os.rename('aside','d')"
    )
    folder = str(Path(stage.decoy).parent)
    process = await link.start(ProcessSpec(("/usr/bin/python3", "-I", "-S", "-c", code, folder)))
    async for _ in process:
        break
    secret = "sha256:" + hashlib.sha256(Path(stage.decoy).read_bytes()).hexdigest()
    for _ in range(100):
        assert secret not in {change.digest for change in await sandbox.changes()}
    await sandbox.destroy()


@pytest.mark.parametrize("user", [1000, 0])
async def test_forged_marks_do_not_change_what_is_reported(node: Node, user: int) -> None:
    """An opaque mark that the workload sets on a folder must not report the system's files as deleted."""
    sandbox = await node.create(request_for("jail", user=user))
    link = await sandbox.link()
    code = (
        "import os\nos.makedirs('/tmp/x', exist_ok=True)\nput=0\n"
        "for folder in ('/etc', '/home/agent', '/tmp', '/tmp/x'):\n"
        " for name in ('opaque', 'whiteout', 'redirect'):\n"
        "  for prefix in ('user.overlay.', 'user.overlay.overlay.', 'trusted.overlay.'):\n"
        "   try: os.setxattr(folder, prefix + name, b'y'); put+=1\n"
        "   except OSError: pass\n"
        "print(put)"
    )
    before = await run(link, "ls", "/etc")
    done = await python(link, code, as_root=user == 0)
    assert int(done.text) > 0, "no mark could be set: the attack was none"
    after = await run(link, "ls", "/etc")
    assert after.stdout == before.stdout != b""
    assert [change for change in await sandbox.changes() if change.kind == "deleted"] == []
    await sandbox.destroy()


async def test_a_hostile_tree_comes_out_harmless(wall: str, node: Node, stage: Stage, tmp_path: Path) -> None:
    sandbox = await hostile(node, wall, stage)
    link = await sandbox.link()
    await link.files.remove("tree/sparse")
    await run(link, "rm", "-rf", "tree/d")
    target = tmp_path / "out"
    result = await extract_tar(link.files.tar_out("tree"), target)
    assert result.skipped_count > 0
    for base, folders, files in os.walk(target):
        for name in folders + files:
            path = os.path.join(base, name)
            status = os.lstat(path)
            assert status.st_mode & 0o6000 == 0, "a set-user-ID bit came out"
            assert os.path.realpath(os.path.dirname(path)).startswith(str(target.resolve()))
            if os.path.islink(path):
                assert os.path.realpath(path).startswith(str(target.resolve()))
    assert not (target / "to-file").is_symlink()
    assert Path(stage.decoy).read_text().strip() == stage.marker
    await sandbox.destroy()


@pytest.mark.parametrize("trap", ["link-to-folder", "link-to-file", "link-before", "link-in-name"])
async def test_zip_slip_on_out(
    wall: str, trap: str, attack_state: Path, stage: Stage, tmp_path: Path
) -> None:
    """``run --out``: what the workload puts there lands in the folder that was named, or nowhere."""
    outside, out = tmp_path / "outside", tmp_path / "out"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    script = {
        "link-to-folder": f"mkdir r; ln -s {outside} r/evil; ln -s {stage.decoy} r/decoy",
        "link-to-file": f"ln -s {stage.decoy} r",
        "link-before": f"mkdir -p s/evil; echo slipped > s/evil/precious; ln -s s r; ln -s {outside} s/x",
        "link-in-name": f"ln -s {outside} up; mkdir r; ln -s ../../../../..{outside} r/evil; ln -s / r/x",
    }[trap]
    argv = ["run", "--runtime", wall, "--out", f"/workspace/r:{out}", "--", "sh", "-c", script]
    source = str(Path(ringfence.__file__).parents[1])
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "ringfence", *argv],
        env={**os.environ, "RINGFENCE_HOME": str(attack_state), "PYTHONPATH": source},
        capture_output=True,
        timeout=60,
        check=False,
    )  # fmt: skip
    assert (outside / "precious").read_text() == "precious"
    assert sorted(os.listdir(outside)) == ["precious"]
    found = [out, *out.rglob("*")] if out.exists() or out.is_symlink() else []
    for path in found:
        if path.is_symlink():
            assert str(path.resolve()).startswith(str(out.resolve())), done.stderr
        elif path.is_file():
            assert stage.marker not in path.read_text(), "a secret of the host came out"


async def test_a_hundred_thousand_files(node: Node) -> None:
    sandbox = await node.create(request_for("jail", memory=2 * GIB, disk=GIB))
    link = await sandbox.link()
    code = (
        "import os\nos.mkdir('many')\nfd=os.open('many',os.O_RDONLY)\n"
        "for n in range(100_000): os.close(os.open(f'f{n}', os.O_CREAT|os.O_WRONLY, dir_fd=fd))\nprint(n)"
    )
    done = await python(link, code)
    assert done.text == "99999", done.stderr
    changes = await sandbox.changes()
    assert sum(change.path.startswith("/workspace/many/") for change in changes) == 100_000
    assert len(await link.files.list("many")) == 100_000
    assert len(await link.files.list("many", limit=1000)) <= 1000
    await sandbox.destroy()
    assert not sandbox.journal.folder.exists() or not any(sandbox.journal.folder.iterdir())
