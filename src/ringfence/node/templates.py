"""The built-in ``host`` template: the host's programs, and nothing else of the host.

The root is an overlay whose lower layer is a *skeleton*: empty folders, a minimal private ``/etc`` and the
symlinks of a merged /usr. Over it lie read-only binds of ``/usr`` (and ``/opt``, and ``/lib*`` where they
are folders). They are not idmapped: their owner is nobody inside, so that even root of a sandbox, or a stolen
guest agent with its capabilities, reads there only what every user of the host may read.

``/etc`` is written from scratch but for a list of files that software needs and that hold no secrets
(``COPIED``): of those only what the host lets everybody read. The skeleton's name has a digest over where it
came from (names, times and sizes: a fraction of a millisecond), so a changed host makes a new one.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import os
import stat
import time
from pathlib import Path

from ringfence.model.errors import InvalidRequest
from ringfence.model.policy import Filesystem, Mount
from ringfence.node.state import StateRoot
from ringfence.node.troubles import host_limit
from ringfence.runtimes.contract import AGENT_UID, Bind, Disk, RootFs

FORMAT = "2"  # raise when the skeleton's content changes
LARGEST = 16 << 20  # bytes of one copied file
COPIED = (
    "alternatives",
    "bash.bashrc",
    "crypto-policies",
    "debian_version",
    "fonts",
    "gai.conf",
    "host.conf",
    "inputrc",
    "java-*",
    "ld-musl-*.path",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "magic",
    "magic.mime",
    "mime.types",
    "networks",
    "os-release",
    "pki/ca-trust/extracted",
    "pki/tls/cert.pem",
    "pki/tls/certs",
    "pki/tls/openssl.cnf",
    "protocols",
    "python3*",
    "rpc",
    "services",
    "shells",
    "ssl/cert.pem",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
)
_FOLDERS = {
    ".ringfence": 0o700, "dev": 0o755, "etc": 0o755, "etc/ssl": 0o755, "home": 0o755, "media": 0o755,
    "mnt": 0o755, "opt": 0o755, "proc": 0o555, "root": 0o700, "run": 0o755, "run/lock": 0o1777,
    "run/secrets": 0o755, "srv": 0o755, "sys": 0o555, "tmp": 0o1777, "usr": 0o755, "var": 0o755,
    "var/cache": 0o755, "var/lib": 0o755, "var/log": 0o755, "var/spool": 0o755, "var/tmp": 0o1777,
}  # fmt: skip
_PRIVATE = ("/.ringfence", "/dev", "/proc", "/sys", "/run/secrets", "/etc/passwd", "/etc/group")
WRITABLE = ("/workspace", "/tmp", "/var/tmp", "/home/agent")  # noqa: S108
_EVERYBODY = 0o755
_CHECK_EVERY = 5.0  # seconds: how long a changed host may go unnoticed


class HostTemplate:
    """Makes root file systems from this host. One per node; keeps what it found for a few seconds."""

    digest = "host"  # the name that requests have for it

    def __init__(self, state: StateRoot) -> None:
        self._state = state
        self._known: dict[int, tuple[float, str]] = {}
        self._roots: dict[tuple[Filesystem, int, Disk], tuple[str, RootFs]] = {}
        self._binds: tuple[str, tuple[Bind, ...]] | None = None

    def skeleton(self, user: int) -> str:
        """The lower layer for sandboxes whose workload is ``user``; made if missing.

        Raises:
            HostLimit: the disk is full, or the folder can't be written.
        """
        now = time.monotonic()
        known = self._known.get(user)
        if known is not None and now - known[0] < _CHECK_EVERY:
            return known[1]
        folder = self._state.templates / f"host-{digest(user)}"
        if not folder.is_dir():
            self._build(folder, user)
        self._known[user] = (now, str(folder))
        return str(folder)

    def root(self, files: Filesystem, user: int, disk: Disk, folder: Path) -> RootFs:
        """The whole root file system of one sandbox; mount points that it alone needs go to ``folder``.

        Raises:
            InvalidRequest: a mount's source can't be read, or its target can't be had.
            HostLimit: the disk is full, or the folder can't be written.
        """
        skeleton = self.skeleton(user)
        binds = [*self._system_binds(skeleton)]
        usual = self._roots.get((files, user, disk))
        if usual is not None and usual[0] == skeleton:
            _add_mounts(binds, files)  # they are judged each time, and give the same or an error
            return usual[1]
        lowers: tuple[str, ...] = (skeleton,)
        extra = [p for p in (*files.read_write, *files.read_only) if not os.path.lexists(skeleton + p)]
        if files.mounts or extra:
            for path in (*files.read_write, *files.read_only):
                check_target(path, "path")
            _add_mounts(binds, files)
            try:
                points = _points(folder, skeleton, binds, files, user)
            except OSError as error:
                raise host_limit(error, f"make mount points in {folder}") from error
            if points is not None:
                lowers = (points, skeleton)
        made = RootFs(
            lowers=lowers,
            binds=tuple(binds),
            disk=disk,
            readonly=files.root == "readonly",
            writable=tuple(dict.fromkeys((*WRITABLE, *files.read_write))),
            read_write=files.read_write,
            read_only=files.read_only,
        )
        # Nothing in it is this sandbox's alone.
        if len(lowers) == 1 and disk.kind == "tmpfs":
            self._roots = {(files, user, disk): (skeleton, made)}
        return made

    def _system_binds(self, skeleton: str) -> tuple[Bind, ...]:
        # Looked up as often as the skeleton is, whose digest tells of a change.
        if self._binds is None or self._binds[0] != skeleton:
            self._binds = (skeleton, system_binds())
        return self._binds[1]

    def _build(self, folder: Path, user: int) -> None:
        import shutil  # late: built once a host, and `ringfence run` starts sooner without it

        work = self._state.templates / f".{folder.name}.{self._state.owner}"
        try:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(0o755)
            work.chmod(0o755)
            _fill(work, user)
            try:
                os.rename(work, folder)
            except OSError as error:  # another node was faster
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
        except OSError as error:
            raise host_limit(error, f"make the host template in {folder}") from error
        finally:
            if work.exists():
                shutil.rmtree(work, ignore_errors=True)


def digest(user: int, etc: str = "/etc") -> str:
    """16 hex digits over what the skeleton is made from."""
    found = hashlib.sha256(f"{FORMAT} {user} {os.geteuid()}".encode())
    for path in (*_sources(etc), "/opt", *_system_folders()):
        try:
            info = os.lstat(path)
        except OSError:
            continue
        link = os.readlink(path) if stat.S_ISLNK(info.st_mode) else ""
        found.update(f"{path}\0{link}\0{info.st_mode}\0{info.st_mtime_ns}\0{info.st_size}\n".encode())
    return found.hexdigest()[:16]


def system_binds() -> tuple[Bind, ...]:
    """The host's program folders, read-only."""
    folders = [path for path in ("/usr", "/opt", *_system_folders()) if _is_folder(path)]
    return tuple(Bind(path, path) for path in folders)


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _system_folders() -> list[str]:
    return ["/bin", "/sbin", *sorted("/" + name for name in os.listdir("/") if name.startswith("lib"))]


