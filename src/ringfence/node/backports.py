"""Installing gVisor's ``runsc`` on Debian 12: a pinned version from the release's backports.

The release's own gVisor is older than the platform that Ringfence needs. The package comes from the mirror
that this host uses already, and apt checks its signature; the host's own list of sources stays as it is.

Only the standard library, since a checkout is set up with it before anything else is there:
``python3 src/ringfence/node/backports.py``.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator

RUNSC = "0.0~20240729.0-4~bpo12+2"
SUITE = "bookworm"
TIMEOUT = 600.0  # seconds of one call of apt


class Failed(Exception):
    """It could not be installed; the text is the last words of the program that failed."""


def codename(root: str = "/") -> str:
    """The release's name, as ``bookworm``; empty if it says none."""
    for path in ("etc/os-release", "usr/lib/os-release"):
        try:
            with open(os.path.join(root, path), encoding="utf-8", errors="replace") as file:
                found = re.search(r'^VERSION_CODENAME="?([a-z]+)"?$', file.read(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return found.group(1)
    return ""


def sources(root: str = "/", suite: str = SUITE) -> tuple[str, str]:
    """(a ``.sources`` paragraph, a ``.list`` line) for the backports of this host's mirror; one is empty."""
    for paragraph in _paragraphs(_texts(root, ["etc/apt/sources.list.d/*.sources"])):
        fields = dict(re.findall(r"^([A-Za-z-]+):[ \t]*(.*(?:\n[ \t].*)*)$", paragraph, re.MULTILINE))
        if suite in fields.get("Suites", "").split() and "deb" in fields.get("Types", "deb").split():
            fields |= {"Suites": f"{suite}-backports", "Components": "main", "Types": "deb"}
            return "".join(f"{key}: {value}\n" for key, value in fields.items()), ""
    for text in _texts(root, ["etc/apt/sources.list", "etc/apt/sources.list.d/*.list"]):
        for line in text.splitlines():
            found = re.match(rf"(deb (?:\[[^\]]*\] )?\S+) {suite} ", line)
            if found:
                return "", f"{found.group(1)} {suite}-backports main\n"
    return "", ""


def _texts(root: str, patterns: Iterable[str]) -> Iterator[str]:
    for pattern in patterns:
        for path in sorted(glob.glob(os.path.join(root, pattern))):
            with open(path, encoding="utf-8", errors="replace") as file:
                yield file.read()


def _paragraphs(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        yield from re.split(r"\n\s*\n", "\n".join(lines))


def install(root: str = "/") -> None:
    """Download and install the pinned package. Needs root; nothing is left but the package.

    Raises:
        Failed: no source, no network, or dpkg refused.
    """
    modern, plain = sources(root)
    if not modern and not plain:
        raise Failed(f"apt has no source of {SUITE} to take the backports from")
    with tempfile.TemporaryDirectory(prefix="ringfence-setup-") as folder:
        parts, lists = os.path.join(folder, "parts"), os.path.join(folder, "lists")
        os.makedirs(os.path.join(lists, "partial"))
        os.mkdir(parts)
        for name, text in (("backports.sources", modern), ("backports.list", plain)):
            if text:
                with open(os.path.join(parts, name), "w", encoding="utf-8") as file:
                    file.write(text)
        options = [
            "-q", "-o", "APT::Sandbox::User=root", "-o", "Dir::Etc::sourcelist=/dev/null",
            "-o", f"Dir::Etc::sourceparts={parts}", "-o", f"Dir::State::lists={lists}",
        ]  # fmt: skip
        _call(["apt-get", *options, "update"], folder)
        _call(["apt-get", *options, "download", f"runsc={RUNSC}"], folder)
        packages = glob.glob(os.path.join(folder, "runsc_*.deb"))
        if len(packages) != 1:
            raise Failed("apt-get downloaded no package")
        _call(["dpkg", "-i", packages[0]], folder)


def _call(argv: list[str], folder: str) -> None:
    try:
        done = subprocess.run(
            argv,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
            env=os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failed(f"{argv[0]}: {error}") from error
    if done.returncode:
        words = done.stdout.strip().splitlines()
        raise Failed(f"{argv[0]}: {words[-1] if words else done.returncode}")


def main() -> int:
    """For ``scripts/setup.sh``: says what it does; 0 also where there is nothing to do."""
    if shutil.which("runsc", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin"):
        return 0
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return 0
    if codename() != SUITE:
        print("setup: no pinned gVisor (runsc) for this release; going on without it")
        return 0
    print(f"setup: installing gVisor (runsc {RUNSC}) from {SUITE}-backports", flush=True)
    try:
        install()
    except Failed as error:
        print(f"setup: could not install gVisor: {error}; going on without it")
        return 0
    return 10  # something was changed


if __name__ == "__main__":
    sys.exit(main())
