"""The store of templates: layers by digest, templates by digest, names that point at them.

::

    <state>/images/          0711
      lock                   shared by whoever uses layers, exclusive while things are taken away
      names/                 0700  <name>:<tag>.json → digest, source, times
      templates/             0700  <digest>.json → layers, configuration
      pins/                  0700  <digest>.<holder>: empty files, what somebody needs although it has no name
      tmp/                   0700  <session>/ and <session>.lock of each import under way
      trash/                 0700  what is being removed
      private-<random>/      0700
        layers/<digest>/     fs/ and layer.json
        fittings/<key>/fs/   what a sandbox needs on top (``ringfence.node.fittings``)

Unpacked layers hold what somebody else's image says: folders that everybody may write to, files of any
user. Other users of this host must not pass through to them, or they could change what all sandboxes are made
of. That the folder in the middle can't be listed, nor its name guessed, is not enough: some walls' tables of
mounts have its name, and everybody may read those. Drivers mount layers before they become somebody else.

Whoever is killed at any moment leaves a session whose lock can be had: its things are nobody's, and the next
collection removes them. What has been renamed into place is whole, and on the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ringfence.images import names, records
from ringfence.images.contract import ImportLimits, Layer, Template, TemplateConfig
from ringfence.model.errors import HostLimit, InvalidRequest, NotFound, WrongState

if TYPE_CHECKING:
    from ringfence.images.unpacking import Readable

_FOLDERS = ("names", "templates", "pins", "tmp", "trash")
HOLDS = "holds"  # of a session: templates that no collection takes
_PRIVATE = ("layers", "fittings")
_counter = itertools.count()


class TemplateStore:
    """One process's view of a store; several may have it open.

    Layers that were added through it are safe from collection until :meth:`close`, or until the process ends.
    """

    def __init__(self, folder: Path, private: Path) -> None:
        self.folder = folder
        self.private = private
        self.layers = private / "layers"
        self._session: Path | None = None
        self._opening = threading.Lock()
        self._session_lock = -1

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """Open ``<state root>/images``; made if it is missing.

        Raises:
            HostLimit: the folder can't be made or read.
        """
        path = Path(os.path.realpath(folder))
        try:
            private = _private(path)
            if private is None:
                private = _make(path)
        except OSError as error:
            raise _limit(error, f"open the template store {path}") from error
        return cls(path, private)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what was added and given no name. Idempotent."""
        if self._session is None:
            return
        from ringfence.images.removing import remove_tree

        with contextlib.suppress(OSError):
            remove_tree(self._session)
        with contextlib.suppress(OSError):
            os.unlink(f"{self._session}.lock")
        os.close(self._session_lock)
        self._session, self._session_lock = None, -1

    # -- locks

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """While this is held nothing is taken away. For moments: resolve, write down that it is in use."""
        with self._locked(fcntl.LOCK_SH):
            yield

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """While this is held nobody begins to use anything."""
        with self._locked(fcntl.LOCK_EX):
            yield

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, kind)
            yield
        finally:
            os.close(lock)

    # -- finding

    def names(self) -> list[str]:
        """Every name, with its tag, sorted."""
        return sorted(
            entry[: -len(".json")].replace("%", "/")
            for entry in os.listdir(self.folder / "names")
            if entry.endswith(".json")
        )

    def templates(self) -> list[Template]:
        """Every template: one for each name, then those without a name. Damaged ones are left out."""
        found = []
        seen = set()
        for name in self.names():
            with contextlib.suppress(NotFound, WrongState):
                found.append(self.resolve(name))
                seen.add(found[-1].digest)
        for digest in self.digests():
            if digest not in seen:
                with contextlib.suppress(NotFound, WrongState):
                    found.append(self.resolve(digest))
        return found

    def digests(self) -> list[str]:
        """Every template's digest, sorted."""
        return sorted(
            "sha256:" + entry[: -len(".json")]
            for entry in os.listdir(self.folder / "templates")
            if entry.endswith(".json")
        )

    def resolve(self, name: str) -> Template:
        """The template of a name, ``name:tag``, ``sha256:…`` or the beginning of one (8 digits or more).

        Raises:
            NotFound: there is none; the hint has those of similar names.
            InvalidRequest: that can't be a name, or several digests begin so.
            WrongState: its record is damaged, or a layer is missing.
        """
        if names.is_digest_or_part(name):
            digest = self._whole(name)
            return self._load(digest, "", {})
        full = names.full_name(name)
        try:
            pointer = records.read(self._name_file(full))
        except FileNotFoundError:
            raise names.unknown(name, self.names()) from None
        digest = str(pointer.get("digest", ""))
        if not names.is_digest(digest):
            raise WrongState(
                f"the record of template {full} is damaged", hint=f"ringfence template rm {full}"
            )
        return self._load(digest, full, pointer)

    def _whole(self, text: str) -> str:
        if names.is_digest(text):
            return text
        found = [digest for digest in self.digests() if digest.startswith(text)]
        if len(found) > 1:
            raise InvalidRequest(f"{len(found)} templates begin with {text}", hint="write more of its digits")
        if not found:
            raise NotFound(f"no template {text}", hint="`ringfence template ls` lists those that are here")
        return found[0]

    def _load(self, digest: str, name: str, pointer: dict[str, object]) -> Template:
        try:
            record = records.read(self._template_file(digest))
            record.update(pointer)
            layers = []
            for each in record["layers"]:
                layer = Layer(each["digest"], str(self._layer_folder(each["digest"]) / "fs"), each["size"])
                if not os.path.isdir(layer.folder):
                    raise WrongState(
                        f"template {name or digest} lacks its layer {layer.digest}",
                        hint="add it again: what is there already is not fetched twice",
                    )
                layers.append(layer)
            return Template(
                digest=digest,
                name=name,
                layers=tuple(layers),
                config=records.config_from_json(record["config"]),
                source=record["source"],
                base_digest=record["base_digest"],
                base_made_at=record["base_made_at"],
                made_at=record["made_at"],
                architecture=record["architecture"],
            )
        except FileNotFoundError:
            raise NotFound(f"no template {name or digest}", hint="add it again") from None
        except (KeyError, TypeError, ValueError, AttributeError):
            raise WrongState(
                f"the record of template {name or digest} is damaged", hint="remove it, and add it again"
            ) from None

    def layer(self, digest: str) -> Layer | None:
        """A layer that is here; from now on safe from collection until :meth:`close`.

        Raises:
            HostLimit: the disk is full.
        """
        folder = self._layer_folder(digest)
        self._need(digest)
        try:
            record = records.read(folder / "layer.json")
        except FileNotFoundError:
            return None
        return Layer(digest, str(folder / "fs"), int(record.get("size", 0)))

    def layer_digests(self) -> list[str]:
        """Every layer that is here, in use or not, sorted."""
        return sorted("sha256:" + entry for entry in os.listdir(self.layers))

    # -- adding

    def add_layer_from(
        self,
        stream: Readable,
        *,
        diff_id: str = "",
        blob_digest: str = "",
        limits: ImportLimits | None = None,
        progress: Callable[[int], object] | None = None,
        notes: list[str] | None = None,
    ) -> Layer:
        """Unpack a tar (plain, gzip or zstd) into a layer. Nothing is left of it after an error.

        Args:
            stream: has ``read(n) -> bytes``; read to its end, and hostile.
            diff_id: ``sha256:…`` that the uncompressed tar must have.
            blob_digest: ``sha256:…`` that the stream as it is must have.
            limits: see :class:`ImportLimits`.
            progress: called with the bytes read so far, now and then.
            notes: gets sentences about what was left out or changed.

        Raises:
            InvalidRequest: not a tar, hostile, or of another digest; the message says what and where.
            HostLimit: over a limit, or the disk is full.
            RuntimeUnavailable: its compression needs a program that is not here.
        """
        from ringfence.images.layering import unpack_layer

        aside = self._aside()
        try:
            unpacked = unpack_layer(
                stream, aside, diff_id=diff_id, blob_digest=blob_digest, limits=limits, progress=progress
            )
            if notes is not None:
                notes.extend(unpacked.report.notes)
            return self._keep(unpacked.digest, aside, unpacked.report.size)
        except OSError as error:
            raise _limit(error, f"unpack a layer in {self.folder}") from error
        finally:
            self._discard(aside)

    def _keep(self, digest: str, aside: Path, size: int) -> Layer:
        """Rename an unpacked, flushed layer into place."""
        self._need(digest)
        folder = self._layer_folder(digest)
        with self.shared():
            try:
                os.rename(aside, folder)
            except OSError:
                if not (folder / "layer.json").is_file():
                    raise
                # Somebody else was faster with the same content.
            else:
                records.sync_folder(self.layers)
        return Layer(digest, str(folder / "fs"), size)

    def put(
        self,
        name: str,
        layers: Iterable[Layer],
        config: TemplateConfig | None = None,
        *,
        source: str = "",
        base_digest: str = "",
        base_made_at: float = 0.0,
        architecture: str = "",
        hold: bool = False,
    ) -> Template:
        """Make a template of layers (lowest first) and let ``name`` point at it; a former one is moved.

        ``hold``: no collection takes it until :meth:`let_go`, or until this store is closed.

        Raises:
            InvalidRequest: the name can't be one, or there are no layers.
            WrongState: a layer is not here (any more).
            HostLimit: the disk is full.
        """
        full = names.full_name(name) if name else ""
        parts = tuple(layers)
        config = config or TemplateConfig()
        if not parts:
            raise InvalidRequest("a template without layers has no files", hint="give it a source with files")
        digest = records.template_digest(parts, config, architecture)
        now = time.time()
        provenance = {
            "source": source,
            "base_digest": base_digest,
            "base_made_at": base_made_at,
            "made_at": now,
        }
        content = {
            "layers": [{"digest": layer.digest, "size": layer.size} for layer in parts],
            "config": records.config_as_json(config),
            "architecture": architecture,
            **provenance,
        }
        try:
            session = self._open_session()
            with self.shared():
                for layer in parts:
                    if not os.path.isdir(self._layer_folder(layer.digest)):
                        raise WrongState(f"layer {layer.digest} is not in the store", hint="add it again")
                if hold:
                    (session / HOLDS).mkdir(0o700, exist_ok=True)
                    (session / HOLDS / _hex(digest)).touch(0o600)
                records.write(self._template_file(digest), content, aside=session)
                if full:
                    records.write(self._name_file(full), {"digest": digest, **provenance}, aside=session)
        except OSError as error:
            raise _limit(error, f"write template {full or digest}") from error
        return self.resolve(full or digest) if not full else self._load(digest, full, provenance)

    def let_go(self, digest: str) -> None:
        """What :meth:`put` has held is not needed any more. Idempotent."""
        if self._session is not None:
            (self._session / HOLDS / _hex(digest)).unlink(missing_ok=True)

    def tag(self, template: Template, name: str) -> Template:
        """Let another name point at a template.

        Raises:
            InvalidRequest, HostLimit: as :meth:`put`.
        """
        return self.put(
            name,
            template.layers,
            template.config,
            source=template.source,
            base_digest=template.base_digest,
            base_made_at=template.base_made_at,
            architecture=template.architecture,
        )

    # -- removing

    def remove(self, name: str) -> list[str]:
        """Forget a name; of a digest: all its names. What nobody needs then goes with the next collection.

        Returns the names that are gone.

        Raises:
            NotFound, InvalidRequest: as :meth:`resolve`.
        """
        with self.exclusive():
            if names.is_digest_or_part(name):
                digest = self._whole(name)
                gone = [each for each in self.names() if self.points_at(each) == digest]
                if not gone and not os.path.lexists(self._template_file(digest)):
                    raise NotFound(f"no template {name}", hint="`ringfence template ls` lists what is here")
            elif name.partition(":")[0] == "host":
                raise InvalidRequest(
                    "host can't be removed: it is this machine's own files, not a template that was added",
                    hint="`ringfence template ls` lists what was",
                )
            else:
                full = names.full_name(name)
                if not os.path.lexists(self._name_file(full)):
                    raise names.unknown(name, self.names())
                gone = [full]
            for each in gone:
                os.unlink(self._name_file(each))
        return gone

    def drop(self, digest: str) -> None:
        """Forget a template that nobody needs; for collections, under the exclusive lock."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._template_file(digest))

    def layers_of(self, digest: str) -> list[str]:
        """Digests of a template's layers, whether they are here or not.

        Raises:
            NotFound, WrongState: there is no such template, or its record is damaged.
        """
        try:
            record = records.read(self._template_file(digest))
            return [str(each["digest"]) for each in record["layers"]]
        except FileNotFoundError:
            raise NotFound(f"no template {digest}") from None
        except (KeyError, TypeError):
            raise WrongState(f"the record of template {digest} is damaged") from None

    def points_at(self, full: str) -> str:
        """The digest that a full name points at; empty if there is none."""
        try:
            return str(records.read(self._name_file(full)).get("digest", ""))
        except (FileNotFoundError, WrongState):
            return ""

    def pin(self, digest: str, holder: str) -> None:
        """``holder`` (a snapshot, a pool; letters, digits, - and _) needs this template, named or not.

        Raises:
            NotFound: there is no such template.
            HostLimit: the disk is full.
        """
        with self.shared():
            if not os.path.lexists(self._template_file(digest)):
                raise NotFound(f"no template {digest}", hint="add it again")
            try:
                with open(self._pin_file(digest, holder), "wb"):
                    pass
            except OSError as error:
                raise _limit(error, f"pin template {digest}") from error

    def unpin(self, digest: str, holder: str) -> None:
        """It is not needed any more. Idempotent."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._pin_file(digest, holder))

    def pinned(self, digest: str) -> list[str]:
        """Who needs this template."""
        start = digest.removeprefix("sha256:") + "."
        return sorted(
            entry[len(start) :] for entry in os.listdir(self.folder / "pins") if entry.startswith(start)
        )

    # -- sessions: what one process is making

    def _open_session(self) -> Path:
        with self._opening:
            return self._opened_session()

    def _opened_session(self) -> Path:
        if self._session is None:
            tmp = self.folder / "tmp"
            while True:
                session = tmp / f"{os.getpid()}.{time.time_ns():x}.{next(_counter)}"
                try:
                    lock = os.open(
                        f"{session}.lock", os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600
                    )
                except FileExistsError:
                    continue
                fcntl.flock(lock, fcntl.LOCK_EX)
                if os.fstat(lock).st_nlink:  # nobody has taken us for dead between the two calls
                    break
                os.close(lock)
            try:
                os.makedirs(session / "needs", 0o700)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.rmdir(session)
                os.unlink(f"{session}.lock")
                os.close(lock)
                raise
            self._session, self._session_lock = session, lock
        return self._session

    def _aside(self) -> Path:
        """A new folder of this session, to be renamed or discarded."""
        try:
            folder = self._open_session() / f"new{next(_counter)}"
            folder.mkdir(0o711)
            folder.chmod(0o711)
        except OSError as error:
            raise _limit(error, f"write to the template store {self.folder}") from error
        return folder

    @contextlib.contextmanager
    def working_folder(self) -> Iterator[Path]:
        """A folder of the store's file system for what is fetched or built; removed with all that is in it.

        Raises:
            HostLimit: it can't be made.
        """
        folder = self._aside()
        folder.chmod(0o700)
        try:
            yield folder
        finally:
            self._discard(folder)

    def _discard(self, folder: Path) -> None:
        from ringfence.images.removing import remove_tree

        if os.path.lexists(folder):
            with contextlib.suppress(OSError):
                remove_tree(folder)

    def _need(self, digest: str) -> None:
        """Before it is looked for: a collection that comes later sees that we want it."""
        try:
            with self.shared(), open(self._open_session() / "needs" / _hex(digest), "wb"):
                pass
        except OSError as error:
            raise _limit(error, f"write to the template store {self.folder}") from error

    # -- paths

    def _layer_folder(self, digest: str) -> Path:
        return self.layers / _hex(digest)

    def _template_file(self, digest: str) -> Path:
        return self.folder / "templates" / f"{_hex(digest)}.json"

    def _name_file(self, full: str) -> Path:
        return self.folder / "names" / f"{full.replace('/', '%')}.json"

    def _pin_file(self, digest: str, holder: str) -> Path:
        if not holder or not all(letter.isalnum() or letter in "-_" for letter in holder):
            raise InvalidRequest(f"{holder!r} can't hold a template")
        return self.folder / "pins" / f"{_hex(digest)}.{holder}"


