"""What of ours an engine has: images of templates, sent once, and a note in the state root of each that was.

The notes (``<state root>/engines/NAME.json``) say which layers an image was made from. Once one of those is
gone nobody asks for the image again: :func:`collect` takes it from the engine, as `ringfence template gc`
does with everything else that is of no use.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringfence.model.errors import NotFound, RuntimeUnavailable, StartFailed
from ringfence.runtimes.engines import endpoints, images
from ringfence.runtimes.engines.client import Client, EngineError

FOLDER = "engines"  # in the state root


class Stock:
    """The images of one engine, as one driver uses them."""

    def __init__(self, engine: str, client: Callable[[], Client]) -> None:
        self._engine = engine
        self._client = client
        self._names: dict[tuple[str, ...], str] = {}  # of layers that were looked at
        self._sending = asyncio.Lock()

    async def foreign(self, image: str) -> tuple[str, tuple[str, ...]]:
        """An image that the engine has by itself: its id, and the volumes that it declares.

        Raises:
            NotFound: it has none of that name.
        """
        try:
            found = await self._client().call("GET", f"/images/{image}/json")
        except EngineError as error:
            raise NotFound(
                f"{self._engine} has no image {image}", hint=f"{self._engine} pull {image}", image=image
            ) from error
        volumes = (found.get("Config") or {}).get("Volumes") or {}
        return str(found["Id"]), tuple(sorted(volumes))

    async def own(self, template: str, layers: tuple[str, ...], folder: str) -> str:
        """The name of the image of these layers (topmost first), sent if the engine has it not.

        Args:
            template: ``host`` or a digest.
            layers: folders.
            folder: of the sandbox; of which state root it is decides where the note is kept.

        Raises:
            StartFailed: a layer can't be read, or the engine does not take it.
            RuntimeUnavailable: the engine can't be reached.
        """
        name = self._names.get(layers)
        try:
            if name is None:
                name = await asyncio.to_thread(images.name_of, template, layers)
            async with self._sending:  # a dozen that start at once send it once
                if not await self._has(name):
                    await asyncio.to_thread(self._note, name, template, layers, folder)
                    await images.load(self._client(), name, template, layers)
        except EngineError as error:
            raise StartFailed(
                f"{self._engine} refused: {error.message}", step="image", status=str(error.status)
            ) from error
        except OSError as error:
            raise StartFailed(
                f"{error.filename or 'image'}: {error.strerror}", step="image", errno=str(error.errno)
            ) from error
        self._names[layers] = name
        return name

    async def _has(self, name: str) -> bool:
        try:
            await self._client().call("GET", f"/images/{name}/json")
        except EngineError as error:
            if error.status != 404:
                raise
            return False
        return True

    def _note(self, name: str, template: str, layers: tuple[str, ...], folder: str) -> None:
        above, kind = os.path.split(os.path.dirname(os.path.abspath(folder)))
        if kind != "sandboxes":
            return  # of a probe: a few kilobytes that are the same every time
        place = Path(above) / FOLDER
        place.mkdir(mode=0o700, exist_ok=True)
        record = {
            "engine": self._engine,
            "address": self._client().endpoint.text,
            "image": name,
            "template": template,
            "layers": layers,
        }
        # Of each engine one: the same image may have been sent to several.
        aside = place / f".{secrets.token_hex(8)}"
        aside.write_text(json.dumps(record))
        aside.rename(place / f"{self._engine}-{name.rpartition(':')[2]}.json")


def collect(
    state: Path, going: Callable[[str], bool] = lambda layer: False, dry_run: bool = False
) -> tuple[list[str], list[str]]:
    """Remove from engines the images whose layers are gone. Blocks; may be called with a loop running.

    An engine that can't be reached, or that is not the one its user's tools would speak to now, is left for
    another time, and so is an image that a container uses.

    Args:
        state: the state root.
        going: of a layer's folder, whether it is about to go.
        dry_run: only say what would go.

    Returns:
        The names of the images that are gone, and what went wrong, in words.
    """
    stale = []
    for note in _notes(state / FOLDER):
        record = _read(note)
        if record is None:  # not ours, or written by half: nothing can be done with it
            if not dry_run:
                note.unlink(missing_ok=True)
        elif any(going(layer) or not os.path.isdir(layer) for layer in record["layers"]):
            stale.append((note, record))
    if not stale:
        return [], []
    if dry_run:
        return [record["image"] for _, record in stale], []
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(_remove(stale))).result()


async def _remove(stale: list[tuple[Path, dict[str, Any]]]) -> tuple[list[str], list[str]]:
    gone, failures = [], []
    for note, record in stale:
        with contextlib.suppress(RuntimeUnavailable):
            endpoint = endpoints.find(record["engine"])
            if endpoint.text != record["address"]:
                continue
            try:
                await Client(endpoint).call("DELETE", f"/images/{record['image']}")
            except EngineError as error:
                if error.status == 409:
                    continue
                if error.status != 404:
                    failures.append(f"{record['engine']} keeps {record['image']}: {error.message}")
                    continue
            else:
                gone.append(str(record["image"]))
            note.unlink(missing_ok=True)
    return gone, failures


def _notes(folder: Path) -> list[Path]:
    try:
        for path in list(folder.glob(".*")):  # of a writer that was killed, some time ago
            if path.lstat().st_mtime < time.time() - 3600:
                path.unlink(missing_ok=True)
        return sorted(path for path in folder.iterdir() if path.suffix == ".json")
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read(note: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(note.read_text())
        whole = all(isinstance(record[key], str) for key in ("engine", "address", "image"))
        ours = str(record["image"]).startswith(images.REPOSITORY + ":") and record["engine"] in (
            "docker",
            "podman",
        )
        layers = all(isinstance(layer, str) for layer in record["layers"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if whole and ours and layers else None
