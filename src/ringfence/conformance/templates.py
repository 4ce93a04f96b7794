"""A template for runtimes that can't show the host's programs: a small Debian with Python.

Made once a machine and kept as a tar in the cache folder; each state root imports it. Another template can be
named in ``RINGFENCE_CONFORMANCE_TEMPLATE`` (a source as ``ringfence template add`` takes it): it must have
``/usr/bin/python3``, a shell, and for level 4 an init.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from ringfence.images import debian
from ringfence.images.importing import ImportOptions, add
from ringfence.images.store import TemplateStore
from ringfence.model.errors import NotFound
from ringfence.runtimes.vm.kernel import cache_root

NAME = "conformance"
VARIABLE = "RINGFENCE_CONFORMANCE_TEMPLATE"
SUITE = "bookworm"
PACKAGES = ("python3", "procps", "sysvinit-core")


def ensure(state: Path) -> None:
    """The template of that name is in the store of the state root.

    Raises:
        RingfenceError: it can't be made; the message says why.
    """
    with TemplateStore.open(state / "images") as store:
        with contextlib.suppress(NotFound):
            store.resolve(NAME)
            return
        source = os.environ.get(VARIABLE) or f"rootfs:{archive()}"
        add(store, source, ImportOptions(name=NAME))


def archive(packages: tuple[str, ...] = PACKAGES) -> Path:
    """The root file system as a tar, made if it is not there.

    Raises:
        RuntimeUnavailable: mmdebstrap is not here, or can't reach a mirror.
    """
    folder = cache_root() / "tests"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{SUITE}-{'-'.join(packages)}.tar"
    with open(folder / f".{path.name}.lock", "w") as lock:  # one makes it, others wait
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return path
        work = folder / f".{path.name}.new"
        try:
            with debian.build(SUITE, packages=packages) as built, open(work, "wb") as file:
                while piece := built.read(1 << 20):
                    file.write(piece)
                built.check()
            work.rename(path)
        finally:
            work.unlink(missing_ok=True)
    return path
