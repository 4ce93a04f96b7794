"""Images made by real tools: busybox from Debian, layers by umoci, other forms by skopeo. Once a user.

The image ``tools:1`` has four layers: programs; a folder with files; a deleted file; a folder replaced whole.
"""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

VERSION = "5"  # raise when what is made changes


def need(*programs: str) -> None:
    """Skip where a program is missing, and say which."""
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


# Shared by sessions. A session as a normal user is told where root's are, and reads them.
FOLDER = Path(
    os.environ.get("RINGFENCE_TEST_IMAGES") or f"{tempfile.gettempdir()}/ringfence-test-images-{os.geteuid()}"
)


def busybox() -> Path:
    """A root file system as a tar: a static busybox from Debian with its applets, and three accounts."""
    need("mmdebstrap")
    return _once("busybox.tar", _make_busybox)


def layout() -> Path:
    """The image ``tools:1`` as a folder in OCI's layout, its tag ``1``."""
    need("mmdebstrap", "umoci")
    return _once("layout", _make_layout)


def docker_archive() -> Path:
    """The same image as ``docker save`` writes it, named ``tools:1``."""
    need("skopeo")
    source = layout()
    return _once("docker.tar", lambda path: _copy(f"oci:{source}:1", f"docker-archive:{path}:tools:1"))


def oci_archive() -> Path:
    """The same image as an OCI archive."""
    need("skopeo")
    source = layout()
    return _once("oci.tar", lambda path: _copy(f"oci:{source}:1", f"oci-archive:{path}:1"))


def zstd_layout() -> Path:
    """The same image with layers compressed by zstd."""
    need("skopeo", "zstd")
    source = layout()

    def make(path: Path) -> None:
        _copy(
            f"oci:{source}:1", f"oci:{path}:1", "--dest-compress-format=zstd", "--dest-compress-level=3",
            "--dest-compress", "--dest-decompress=false",
        )  # fmt: skip

    return _once("zstd", make)


_SKIPPED: dict[str, str] = {}


def _once(name: str, make: object) -> Path:
    if name in _SKIPPED:
        pytest.skip(_SKIPPED[name])
    place = FOLDER / f"{VERSION}-{name}"
    if place.exists():
        return place
    FOLDER.mkdir(exist_ok=True)
    FOLDER.chmod(0o755)
    with open(FOLDER / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # sessions at the same time
        if not place.exists():
            aside = FOLDER / f".new-{name}"
            _remove(aside)
            try:
                make(aside)  # type: ignore[operator]
            except pytest.skip.Exception as reason:  # finding that out may take half a minute: once will do
                _SKIPPED[name] = str(reason.msg)
                raise
            call("chmod", "-R", "a+rX", aside)
            os.rename(aside, place)
    return place


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def call(*argv: str | Path) -> str:
    """A program that must work; its words otherwise."""
    done = subprocess.run(
        [str(word) for word in argv], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=110
    )
    assert done.returncode == 0, f"{argv}: {done.stderr[-2000:]}"
    return done.stdout


def _copy(source: str, target: str, *options: str) -> None:
    call("skopeo", "copy", "--quiet", *options, source, target)


def _make_busybox(path: Path) -> None:
    with tempfile.TemporaryDirectory() as work:
        tar = f"{work}/extracted.tar"
        done = subprocess.run(
            [
                "mmdebstrap", "--quiet", "--variant=extract", "--include=busybox-static", "--format=tar",
                "bookworm", tar,
            ],
            capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=110,
        )  # fmt: skip
        if done.returncode:
            pytest.skip(f"no packages of Debian can be had here: {done.stderr[-300:]}")
        with tarfile.open(tar) as archive:
            member = archive.extractfile("./bin/busybox")
            assert member is not None
            program = member.read()
        busy = Path(work, "busybox")  # it looks at its name
        busy.write_bytes(program)
        busy.chmod(0o755)
        applets = call(busy, "--list").split()
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name, mode in (
            ("bin", 0o755), ("etc", 0o755), ("etc/keep", 0o755), ("tmp", 0o1777), ("usr", 0o755),
            ("usr/bin", 0o755), ("root", 0o700), ("home", 0o755), ("home/app", 0o755), ("var", 0o755),
            ("var/lib", 0o755), ("var/lib/old", 0o755),
        ):  # fmt: skip
            owner = 1234 if name == "home/app" else 0
            add(archive, name, kind=tarfile.DIRTYPE, mode=mode, uid=owner, gid=owner)
        add(archive, "bin/busybox", program, mode=0o755)
        for applet in sorted(set(applets) - {"busybox"}):
            add(archive, f"bin/{applet}", kind=tarfile.SYMTYPE, link="busybox")
        accounts = "root:x:0:0:root:/root:/bin/sh\napp:x:1234:1234::/home/app:/bin/sh\n"
        add(archive, "etc/passwd", accounts.encode())
        add(archive, "etc/group", b"root:x:0:\napp:x:1234:\n")
        add(archive, "etc/gone", b"a later layer deletes this\n")
        add(archive, "etc/keep/one", b"one\n")
        add(archive, "home/app/owned", b"app's\n", uid=1234, gid=1234, mode=0o600)
        add(archive, "var/lib/old/below", b"a later layer hides this\n")


def _make_layout(path: Path) -> None:
    rootless = ["--rootless"] if os.geteuid() else []
    with tempfile.TemporaryDirectory() as work:
        base, more = Path(work, "base"), Path(work, "more")
        base.mkdir()
        more.mkdir()
        command = ["tar", "-C", str(base), "-xf", str(busybox())]
        subprocess.run(command, check=True, timeout=60)
        image = f"{path}:1"
        call("umoci", "init", "--layout", path)
        call("umoci", "new", "--image", image)
        call("umoci", "insert", *rootless, "--image", image, base, "/")
        (more / "hello").write_text("hello from the second layer\n")
        (more / "one").write_text("changed\n")
        call("umoci", "insert", *rootless, "--image", image, more, "/etc/keep")
        call("umoci", "insert", "--image", image, "--whiteout", "/etc/gone")
        (more / "one").unlink()
        call("umoci", "insert", *rootless, "--image", image, "--opaque", more, "/var/lib/old")
        call(
            "umoci", "config", "--image", image, "--config.env", "GREETING=hello there", "--config.env",
            "HOME=/home/app", "--config.user", "app", "--config.workingdir", "/srv/work",
            "--config.entrypoint", "/bin/sh", "--config.entrypoint=-c",
            "--config.cmd", "echo $GREETING in $(pwd)", "--config.label", "made.by=umoci",
        )  # fmt: skip
        call("umoci", "gc", "--layout", path)


def add(
    archive: tarfile.TarFile,
    name: str,
    data: bytes = b"",
    *,
    kind: bytes = tarfile.REGTYPE,
    mode: int = 0o644,
    uid: int = 0,
    gid: int = 0,
    link: str = "",
    pax: dict[str, str] | None = None,
    device: tuple[int, int] = (0, 0),
) -> None:
    """One entry of a tar of the test's own."""
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.uid, entry.gid, entry.linkname = kind, mode, uid, gid, link
    entry.size, entry.mtime = len(data), 1_700_000_000
    entry.devmajor, entry.devminor = device
    entry.pax_headers = pax or {}
    archive.addfile(entry, io.BytesIO(data) if data else None)


def tar_of(entries: Iterable[tuple[str, dict[str, object]]]) -> bytes:
    """A tar with these entries, in this order: names and :func:`add`'s words."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, words in entries:
            add(archive, name, **words)  # type: ignore[arg-type]
    return out.getvalue()
