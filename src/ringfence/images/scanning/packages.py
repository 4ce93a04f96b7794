"""Packages of dpkg, pip and npm, as their own records say. These are hostile: bounded, never followed."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from ringfence.images.merged import Merged
from ringfence.images.scanning.walking import Bounds, Folder, walk
from ringfence.model.errors import InvalidRequest
from ringfence.model.values import dataclass

LARGEST_STATUS = 64 << 20  # bytes of dpkg's list: a system with 60,000 packages has as much
LARGEST_METADATA = 1 << 20  # of one pip or npm package; their text may hold a whole README
MOST = 200_000
_MOST_NOTES = 50
_LONGEST = 500  # characters of a name, a version or a licence
_PIP = re.compile(r"[-_.]+")
_DISTRIBUTION = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*?)-(?P<version>[^-]+)\.(dist|egg)-info")


@dataclass(frozen=True, slots=True)
class Package:
    """One installed package. ``kind``: deb, pypi or npm. ``place``: the file that says so, inside."""

    kind: str
    name: str
    version: str
    place: str
    architecture: str = ""
    licence: str = ""
    source: str = ""  # dpkg: the source package, ``name (version)`` or empty

    def purl(self, distribution: str, release: str = "") -> str:
        """The package URL (https://github.com/package-url/purl-spec)."""
        version = f"@{quote(self.version, safe=':~.+-_')}" if self.version else ""
        if self.kind == "deb":
            extra = {"arch": self.architecture, "distro": f"{distribution}-{release}" if release else ""}
            asked = "&".join(f"{key}={quote(value, safe='.-_')}" for key, value in extra.items() if value)
            name = quote(self.name, safe=".+-_")
            return f"pkg:deb/{quote(distribution or 'debian', safe='')}/{name}{version}" + (
                asked and f"?{asked}"
            )
        if self.kind == "pypi":
            return f"pkg:pypi/{quote(_PIP.sub('-', self.name).lower(), safe='.-_')}{version}"
        scope, slash, name = self.name.rpartition("/")
        return f"pkg:npm/{quote(scope, safe='') + slash}{quote(name, safe='.-_~')}{version}"


@dataclass(frozen=True, slots=True)
class Found:
    """What a scan found. ``distribution``: id, version, name of it. ``notes``: what was odd."""

    packages: tuple[Package, ...]
    distribution: tuple[str, str, str]
    notes: tuple[str, ...]


def scan(lowers: tuple[str, ...], bounds: Bounds | None = None) -> Found:
    """List the packages of a template's layers (topmost first)."""
    work = _Scan(lowers, bounds)
    work.run()
    packages = sorted(
        set(work.packages),
        key=lambda each: (each.kind, each.name, each.version, each.architecture, each.place),
    )
    return Found(tuple(packages), work.distribution(), tuple(work.notes[:_MOST_NOTES]))


class _Scan:
    def __init__(self, lowers: tuple[str, ...], bounds: Bounds | None) -> None:
        self._lowers = lowers
        self._bounds = bounds
        self._merged = Merged(lowers)
        self.packages: list[Package] = []
        self.notes: list[str] = []

    def run(self) -> None:
        self._dpkg()
        for folder in walk(self._lowers, self.notes, self._bounds):
            if len(self.packages) >= MOST:
                self.notes.append(f"more than {MOST} packages: the rest is left out")
                return
            self._folder(folder)

    def distribution(self) -> tuple[str, str, str]:
        for path in ("/etc/os-release", "/usr/lib/os-release"):
            text = _text(self._merged.read(path, 1 << 16) or b"")
            values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
            if values:
                found = [
                    values.get(key, "").strip().strip("\"'")[:100]
                    for key in ("ID", "VERSION_ID", "PRETTY_NAME")
                ]
                return found[0], found[1], found[2]
        return "", "", ""

    # -- dpkg

    def _dpkg(self) -> None:
        self._status("/var/lib/dpkg/status")
        # Images without dpkg itself keep one file a package.
        folder = "/var/lib/dpkg/status.d"
        for name in self._merged.list(folder)[:MOST]:
            if not name.endswith(".md5sums"):
                self._status(f"{folder}/{name}", default_installed=True)

    def _status(self, path: str, *, default_installed: bool = False) -> None:
        found = self._merged.find(path)
        if found is None:
            if self._merged.find(self._merged_path(path)) is not None:
                self._odd(path, "is reached by a link")
            return
        data = self._read(found, path, LARGEST_STATUS)
        if data is None:
            return
        for fields in _stanzas(_text(data).splitlines()):
            installed = fields.get("Status", "install ok installed" if default_installed else "").split()
            if fields.get("Package") and installed[-1:] == ["installed"]:
                self.packages.append(
                    Package(
                        "deb",
                        _short(fields["Package"]),
                        _short(fields.get("Version", "")),
                        path,
                        architecture=_short(fields.get("Architecture", "")),
                        source=_short(fields.get("Source", "")),
                    )
                )
                if len(self.packages) >= MOST:
                    return

    def _merged_path(self, path: str) -> str:
        try:
            return self._merged.resolve(path)
        except InvalidRequest:
            return path

    # -- pip and npm

    def _folder(self, folder: Folder) -> None:
        name = folder.path.rpartition("/")[2]
        if name.endswith((".dist-info", ".egg-info")):
            self._pip(folder, "METADATA" if name.endswith(".dist-info") else "PKG-INFO")
        elif "package.json" in folder.entries and "node_modules" in PurePosixPath(folder.path).parts[:-1]:
            self._npm(folder)
        for entry, (_, info) in folder.entries.items():
            if entry.endswith(".egg-info") and stat.S_ISREG(info.st_mode):
                self._metadata(folder.entries[entry], f"{folder.path.rstrip('/')}/{entry}", entry)

    def _pip(self, folder: Folder, file: str) -> None:
        name = folder.path.rpartition("/")[2]
        place = f"{folder.path}/{file}"
        if file not in folder.entries:
            self._odd(folder.path, f"has no {file}")
            self._by_name(name, folder.path)
            return
        self._metadata(folder.entries[file], place, name)

    def _metadata(self, entry: tuple[str, os.stat_result], place: str, folder: str) -> None:
        data = self._read(entry, place, LARGEST_METADATA, part=True)
        if data is None:
            self._by_name(folder, place)
            return
        fields = next(_stanzas(_text(data).splitlines()), {})
        if not fields.get("Name"):
            self._odd(place, "names no package")
            self._by_name(folder, place)
            return
        licence = fields.get("License-Expression") or fields.get("License", "")
        self.packages.append(
            Package(
                "pypi",
                _short(fields["Name"]),
                _short(fields.get("Version", "")),
                place,
                licence=_short(licence),
            )
        )

    def _by_name(self, folder: str, place: str) -> None:
        """A package whose record can't be read is there all the same: its folder says name and version."""
        found = _DISTRIBUTION.fullmatch(folder)
        if found is not None:
            self.packages.append(Package("pypi", _short(found["name"]), _short(found["version"]), place))

    def _npm(self, folder: Folder) -> None:
        place = f"{folder.path}/package.json"
        parts = PurePosixPath(folder.path).parts
        above = parts[-2] if len(parts) > 1 else ""
        if above != "node_modules" and not (above.startswith("@") and parts[-3:-2] == ("node_modules",)):
            return  # a folder inside of a package, not one
        data = self._read(folder.entries["package.json"], place, LARGEST_METADATA)
        if data is None:
            return
        try:
            value: Any = json.loads(data.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
            self._odd(place, "is no description of a package")
            return
        version, licence = value.get("version"), value.get("license")
        if isinstance(licence, dict):
            licence = licence.get("type")
        self.packages.append(
            Package(
                "npm",
                _short(value["name"]),
                _short(version) if isinstance(version, str) else "",
                place,
                licence=_short(licence) if isinstance(licence, str) else "",
            )
        )

    # -- reading

    def _read(
        self, entry: tuple[str, os.stat_result], place: str, most: int, *, part: bool = False
    ) -> bytes | None:
        """A regular file of at most so many bytes; ``part``: the beginning of a larger one will do."""
        path, info = entry
        if not stat.S_ISREG(info.st_mode):
            self._odd(place, "is no file")
            return None
        if info.st_size > most and not part:
            self._odd(place, f"is larger than {most >> 20} MiB")
            return None
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self._odd(place, f"can't be read: {os.strerror(error.errno or 0)}")
            return None
        with os.fdopen(file, "rb") as stream:
            return stream.read(most)

    def _odd(self, place: str, what: str) -> None:
        if len(self.notes) < _MOST_NOTES:
            self.notes.append(f"{place!a} {what}: it was not looked at")


def _stanzas(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    """Paragraphs of ``Field: value``; further lines of a value are left out."""
    fields: dict[str, str] = {}
    for line in lines:
        if not line.strip():
            if fields:
                yield fields
            fields = {}
        elif not line.startswith((" ", "\t")):
            name, colon, value = line.partition(":")
            if colon and len(fields) < 200:
                fields.setdefault(name, value.strip())
    if fields:
        yield fields


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _short(text: str) -> str:
    """No control characters, and not too long: it goes into documents and on terminals."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text[:_LONGEST])
