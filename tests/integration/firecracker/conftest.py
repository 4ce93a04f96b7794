"""A bench with the firecracker driver; afterwards nothing is left."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ringfence import _native
from ringfence.model.errors import RuntimeUnavailable
from ringfence.runtimes.context import RuntimeContext
from ringfence.runtimes.firecracker import machine
from ringfence.runtimes.vm import kernel
from support import firecracker_fake
from support.firecracker_bench import Bench


@pytest.fixture(scope="session")
def base() -> Iterator[Path]:
    """A state root for the session: the kernel is taken apart and the template's disk made once."""
    folder = Path(tempfile.mkdtemp(prefix="rf-fc-", dir="/tmp"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
async def bench(base: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    """See the module."""
    if os.geteuid() != 0:
        pytest.skip("the jailer needs root")
    if not shutil.which("mkfs.erofs") and not shutil.which("mksquashfs"):
        pytest.skip("neither mkfs.erofs nor mksquashfs is installed")
    try:
        kernel.find()
    except RuntimeUnavailable as error:
        pytest.skip(f"no guest kernel: {error.message}")
    programs = firecracker_fake.install(base / "bin", _native.agent())
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("RINGFENCE_HOME", str(base))  # where a probe keeps its disk and kernel
    context = await RuntimeContext.open()
    made = Bench(base, programs, context)
    try:
        yield made
    finally:
        for handle in made.made:
            await made.runtime.destroy(handle)
        await context.close()
        left = made.left()
        for name in ("sandboxes", "saved", "bin"):
            shutil.rmtree(base / name, ignore_errors=True)
    assert not [path for path in left if f"/{machine.FOLDER}/" in path], left
