"""The firecracker driver with scripted programs and a real guest agent behind them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringfence.guest.link import GuestLink
from ringfence.guest.processes import ProcessSpec
from ringfence.runtimes.context import RuntimeContext
from ringfence.runtimes.contract import AGENT_UID, MAP_SIZE, Handle, Identity, IdMap, StartSpec
from ringfence.runtimes.firecracker.driver import FirecrackerRuntime
from ringfence.runtimes.guarding import Guarded, guard
from ringfence.runtimes.launching.probing import specimen
from support import firecracker_fake

FIRST = 0x7EEE_0000


class Bench:
    """One driver, its programs in ``programs``, sandboxes below ``base/sandboxes``."""

    def __init__(self, base: Path, programs: Path, context: RuntimeContext) -> None:
        self.base, self.programs, self.context = base, programs, context
        self.driver = FirecrackerRuntime(context)
        self.runtime: Guarded = guard(self.driver)
        self.made: list[Handle] = []
        self.count = 0
        self.template = base / "template"
        for name in ("etc", "usr", "workspace", "tmp"):
            (self.template / name).mkdir(parents=True, exist_ok=True)

    def faults(self, **faults: Any) -> None:
        """Of the programs, from now on."""
        firecracker_fake.set_faults(self.programs, faults)

    def calls(self) -> list[dict[str, Any]]:
        """What the programs were told."""
        return firecracker_fake.calls(self.programs)

    def spec(self, **changes: Any) -> StartSpec:
        """A machine of its own, on the test's template."""
        folder = self.base / "sandboxes" / f"sb-{self.count}"
        self.count += 1
        folder.mkdir(mode=0o711, parents=True)
        made = specimen(str(folder), True)
        shutil.rmtree(folder / "skeleton")
        first = FIRST + self.count % 16 * MAP_SIZE
        return replace(
            made,
            id=f"sb-{self.count}",
            root=replace(made.root, lowers=(str(self.template),), template="sha256:" + "1" * 64),
            identity=Identity(1000, 1000, (IdMap(0, first, MAP_SIZE),), AGENT_UID),
            memory=64 << 20,
            **changes,
        )

    async def start(self, spec: StartSpec | None = None) -> Handle:
        """Started; destroyed with the bench."""
        handle = await self.runtime.start(spec or self.spec())
        self.made.append(handle)
        return handle

    async def run(self, handle: Handle, script: str) -> str:
        """What a shell script prints."""
        async with await GuestLink.open(await self.runtime.connect(handle)) as link:
            process = await link.start(ProcessSpec(("/bin/sh", "-c", script), merge_stderr=True))
            text = b"".join([each.data async for each in process])
            await process.wait()
        return text.decode(errors="replace").strip()

    def jail(self, handle: Handle) -> Path:
        """The root of a machine's jail."""
        return Path(handle.folder) / handle.data["jail"]

    def guest_heard(self, handle: Handle) -> list[str]:
        """The calls to the guest's first process."""
        path = self.jail(handle).parent / "guest/control.log"
        return path.read_text().splitlines() if path.exists() else []

    def left(self) -> list[str]:
        """Files of sandboxes that are still there."""
        return sorted(
            str(p.relative_to(self.base)) for p in (self.base / "sandboxes").rglob("*") if p.is_file()
        )
