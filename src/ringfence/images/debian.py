"""Debian from its packages, with mmdebstrap: a root file system as a tar stream.

mmdebstrap unpacks in a folder of ours in TMPDIR, which we hold locked. Whoever finds one that is not locked
knows that its maker is dead: :func:`abandoned`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ringfence.images.manifests import machine
from ringfence.images.removing import remove_tree
from ringfence.model.errors import HostLimit, InvalidRequest, RuntimeUnavailable

_PACKAGE = re.compile(r"[a-z0-9][a-z0-9.+-]*(?::[a-z0-9]+)?", re.ASCII)
VARIANTS = ("minbase", "apt", "essential", "extract")
_PREFIX = "ringfence-debian-"
_MOST_TRIES = 10  # while a collection takes what we have just made
_MOST_WORDS = 64 << 10  # bytes of what mmdebstrap said that are kept


class Built:
    """The stream, and how it ended. Read it to its end, then :meth:`check`."""

    def __init__(self, process: subprocess.Popen[bytes], words: IO[bytes], suite: str) -> None:
        self._process = process
        self._words = words
        self._suite = suite
        self._any = False

    def read(self, size: int) -> bytes:
        """See ``tarstream.Readable``.

        Raises:
            HostLimit: nothing came at all; the message has mmdebstrap's words.
        """
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if not data and not self._any:
            self.check()
        self._any = True
        return data

    def check(self) -> None:
        """Raise if mmdebstrap did not finish well.

        Raises:
            HostLimit: see there.
        """
        if self._process.wait() == 0:
            return
        self._words.seek(max(0, self._words.seek(0, os.SEEK_END) - _MOST_WORDS))
        lines = self._words.read().decode(errors="replace").splitlines()
        told = [line for line in lines if line.startswith(("E:", "W:", "Err:"))] or lines[-3:]
        raise HostLimit(
            f"mmdebstrap could not make {self._suite}: {'; '.join(told[-3:]) or 'it does not say why'}",
            hint=_remedy(told),
        )


def _remedy(told: list[str]) -> str:
    if any("/etc/subuid" in line for line in told):
        return "give this user ids in /etc/subuid and /etc/subgid (usermod --add-subuids), or do it as root"
    return "see if the suite exists and the mirror can be reached: --mirror URL names another"


@contextlib.contextmanager
def build(
    suite: str,
    *,
    packages: tuple[str, ...] = (),
    mirror: str = "",
    epoch: int | None = None,
    variant: str = "minbase",
) -> Iterator[Built]:
    """Run mmdebstrap for a minimal Debian with some packages on top.

    ``variant``: how much of Debian, in mmdebstrap's words (``VARIANTS``).
    ``epoch``: no file is younger than that (SOURCE_DATE_EPOCH): two builds from the same mirror are the same
    to the byte. Default: the environment's SOURCE_DATE_EPOCH, else the start of this day.

    Raises:
        RuntimeUnavailable: mmdebstrap is not here.
        InvalidRequest: a package's name is none.
    """
    program = shutil.which("mmdebstrap")
    if program is None:
        raise RuntimeUnavailable(
            "Debian's root file systems are made with mmdebstrap, which is not here",
            hint="apt-get install mmdebstrap",
        )
    for package in packages:
        if not _PACKAGE.fullmatch(package):
            raise InvalidRequest(
                f"{package!r} is no name of a Debian package", hint="as in --package python3"
            )
    if epoch is None:
        epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or time.time() // 86400 * 86400)
    bound, mode = _bound()
    argv = [
        *bound, program, "--quiet", f"--variant={variant}", "--format=tar", f"--architectures={machine()}",
        *([f"--include={','.join(packages)}"] if packages else []),
        f"--mode={mode}",
        '--aptopt=Acquire::Languages "none"', suite, "-",
        *([mirror] if mirror else _mirrors(suite)),
    ]  # fmt: skip
    env = os.environ | {"SOURCE_DATE_EPOCH": str(epoch), "LC_ALL": "C.UTF-8"}
    with tempfile.TemporaryFile() as words, _place() as place:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=words,
            env=env | {"TMPDIR": str(place)},
            start_new_session=True,
        )
        try:
            yield Built(process, words, suite)
        finally:
            assert process.stdout is not None
            process.stdout.close()
            if process.poll() is None:
                # All of it, or it would wait for what it has begun before it cleans up. Its folder and mounts
                # are gone when it is.
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


@contextlib.contextmanager
def _place() -> Iterator[Path]:
    """A folder for mmdebstrap's work, locked for as long as we live. Removed afterwards, with what is in it.

    Raises:
        HostLimit: it can't be made.
    """
    lock = None
    for _ in range(_MOST_TRIES):
        try:
            place = Path(tempfile.mkdtemp(prefix=_PREFIX))
            place.chmod(0o755)  # mmdebstrap's own steps have other ids
        except OSError as error:
            raise HostLimit(
                f"no folder in {tempfile.gettempdir()}: {error.strerror}", hint="set TMPDIR to another place"
            ) from error
        lock = _lock(place)
        if lock is not None:
            break  # nobody has taken us for dead between the two calls
    if lock is None:
        raise HostLimit(f"folders in {tempfile.gettempdir()} can't be locked", hint="set TMPDIR to another")
    try:
        yield place
    finally:
        with contextlib.suppress(OSError):  # what stays is found by the next collection
            remove(place)
        os.close(lock)


def abandoned() -> Iterator[tuple[Path, int]]:
    """Folders of makers that are dead, with a descriptor that keeps others away; the caller closes it."""
    for name in sorted(glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), _PREFIX + "*"))):
        lock = _lock(Path(name))
        if lock is not None:
            yield Path(name), lock


def remove(place: Path) -> None:
    """Remove such a folder. A normal user's has files of ids that only a user namespace can touch.

    Raises:
        OSError: something can't be removed, or is mounted there: it may be the host's own.
    """
    if _has_mounts(place):
        raise OSError(errno.EBUSY, "something is mounted in it", str(place))
    try:
        remove_tree(place)
    except PermissionError:
        inside = ["unshare", "--user", "--map-root-user", "--map-auto", "--"]
        done = subprocess.run(
            [*inside, "rm", "--recursive", "--force", "--one-file-system", "--", str(place)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
        if done.returncode:
            raise


def _has_mounts(place: Path) -> bool:
    inside = os.path.realpath(place) + "/"
    with open("/proc/self/mountinfo", errors="surrogateescape") as file:
        return any(line.split()[4].startswith(inside) for line in file)


def _lock(place: Path) -> int | None:
    """A descriptor of the folder that nobody else has locked; None if somebody has, or if it isn't ours."""
    try:
        lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen, there = os.fstat(lock), os.lstat(place)
        # Everybody may make folders of that name in /tmp: theirs are theirs.
        if seen.st_uid == os.geteuid() and (seen.st_dev, seen.st_ino) == (there.st_dev, there.st_ino):
            return lock
    except OSError:
        pass
    os.close(lock)
    return None