def _sources(etc: str) -> list[str]:
    found = []
    for name in COPIED:
        if "*" in name:
            found += sorted(glob.glob(f"{etc}/{name}"))
        else:
            found.append(f"{etc}/{name}")
    return found


def _fill(root: Path, user: int) -> None:
    for name, mode in _FOLDERS.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name).chmod(mode)
    for name in ("home/agent", "workspace"):
        (root / name).mkdir(0o755)
        (root / name).chmod(0o755)
        if os.geteuid() == 0:
            os.chown(root / name, user, user)
    for path in _system_folders():
        inside = root / path.lstrip("/")
        if os.path.islink(path):
            os.symlink(os.readlink(path), inside)
        elif _is_folder(path):
            inside.mkdir(0o755)
    os.symlink("/run", root / "var/run")
    os.symlink("/run/lock", root / "var/lock")
    os.symlink("/proc/self/mounts", root / "etc/mtab")
    os.symlink("/usr/share/zoneinfo/UTC", root / "etc/localtime")
    for source in _sources("/etc"):
        _copy(source, root / source.lstrip("/"))
    for name, text in _etc(user).items():
        file = root / "etc" / name
        file.unlink(missing_ok=True)
        file.write_text(text)
        file.chmod(0o644)


def _etc(user: int) -> dict[str, str]:
    shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
    passwd = [f"root:x:0:0:root:/root:{shell}"]
    group = ["root:x:0:"]
    # User 0 is called root, whatever else it is called.
    number = user or 1000
    passwd.append(f"agent:x:{number}:{number}:agent:/home/agent:{shell}")
    group.append(f"agent:x:{number}:")
    passwd.append(f"ringfence:x:{AGENT_UID}:{AGENT_UID}:guest agent:/:/usr/sbin/nologin")
    group.append(f"ringfence:x:{AGENT_UID}:")
    passwd.append("nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin")
    group += ["tty:x:5:", "nogroup:x:65534:"]
    return {
        "passwd": "\n".join(passwd) + "\n",
        "group": "\n".join(group) + "\n",
        "hosts": "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n",
        "hostname": "sandbox\n",
        "resolv.conf": "# no network: names are resolved by the egress door, where there is one\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nnetworks: files\n"
        "protocols: files\nservices: files\nethers: files\nrpc: files\n",
        "profile": 'if [ -z "$PATH" ]; then export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin'
        ":/sbin:/bin; fi\n",
        "machine-id": "",
        "timezone": "Etc/UTC\n",
        "fstab": "",
    }


