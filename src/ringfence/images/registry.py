"""Fetching an image from a registry into a folder in OCI's layout, with skopeo.

Credentials, mirrors and the list of allowed registries are those of ``images.registries``; nothing is fetched
but through :func:`fetch`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from ringfence.images import registries
from ringfence.images.manifests import machine
from ringfence.model.errors import HostLimit, InvalidRequest, NotFound, RuntimeUnavailable

TIME = 1800.0  # seconds that one image may take
TAG = "image"  # what the image is called in the layout


def fetch(
    place: str, layout: Path, *, insecure: bool = False, authfile: str = "", timeout: float = TIME
) -> str:
    """Copy ``registry/path[:tag][@digest]`` to ``layout``, for this machine; returns its manifest's digest.

    Raises:
        RuntimeUnavailable: skopeo is not here.
        NotFound: the registry has no such image.
        InvalidRequest: no such image for this machine, the reference makes no sense, or its registry is not
            allowed here; then nothing was connected to.
        HostLimit: the registry can't be reached or refuses; the message has its words.
    """
    digest_file = layout.with_name(layout.name + ".digest")
    source = place
    if "@" in place:  # skopeo takes a tag or a digest
        path, _, digest = place.partition("@")
        head, slash, name = path.rpartition("/")
        source = f"{head}{slash}{name.partition(':')[0]}@{digest}"
    with registries.given(place, registries.load(), insecure=insecure, authfile=authfile) as given:
        argv = [
            program(), *given.before, "--override-os", "linux", "--override-arch", machine(), "copy",
            "--quiet", "--all=false", "--digestfile", str(digest_file), *given.after,
            f"docker://{source}", f"oci:{layout}:{TAG}",
        ]  # fmt: skip
        _run(argv, place, timeout, given.descriptors)
    try:
        return digest_file.read_text().strip()
    except OSError:
        return ""


def program() -> str:
    """skopeo's path.

    Raises:
        RuntimeUnavailable: it is not here.
    """
    found = shutil.which("skopeo")
    if found is None:
        raise RuntimeUnavailable(
            "images are fetched from registries with skopeo, which is not here", hint="apt-get install skopeo"
        )
    return found


def _run(argv: list[str], place: str, timeout: float, descriptors: tuple[int, ...] = ()) -> None:
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            pass_fds=descriptors,
            env=os.environ | {"LC_ALL": "C.UTF-8"},
        )
    except subprocess.TimeoutExpired:
        raise HostLimit(
            f"{place} was not fetched within {timeout:.0f} seconds",
            hint="try again, or from a nearer registry",
        ) from None
    if done.returncode:
        raise _refusal(place, done.stderr)


def _refusal(place: str, text: str) -> NotFound | InvalidRequest | HostLimit:
    lines = [line for line in text.strip().splitlines() if line]
    words = lines[-1].partition("msg=")[2].strip('"') or lines[-1] if lines else "it does not say why"
    words = words.replace('\\"', '"')[-400:]
    low = words.lower()
    registry = place.partition("/")[0]
    if "manifest unknown" in low or "name unknown" in low or "not found" in low:
        return NotFound(f"registry {registry} has no {place}: {words}", hint="see if name and tag are right")
    if "no image found in manifest list" in low or "no image found in image index" in low:
        return InvalidRequest(
            f"{place} is not made for linux/{machine()}: {words}", hint="choose an image for this machine"
        )
    if "unauthorized" in low or "authentication required" in low or "denied" in low:
        return HostLimit(
            f"registry {registry} does not let us have {place}: {words}",
            hint="log in first: docker login, or skopeo login, and name the file with --authfile",
        )
    if "server gave http response to https client" in low or "x509" in low or "certificate" in low:
        return HostLimit(
            f"registry {registry} has no certificate that this host trusts: {words}",
            hint="if it is your own on this machine: --insecure",
        )
    if "no space left" in low:
        return HostLimit(
            f"can't fetch {place}: the disk is full", hint="free some space: `ringfence template gc`"
        )
    return HostLimit(f"can't fetch {place}: {words}", hint="see if the registry can be reached from here")
