"""GPUs as the Container Device Interface describes them (https://github.com/cncf-tags/container-device-interface).

A vendor's tool writes files into ``/etc/cdi`` or ``/var/run/cdi`` (``nvidia-ctk cdi generate``), which say
what a container needs: device nodes, driver files, variables, and programs to be run as *hooks*.

How they are obeyed here:

* A file is read only if its owner is root (or the caller) and nobody else can write it or its folder: it
  decides what of the host is shown.
* Device nodes: character devices that are known to be a GPU's, for reading and writing. Else it is refused.
* Mounts: files and folders of programs and drivers, always read-only, nosuid and nodev. Sockets of host
  services and whatever lies elsewhere are left out, and said so in ``notes``.
* Hooks are never run: they are a vendor's programs with the host root's rights over a root file system that
  the workload chose (CVE-2024-0132, CVE-2025-23266). What the well-known ones do is done here instead: links
  to libraries and their folder in ``LD_LIBRARY_PATH``. An unknown one is refused.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ringfence.model.errors import HostLimit
from ringfence.model.values import dataclass
from ringfence.runtimes.contract import Bind

FOLDERS = ("/etc/cdi", "/var/run/cdi")  # later ones win where both name a device
KINDS = ("nvidia.com/gpu", "amd.com/gpu", "intel.com/gpu")
LIBRARIES = "/run/ringfence-gpu"  # inside: links to driver libraries under the names that programs ask for
MOST_BYTES = 4 << 20  # of one file: real ones have some 50 KiB
_VERSIONS = re.compile(r"(0\.[3-9]|1\.\d+)\.\d+")  # of the specification: before 0.3.0 the keys were others
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NODE = re.compile(
    r"/dev/(nvidia\d+|nvidiactl|nvidia-modeset|nvidia-uvm|nvidia-uvm-tools|nvidia-caps/nvidia-cap\d+"
    r"|dri/card\d+|dri/renderD\d+|kfd|accel/accel\d+|dxg)"
)
_DRIVERS = (
    "/usr/", "/lib/", "/lib64/", "/opt/", "/etc/vulkan/", "/etc/OpenCL/", "/etc/glvnd/", "/etc/egl/",
    "/etc/nvidia/", "/run/nvidia/driver/",
)  # fmt: skip
_HARMLESS_HOOKS = {"chmod", "enable-cuda-compat", "disable-device-node-modification"}
# Names that a vendor's file may not set: they decide what a program loads, and ours are our own.
_NOT_VARIABLES = {"PATH", "HOME", "LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "PYTHONPATH"}
REMEDY = (
    "install the vendor's container toolkit and let it describe the GPUs: "
    "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
)


@dataclass(frozen=True, slots=True)
class Node:
    """A device node: its path inside, its path on the host, and the numbers it had when it was judged."""

    path: str
    source: str
    major: int
    minor: int


@dataclass(frozen=True, slots=True)
class Edits:
    """What a wall needs for the GPUs chosen. All values are judged; ``mounts`` are read-only.

    ``links``: (path inside, what it points to). ``groups``: numbers of the host's groups that may open the
    nodes. ``notes``: what the vendor's file asks for and is not done, in words.
    """

    devices: tuple[str, ...]  # qualified names, as `nvidia.com/gpu=0`
    nodes: tuple[Node, ...] = ()
    mounts: tuple[Bind, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    groups: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Device:
    name: str
    own: Mapping[str, Any]
    shared: Mapping[str, Any]  # of the file it stands in
    file: str


def edits(
    count: int, *, root: str = "/", lease: Callable[[Mapping[str, str], int], list[str]] | None = None
) -> Edits:
    """What a wall needs for ``count`` GPUs. ``root``: the host's file system; tests have one of their own.

    ``lease`` chooses among those that there are (see ``leases.take``); without it, the lowest indices.

    Raises:
        HostLimit: no file describes so many GPUs, or one says what is not obeyed; the message says which.
    """
    found = [device for device in devices(root) if _wanted(device)]
    chosen = found[:count]
    if not found:
        raise HostLimit(f"no GPU is described in {' or '.join(FOLDERS)}", hint=REMEDY)
    if len(chosen) < count:
        raise HostLimit(
            f"{count} GPUs are asked for and {len(found)} are here ({', '.join(d.name for d in found)})",
            hint="ask for fewer, or describe the others: " + REMEDY,
        )
    if lease is not None:
        names = lease({device.name: device.name for device in found}, count)
        chosen = [device for device in found if device.name in names]
    return _edits(chosen, root)


def devices(root: str = "/") -> list[_Device]:
    """Every device of the GPU kinds that the host's files describe, in the order of their names.

    Raises:
        HostLimit: a file can't be trusted or understood.
    """
    found: dict[str, _Device] = {}
    for folder in FOLDERS:
        here: dict[str, _Device] = {}
        for path in _files(root, folder):
            for device in _read(path):
                if device.name in here:
                    raise HostLimit(
                        f"{device.name} is described twice, in {here[device.name].file} and {path}",
                        hint="remove one of the two files",
                    )
                here[device.name] = device
        found |= here
    return sorted(found.values(), key=_order)


def _order(device: _Device) -> tuple[str, int, str]:
    kind, _, name = device.name.partition("=")
    return kind, int(name) if name.isdigit() else 1 << 30, name


def _wanted(device: _Device) -> bool:
    """One whole GPU by its index; ``all`` and the names by UUID are the same ones again."""
    return device.name.partition("=")[2].isdigit()


def _files(root: str, folder: str) -> Iterator[str]:
    place = os.path.join(root, folder.lstrip("/"))
    try:
        names = sorted(os.listdir(place))
    except OSError:
        return
    _trusted(place)
    for name in names:
        if name.endswith((".json", ".yaml", ".yml")):
            yield os.path.join(place, name)


def _trusted(path: str) -> None:
    seen = os.stat(path)
    if seen.st_uid not in (0, os.geteuid()) or seen.st_mode & 0o022:
        raise HostLimit(
            f"{path} decides what of the host is shown, and others than root can write it",
            hint=f"chown root {path} && chmod go-w {path}",
        )


def _read(path: str) -> list[_Device]:
    try:
        _trusted(path)
        with open(path, "rb") as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes")
        document = _parse(path, text)
        return list(_described(document, path))
    except OSError as error:
        raise HostLimit(f"{path} can't be read: {error.strerror}", hint="see its owner and mode") from error
    except (ValueError, RecursionError) as error:
        raise HostLimit(
            f"{path} is no CDI specification: {str(error)[:200]}",
            hint="write it anew (nvidia-ctk cdi generate), or remove it",
        ) from error


def _parse(path: str, text: bytes) -> Any:
    if path.endswith(".json"):
        import json

        return json.loads(text)
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _described(document: Any, path: str) -> Iterator[_Device]:
    top = _mapping(document, "the file")
    version, kind = str(top.get("cdiVersion")), top.get("kind")
    if not _VERSIONS.fullmatch(version):
        raise ValueError(f"cdiVersion {version!r} is not one of 0.3.0 to 1.x")
    if kind not in KINDS:
        return
    shared = _mapping(top.get("containerEdits", {}), "containerEdits")
    listed = _list(top, "devices")
    if not listed:
        raise ValueError("devices is empty")
    for each in listed:
        device = _mapping(each, "a device")
        name = device.get("name")
        if not isinstance(name, str | int) or not _NAME.fullmatch(str(name)):
            raise ValueError(f"{name!r} is not the name of a device")
        own = _mapping(device.get("containerEdits", {}), "containerEdits")
        yield _Device(f"{kind}={name}", own, shared, path)


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not a mapping")
    return value


def _list(value: Mapping[str, Any], key: str) -> list[Any]:
    found = value.get(key)
    if found is None:
        return []
    if not isinstance(found, list):
        raise ValueError(f"{key} is not a list")
    return found


def _edits(chosen: list[_Device], root: str) -> Edits:
    nodes: dict[str, Node] = {}
    mounts: dict[str, Bind] = {}
    env: dict[str, str] = {}
    links: dict[str, str] = {}
    groups: dict[int, None] = {}
    notes: dict[str, None] = {}
    for device in chosen:
        for part in (device.shared, device.own):
            try:
                for each in _list(part, "deviceNodes"):
                    node = _node(_mapping(each, "a device node"), root)
                    nodes[node.path] = node
                for each in _list(part, "mounts"):
                    bind, note = _mount(_mapping(each, "a mount"), root)
                    if bind is not None:
                        mounts[bind.target] = bind
                    if note:
                        notes[note] = None
                for text in _list(part, "env"):
                    _variable(text, env, notes)
                for each in _list(part, "hooks"):
                    links |= _hook(_mapping(each, "a hook"), notes)
                for number in _list(part, "additionalGids"):
                    if isinstance(number, int) and not isinstance(number, bool) and 0 < number < 1 << 32:
                        groups[number] = None
            except ValueError as error:
                raise HostLimit(
                    f"{device.name} in {device.file}: {error}", hint="see docs/gpu.md for what is obeyed"
                ) from None
    if not nodes:
        raise HostLimit(
            f"{', '.join(d.name for d in chosen)}: no device node is named", hint="write the file anew"
        )
    links |= _sonames(mounts)
    if links:
        env["LD_LIBRARY_PATH"] = LIBRARIES
    return Edits(
        devices=tuple(device.name for device in chosen),
        nodes=tuple(nodes.values()),
        mounts=tuple(mounts.values()),
        env=tuple(env.items()),
        links=tuple(links.items()),
        groups=tuple(groups),
        notes=tuple(notes),
    )


def _plain(path: object) -> str:
    if (
        not isinstance(path, str)
        or not path.startswith("/")
        or os.path.normpath(path) != path
        or path.startswith("//")
        or not path.isprintable()
    ):
        raise ValueError(f"{str(path)[:100]!r} is not a plain absolute path")
    return path


def _node(part: Mapping[str, Any], root: str) -> Node:
    path = _plain(part.get("path"))
    source = _plain(part.get("hostPath") or path)
    for each in (path, source):
        if not _NODE.fullmatch(each):
            raise ValueError(f"{each} is not a device of a GPU")
    if part.get("type") not in (None, "", "c", "u"):
        raise ValueError(f"{path} is not a character device")
    try:
        seen = os.lstat(os.path.join(root, source[1:]))  # a link could lead to any device
    except OSError as error:
        raise ValueError(f"{source}: {error.strerror}: is the driver loaded?") from None
    if not stat.S_ISCHR(seen.st_mode):
        raise ValueError(f"{source} is not a character device")
    return Node(path, source, os.major(seen.st_rdev), os.minor(seen.st_rdev))


def _mount(part: Mapping[str, Any], root: str) -> tuple[Bind | None, str]:
    source, target = _plain(part.get("hostPath")), _plain(part.get("containerPath"))
    real = _inside(root, source)
    if real is None:
        return None, f"{source} is not here, so it is not shown"
    if not (target.startswith(_DRIVERS) and source.startswith(_DRIVERS) and real.startswith(_DRIVERS)):
        return None, f"{source} is not a file of a driver, so it is not shown"
    mode = os.stat(os.path.join(root, real[1:])).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return None, f"{source} is neither a file nor a folder (a service's socket?), so it is not shown"
    return Bind(os.path.join(root, real[1:]) if root != "/" else real, target, read_only=True), ""


def _inside(root: str, path: str) -> str | None:
    """Where a path leads below ``root``, as a path that begins with ``/``; None if to nothing."""
    top = os.path.realpath(root)
    real = os.path.realpath(os.path.join(top, path[1:]))
    if not os.path.exists(real):
        return None
    if top == "/":
        return real
    return "/" + os.path.relpath(real, top) if real.startswith(top + "/") else None


def _variable(text: Any, env: dict[str, str], notes: dict[str, None]) -> None:
    name, equals, value = str(text).partition("=")
    if not equals or not _VARIABLE.fullmatch(name) or "\0" in value:
        raise ValueError(f"{str(text)[:60]!r} is not a variable")
    if name in _NOT_VARIABLES:
        notes[f"the variable {name} is not set: it decides what programs load"] = None
        return
    env[name] = value


def _hook(part: Mapping[str, Any], notes: dict[str, None]) -> dict[str, str]:
    """What a hook would have done, as links; its folders of libraries are covered by :func:`_sonames`."""
    words = [str(word) for word in _list(part, "args")]
    program = os.path.basename(str(part.get("path")))
    if program not in ("nvidia-cdi-hook", "nvidia-ctk", "nvidia-container-toolkit") or not words:
        raise ValueError(f"it wants the program {str(part.get('path'))[:80]} run, which is not known here")
    verb = next((word for word in words[1:] if word != "hook" and not word.startswith("-")), "")
    if verb == "create-symlinks":
        return dict(_links(words))
    if verb == "update-ldcache":
        return {}
    if verb in _HARMLESS_HOOKS:
        notes[f"{program} {verb} is not run"] = None
        return {}
    raise ValueError(f"it wants {program} {verb[:40]!r} run, which is not known here")


def _links(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """``--link TARGET::PATH``: only the name of a library counts, its place is ours."""
    given = [word.removeprefix("--link=") for word in words if word.startswith("--link=")]
    listed = list(words)
    given += [listed[at + 1] for at, word in enumerate(listed[:-1]) if word == "--link"]
    for text in given:
        target, separator, path = text.partition("::")
        name = os.path.basename(path)
        if separator and ".so" in name and _NAME.fullmatch(name):
            where = target if target.startswith("/") else os.path.join(os.path.dirname(path), target)
            yield f"{LIBRARIES}/{name}", os.path.normpath(where)


def _sonames(mounts: Mapping[str, Bind]) -> dict[str, str]:
    """Links ``libx.so.1`` to ``libx.so.550.54``: the name that the linker asks for, as ldconfig makes."""
    found = {}
    for target in mounts:
        name = os.path.basename(target)
        match = re.fullmatch(r"(lib[A-Za-z0-9_+-]+\.so)\.\d+\.\d+(\.\d+)*", name)
        if match:
            found[f"{LIBRARIES}/{match.group(1)}.1"] = target
    return found


def write_links(found: Edits, folder: str) -> Bind | None:
    """Make the links of ``found`` in a new folder on the host; how it is shown inside, if there are any.

    Raises:
        OSError: the folder can't be written.
    """
    if not found.links:
        return None
    Path(folder).mkdir(mode=0o755, parents=True)
    for path, target in found.links:
        os.symlink(target, os.path.join(folder, os.path.basename(path)))
    return Bind(folder, LIBRARIES, read_only=True)