def _copy(source: str, target: Path) -> None:
    """What everybody may read, symlinks as they are, owners and times forgotten."""
    try:
        info = os.lstat(source)
    except OSError:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(source), target)
    elif stat.S_ISDIR(info.st_mode):
        if info.st_mode & 0o005 != 0o005:
            return
        target.mkdir(exist_ok=True)
        target.chmod(0o755)
        for name in os.listdir(source):
            _copy(f"{source}/{name}", target / name)
    elif stat.S_ISREG(info.st_mode) and info.st_mode & 0o004 and info.st_size <= LARGEST:
        import shutil

        with contextlib.suppress(PermissionError):
            shutil.copyfile(source, target)
            target.chmod(0o755 if info.st_mode & 0o111 else 0o644)


def check_target(path: str, what: str) -> None:
    """Refuse what can't be a path of the policy inside.

    Raises:
        InvalidRequest: not absolute, not normal, or Ringfence's own.
    """
    # normpath leaves two leading slashes as they are: POSIX lets them mean something else.
    well_formed = path.startswith("/") and not path.startswith("//") and os.path.normpath(path) == path
    if not well_formed or path == "/" or "\0" in path:
        raise InvalidRequest(
            f"{what} {path!r} must be an absolute path inside, without .. and not / itself",
            hint="as in /data",
        )
    for private in _PRIVATE:
        if path == private or path.startswith(private + "/"):
            raise InvalidRequest(f"{what} {path} lies in {private}, which Ringfence keeps for itself")