def _bound() -> tuple[list[str], str]:
    """What a command line is put after, so that it ends with the thread that began it, even if we are killed.

    All that it begins ends with it, with its mounts: they have namespaces of their own. The shell is there to
    be their first process, which has to reap what others leave, and gets no signal by default. Also tells
    mmdebstrap's mode: it is root there. For a normal user who can't have such namespaces (no subordinate ids,
    or util-linux before 2.38) mmdebstrap makes its own or says what is missing; it alone ends with us then.
    """
    ends_with_us = ["setpriv", "--pdeathsig", "KILL", "--"]
    user = ["--user", "--map-root-user", "--map-auto"] if os.geteuid() else []
    if user and not _works(["unshare", *user, "--", "true"]):
        return ends_with_us, "unshare"
    apart = ["unshare", *user, "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--"]
    return [*ends_with_us, *apart, "sh", "-c", '"$@"; exit $?', "sh"], "root"


def _works(argv: list[str]) -> bool:
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0
    except OSError:
        return False


def _mirrors(suite: str) -> list[str]:
    """Where this host gets the suite from, if it does; else mmdebstrap knows Debian's own mirror."""
    for path in sorted(glob.glob("/etc/apt/sources.list.d/*.sources")):
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            for part in re.split(r"\n\s*\n", file.read()):
                lines = [line.partition(":") for line in part.splitlines()]
                fields = {name.strip().lower(): value.strip() for name, _, value in lines}
                if suite in fields.get("suites", "").split() and fields.get("uris"):
                    return [f"deb {fields['uris'].split()[0]} {suite} main"]
    for path in ("/etc/apt/sources.list", *sorted(glob.glob("/etc/apt/sources.list.d/*.list"))):
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                found = re.match(rf"deb\s+(?:\[[^\]]*\]\s+)?(\S+)\s+{re.escape(suite)}\s", line)
                if found:
                    return [f"deb {found[1]} {suite} main"]
    return []
