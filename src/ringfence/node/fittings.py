"""What a sandbox needs on top of a template: mount points, an account for the workload, some files of /etc.

The *fittings* are one thin layer above the template's own, made once for a template and a user. The template
is hostile: its ``/proc`` may be a link, its ``/etc`` may lead anywhere. So the layer is a new tree of real
folders, computed from what the layers would show (``images.merged``), and nothing of the template is ever
followed by the kernel on the host. Where a sandbox mounts, the layer has a folder, whatever the template has
there. Files of ``/etc`` lie where the template's ``/etc`` really is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from ringfence.images.contract import ENGINE, Template
from ringfence.images.merged import Merged
from ringfence.images.store import TemplateStore
from ringfence.model.errors import InvalidRequest, WrongState
from ringfence.model.policy import Filesystem
from ringfence.node.templates import WRITABLE, bind, check_target, own_layer
from ringfence.node.troubles import host_limit
from ringfence.runtimes.contract import AGENT_UID, Bind, Disk, RootFs

if TYPE_CHECKING:
    from ringfence.node.state import StateRoot

FORMAT = "1"  # raise when the content of the layer changes
# Where drivers mount: real folders, by these very names. (path, mode, whether it is the workload's)
_POINTS = (
    ("/.ringfence", 0o700, False),
    ("/dev", 0o755, False),
    ("/proc", 0o555, False),
    ("/sys", 0o555, False),
    ("/run", 0o755, False),
    ("/run/secrets", 0o755, False),
    ("/tmp", 0o1777, False),  # noqa: S108 - inside
    ("/workspace", 0o755, True),
    ("/home/agent", 0o755, True),
)
_OURS = ("/.ringfence", "/dev", "/proc", "/sys", "/run/secrets")
_ROOT_MODE = 0o755
# The same result anywhere: what images leave to chance.
PINNED = {"PYTHONHASHSEED": "0"}
_OF_THE_USER = ("HOME", "USER", "LOGNAME", "HOSTNAME")  # an image says these of its user, not of ours
_HOSTS = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"
_RESOLV = "# no network: names are resolved by the egress door, where there is one\n"


class ImageTemplates:
    """Root file systems from the template store. One per node."""

    def __init__(self, state: StateRoot) -> None:
        self._folder = state.path / "images"
        self._store: TemplateStore | None = None

    @property
    def store(self) -> TemplateStore:
        """The store of this state root, opened on first use.

        Raises:
            HostLimit: it can't be made or read.
        """
        if self._store is None:
            self._store = TemplateStore.open(self._folder)
        return self._store

    def prepare(self, name: str, oldest: float | None = None) -> ImageRoot | EngineRoot:
        """The template of a name, found. ``oldest``: seconds that its base may be old.

        Raises:
            NotFound: no such template; the hint has those of similar names.
            WrongState: it is too old, or its record is damaged.
            InvalidRequest, HostLimit: see ``TemplateStore.resolve``.
        """
        if name.startswith(ENGINE):
            return EngineRoot(name)
        template = self.store.resolve(name)
        if oldest is not None:
            from ringfence.images.refreshing import check_age

            check_age(template, oldest)
        return ImageRoot(self.store, template)

    def close(self) -> None:
        """Let go of the store."""
        if self._store is not None:
            self._store.close()


class EngineRoot:
    """An image that a container engine has itself: nothing of it lies here."""

    def __init__(self, name: str) -> None:
        self.digest = name
        self._image = name.removeprefix(ENGINE)

    def skeleton(self, user: int) -> str:
        """Nothing to make."""
        return ""

    def root(self, files: Filesystem, user: int, disk: Disk, folder: Path) -> RootFs:
        """See :meth:`ImageRoot.root`."""
        binds: list[Bind] = []
        for path in (*files.read_write, *files.read_only):
            check_target(path, "path")
        for mount in files.mounts:
            binds.append(bind(mount, binds))
        return RootFs(
            lowers=(),
            binds=tuple(binds),
            disk=disk,
            readonly=files.root == "readonly",
            writable=tuple(dict.fromkeys((*WRITABLE, *files.read_write))),
            read_write=files.read_write,
            read_only=files.read_only,
            template=self.digest,
            image=self._image,
            env=tuple(PINNED.items()),
        )


class ImageRoot:
    """One template of the store, for sandboxes."""

    def __init__(self, store: TemplateStore, template: Template) -> None:
        self.template = template
        self.digest = template.digest
        self._store = store

    def skeleton(self, user: int) -> str:
        """The fittings for this user; made if missing.

        Raises:
            HostLimit: the disk is full.
        """
        folder = self._place(user)
        if not os.path.isdir(folder):
            self._make(folder, user)
        return f"{folder}/fs"

    def root(self, files: Filesystem, user: int, disk: Disk, folder: Path) -> RootFs:
        """The whole root file system of one sandbox, whose journal names :attr:`digest` already.

        Mount points that it alone needs go to ``folder``.

        Raises:
            InvalidRequest: a mount's source can't be read, or its target can't be had.
            WrongState: the template was removed meanwhile.
            HostLimit: the disk is full.
        """
        fittings = self.skeleton(user)
        lowers: tuple[str, ...] = (fittings, *self.template.lowers)
        with self._store.shared():
            # A collection that comes from now on reads the journal; one that came before has left nothing.
            if not all(map(os.path.isdir, lowers)):
                raise WrongState(
                    f"template {self.template.name or self.digest} was removed meanwhile", hint="add it again"
                )
        seen = Merged(lowers)
        binds: list[Bind] = []
        writable = [path for path in WRITABLE if _is_folder(seen, path)]
        extra = [path for path in (*files.read_write, *files.read_only) if seen.find(path) is None]
        if files.mounts or extra:
            for path in (*files.read_write, *files.read_only):
                check_target(path, "path")
            for mount in files.mounts:
                binds.append(bind(mount, binds))
            try:
                lowers = (_points(folder, seen, binds, files, user), *lowers)
            except OSError as error:
                raise host_limit(error, f"make mount points in {folder}") from error
        return RootFs(
            lowers=lowers,
            binds=tuple(binds),
            disk=disk,
            readonly=files.root == "readonly",
            writable=tuple(dict.fromkeys((*writable, *files.read_write))),
            read_write=files.read_write,
            read_only=files.read_only,
            template=self.digest,
            env=environment(self.template, user),
            workdir=self.template.config.workdir,
        )

    def _place(self, user: int) -> str:
        return f"{self._store.private}/fittings/{self.digest.removeprefix('sha256:')}-{user}-{FORMAT}"

    def _make(self, folder: str, user: int) -> None:
        from ringfence.images.layering import flush

        try:
            with self._store.working_folder() as aside:
                work = aside / "fittings"
                work.mkdir(0o711)
                work.chmod(0o711)
                _Layer(work / "fs", self.template, user).make()
                flush(work)
                try:
                    os.rename(work, folder)
                except OSError as error:  # another node was faster
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                        raise
        except OSError as error:
            raise host_limit(error, f"make the fittings of template {self.digest}") from error


def environment(template: Template, user: int) -> tuple[tuple[str, str], ...]:
    """The base environment that the template gives to commands of ``user``: pinned values, then its own."""
    own = dict(template.config.env)
    if template.config.uid != user:
        own = {name: value for name, value in own.items() if name not in _OF_THE_USER}
    return tuple((PINNED | own).items())


class _Layer:
    """One layer of fittings while it is made, in a new folder that nobody else knows."""

    def __init__(self, root: Path, template: Template, user: int) -> None:
        self._root = str(root)
        self._template = template
        self._seen = Merged(template.lowers)
        self._user = user

    def make(self) -> None:
        os.mkdir(self._root, _ROOT_MODE)
        os.chmod(self._root, _ROOT_MODE)
        for path, mode, owned in _POINTS:
            self._folder(path, mode, self._user if owned else 0)
        for path, mode in (("/var/tmp", 0o1777),):  # noqa: S108
            self._real_folder(path, mode, 0)
        if self._template.config.workdir:
            self._real_folder(self._template.config.workdir, None, self._user)
        etc = self._etc()
        self._file(f"{etc}/hosts", _HOSTS)
        self._file(f"{etc}/hostname", "sandbox\n")
        self._file(f"{etc}/resolv.conf", _RESOLV)
        self._file(f"{etc}/machine-id", "")
        self._accounts(etc)

    def _etc(self) -> str:
        """Where the template's /etc is; its own if that leads nowhere good."""
        with contextlib.suppress(InvalidRequest):
            path = self._seen.resolve("/etc")
            found = self._seen.find(path)
            if path != "/" and not _is_covered(path) and (found is None or stat.S_ISDIR(found[1].st_mode)):
                return path
        return "/etc"

    def _accounts(self, etc: str) -> None:
        passwd, group = self._table("/etc/passwd"), self._table("/etc/group")
        number = self._user or 1000
        shell = "/bin/bash" if self._seen.find(self._seen_path("/bin/bash")) else "/bin/sh"
        users, groups = [_fields(line) for line in passwd], [_fields(line) for line in group]
        if not any(fields[2] == "0" for fields in users):
            passwd.insert(0, f"root:x:0:0:root:/root:{shell}")
        if not any(fields[2] == "0" for fields in groups):
            group.insert(0, "root:x:0:")
        name = "agent"
        if any(fields[0] == name for fields in (*users, *groups)):
            name = f"agent{number}"
        if not any(fields[2] == str(number) for fields in users):
            passwd.append(f"{name}:x:{number}:{number}:agent:/home/agent:{shell}")
        if not any(fields[2] == str(number) for fields in groups):
            group.append(f"{name}:x:{number}:")
        if not any(fields[2] == str(AGENT_UID) for fields in users):
            passwd.append(f"ringfence:x:{AGENT_UID}:{AGENT_UID}:guest agent:/:/usr/sbin/nologin")
        if not any(fields[2] == str(AGENT_UID) for fields in groups):
            group.append(f"ringfence:x:{AGENT_UID}:")
        self._file(f"{etc}/passwd", "\n".join(passwd) + "\n")
        self._file(f"{etc}/group", "\n".join(group) + "\n")

    def _table(self, path: str) -> list[str]:
        text = (self._seen.read(path) or b"").decode("utf-8", "surrogateescape")
        return [line for line in text.split("\n") if line]

    def _seen_path(self, path: str) -> str:
        try:
            return self._seen.resolve(path)
        except InvalidRequest:
            return path

    def _real_folder(self, path: str, mode: int | None, owner: int) -> None:
        """A folder where the template's links lead; nothing if that is no place for one."""
        try:
            real = self._seen.resolve(path)
        except InvalidRequest:
            return
        found = self._seen.find(real)
        if real == "/" or _is_covered(real) or (found is not None and not stat.S_ISDIR(found[1].st_mode)):
            return
        if found is not None and mode is None:
            return  # it is there, and is as it is
        self._folder(real, 0o755 if mode is None else mode, owner)

    def _folder(self, path: str, mode: int, owner: int) -> None:
        self._parents(path)
        inside = self._root + path
        if not os.path.isdir(inside):
            os.mkdir(inside)
        os.chmod(inside, mode)
        if os.geteuid() == 0:
            os.chown(inside, owner, owner)

    def _parents(self, path: str) -> None:
        here = ""
        for part in path.strip("/").split("/")[:-1]:
            here += f"/{part}"
            inside = self._root + here
            if os.path.isdir(inside):
                continue
            os.mkdir(inside)
            found = self._seen.find(here)
            if found is None or not stat.S_ISDIR(found[1].st_mode):
                os.chmod(inside, 0o755)  # noqa: S103
                continue
            # The topmost layer decides a folder's mode and owner: repeat the template's.
            os.chmod(inside, stat.S_IMODE(found[1].st_mode))
            if os.geteuid() == 0:
                os.chown(inside, found[1].st_uid, found[1].st_gid)

    def _file(self, path: str, text: str) -> None:
        self._parents(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(
            os.open(self._root + path, flags, 0o644), "w", encoding="utf-8", errors="surrogateescape"
        ) as f:
            f.write(text)
            os.fchmod(f.fileno(), 0o644)


def _fields(line: str) -> list[str]:
    return [*line.split(":"), "", "", ""]


def _is_covered(path: str) -> bool:
    return any(path == ours or path.startswith(ours + "/") for ours in _OURS)


def _is_folder(seen: Merged, path: str) -> bool:
    found = seen.find(path)
    return found is not None and stat.S_ISDIR(found[1].st_mode)


def _points(folder: Path, seen: Merged, binds: list[Bind], files: Filesystem, user: int) -> str:
    """A layer with what this sandbox has to mount on, and the policy's folders that the template lacks."""
    layer = own_layer(folder)
    wanted: dict[str, tuple[bool, int]] = {}  # path → (is a folder, owner)
    for path in files.read_only:
        wanted[path] = (True, 0)
    for path in files.read_write:
        wanted[path] = (True, user)
    for each in binds:
        wanted[each.target] = (os.path.isdir(each.source), 0)
    for path, (is_folder, owner) in wanted.items():
        if any(path.startswith(each.target + "/") for each in binds):
            continue
        found = _on_the_way(layer, seen, path)
        if found is not None:
            if stat.S_ISLNK(found.st_mode) or stat.S_ISDIR(found.st_mode) != is_folder:
                raise InvalidRequest(
                    f"{path} of the template is {_kind(found)}, not a {'folder' if is_folder else 'file'}",
                    hint="choose another path",
                )
            continue
        inside = f"{layer}{path}"
        if os.path.lexists(inside):
            continue
        if is_folder:
            os.mkdir(inside)
            os.chmod(inside, 0o755)  # noqa: S103
        else:
            os.close(os.open(inside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        if os.geteuid() == 0 and owner:
            os.chown(inside, owner, owner)
    return str(layer)


def _on_the_way(layer: Path, seen: Merged, path: str) -> os.stat_result | None:
    """Make the parents that ``path`` lacks, as the template has them; what the template has at ``path``."""
    found = seen.find(path)
    here = ""
    for part in path.strip("/").split("/")[:-1]:
        here += f"/{part}"
        above = seen.find(here)
        if above is not None and not stat.S_ISDIR(above[1].st_mode):
            raise InvalidRequest(
                f"{path} goes through {here}, which is {_kind(above[1])} in the template",
                hint="name the real path",
            )
        if found is not None or os.path.lexists(f"{layer}{here}"):
            continue
        os.mkdir(f"{layer}{here}")
        os.chmod(f"{layer}{here}", stat.S_IMODE(above[1].st_mode) if above else 0o755)
        if above and os.geteuid() == 0:
            os.chown(f"{layer}{here}", above[1].st_uid, above[1].st_gid)
    return found[1] if found else None


def _kind(info: os.stat_result) -> str:
    if stat.S_ISLNK(info.st_mode):
        return "a link"
    return "a folder" if stat.S_ISDIR(info.st_mode) else "a file"


__all__ = ["EngineRoot", "ImageRoot", "ImageTemplates", "environment"]