def _hex(digest: str) -> str:
    if not names.is_digest(digest):
        raise InvalidRequest(f"{digest!r} is no digest", hint="a digest is sha256: and 64 hexadecimal digits")
    return digest.removeprefix("sha256:")


def _private(folder: Path) -> Path | None:
    try:
        found = sorted(name for name in os.listdir(folder) if name.startswith("private-"))
    except FileNotFoundError:
        return None
    # Only a store that was made to the end has its lock file.
    if not found or not os.path.lexists(folder / "lock"):
        return None
    private = folder / found[0]
    seen = os.lstat(private)
    if seen.st_uid == os.geteuid() and stat.S_IMODE(seen.st_mode) != 0o700:
        private.chmod(0o700)
    return private


def _make(folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o711)
        folder.chmod(0o711)
    making = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(making, fcntl.LOCK_EX)
        private = _private(folder)
        if private is None:
            begun = sorted(name for name in os.listdir(folder) if name.startswith("private-"))
            private = folder / (begun[0] if begun else f"private-{os.urandom(16).hex()}")
            for path, mode in (
                *((folder / name, 0o700) for name in _FOLDERS),
                (private, 0o700),
                *((private / name, 0o711) for name in _PRIVATE),
            ):
                path.mkdir(mode, exist_ok=True)
                path.chmod(mode)
            os.close(os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    finally:
        os.close(making)
    return private


def _limit(error: OSError, doing: str) -> HostLimit:
    from ringfence.images.troubles import host_limit

    return host_limit(error, doing)