def bind(mount: Mount, below: list[Bind]) -> Bind:
    """A mount of the policy, its source judged; ``below``: what is bound before it.

    Raises:
        InvalidRequest: the source can't be read or is no file or folder, or the target can't be had.
    """
    check_target(mount.target, "mount target")
    try:
        source = os.path.realpath(mount.source, strict=True)
        info = os.stat(source)
    except OSError as error:
        raise InvalidRequest(
            f"can't mount {mount.source}: {os.strerror(error.errno or 0)}", hint="give a path that exists"
        ) from error
    if source != os.path.normpath(mount.source):
        # Whoever judged the source judged a real path; if it leads elsewhere now, somebody has turned it.
        raise InvalidRequest(
            f"can't mount {mount.source}: it leads through a symbolic link to {source}",
            hint="name the place itself",
        )
    folder = stat.S_ISDIR(info.st_mode)
    if not (folder or stat.S_ISREG(info.st_mode)):
        raise InvalidRequest(
            f"can't mount {mount.source}: it is neither a file nor a folder",
            hint="devices and sockets of the host stay outside",
        )
    if os.geteuid() == 0:
        # As root the workload is a user of its own on the host: it has what the mode gives to others.
        need = (0o005 if folder else 0o004) | (0 if mount.read_only else 0o002)
        if info.st_mode & need != need:
            wish = ("rx" if folder else "r") + ("" if mount.read_only else "w")
            raise InvalidRequest(
                f"the sandbox's user can't {'read' if mount.read_only else 'write'} {mount.source}: "
                "it is none of the host's users, so the mode's last digit counts",
                hint=f"chmod o+{wish} {mount.source}",
            )
    elif not os.access(source, os.R_OK | (os.X_OK if folder else 0)):
        raise InvalidRequest(f"can't read {mount.source}: permission denied", hint="give a path you may read")
    outer = [b for b in below if mount.target.startswith(b.target + "/")]
    if outer:
        closest = max(outer, key=lambda b: len(b.target))
        point = closest.source + mount.target[len(closest.target) :]
        if _is_folder(point) != folder or not os.path.lexists(point):
            raise InvalidRequest(
                f"can't mount at {mount.target}: {closest.target} inside is the host's {closest.source}, "
                f"and there is no such {'folder' if folder else 'file'} in it to mount on",
                hint=f"choose a target outside {closest.target}",
            )
    return Bind(source, mount.target, read_only=mount.read_only)


def _add_mounts(binds: list[Bind], files: Filesystem) -> None:
    for mount in files.mounts:
        binds.append(bind(mount, binds))


def own_layer(folder: Path) -> Path:
    """A new layer of the sandbox in ``folder``, with mount points and folders of the sandbox's user.

    Nobody else passes through to it: that user's number may be somebody's of this host.
    """
    above = folder / "points"
    above.mkdir(0o700)
    layer = above / "fs"
    layer.mkdir(0o755)
    layer.chmod(0o755)
    return layer


def _points(folder: Path, skeleton: str, binds: list[Bind], files: Filesystem, user: int) -> str | None:
    """A layer with what this sandbox has to mount on, and the policy's folders that the skeleton lacks.

    None if the skeleton lacks nothing.
    """
    targets = [b.target for b in binds]
    wanted: dict[str, tuple[bool, int]] = {}  # path → (is a folder, owner)
    for path in files.read_only:
        wanted[path] = (True, 0)
    for path in files.read_write:
        wanted[path] = (True, user)
    for bind in binds[len(binds) - len(files.mounts) :]:
        wanted[bind.target] = (os.path.isdir(bind.source), 0)
    missing = {
        path: how
        for path, how in wanted.items()
        if not (os.path.lexists(skeleton + path) or any(path.startswith(t + "/") for t in targets))
    }
    if not missing:
        return None
    layer = own_layer(folder)
    for path, (is_folder, owner) in missing.items():
        _parents(layer, skeleton, path)
        inside = f"{layer}{path}"
        if os.path.lexists(inside):
            continue
        if is_folder:
            os.mkdir(inside, 0o755)
            os.chmod(inside, _EVERYBODY)
        else:
            os.close(os.open(inside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        if os.geteuid() == 0 and owner:
            os.chown(inside, owner, owner)
    return str(layer)


def _parents(layer: Path, skeleton: str, path: str) -> None:
    parts = path.strip("/").split("/")[:-1]
    here = ""
    for part in parts:
        here += "/" + part
        inside = f"{layer}{here}"
        if os.path.lexists(inside):
            continue
        os.mkdir(inside, 0o755)
        # The topmost layer decides a folder's mode and owner: repeat the skeleton's.
        try:
            info = os.lstat(skeleton + here)
        except OSError:
            os.chmod(inside, _EVERYBODY)
            continue
        if stat.S_ISLNK(info.st_mode):
            raise InvalidRequest(
                f"{path} goes through the symlink {here} of the template", hint="name the real path"
            )
        os.chmod(inside, stat.S_IMODE(info.st_mode))
        if os.geteuid() == 0:
            os.chown(inside, info.st_uid, info.st_gid)
