"""A node on a docker daemon of the tests' own, and a small root file system."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ringfence.conformance.harness import Kit, opened
from support.engines import Engine, docker


@pytest.fixture
async def kit(docker_engine: Engine) -> AsyncIterator[Kit]:
    """A node with docker; afterwards nothing is left, no container either."""
    state = Path(tempfile.mkdtemp(prefix="rf-docker-"))
    state.chmod(0o711)  # the sandbox's own user passes through
    async with opened(state, "docker") as made:
        yield made
    shutil.rmtree(state)
    assert docker("ps", "--all", "--quiet") == ""
    assert docker("volume", "ls", "--quiet") == ""


def _copy_with_libraries(program: str, root: Path, target: str) -> None:
    (root / target).write_bytes(Path(program).read_bytes())
    (root / target).chmod(0o755)
    for word in subprocess.run(["ldd", program], capture_output=True, text=True).stdout.split():
        if word.startswith("/"):
            library = root / word.lstrip("/")
            library.parent.mkdir(parents=True, exist_ok=True)
            library.write_bytes(Path(word).read_bytes())
            library.chmod(0o755)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root file system: a shell and a few programs."""
    root = tmp_path / "root"
    for folder in ("bin", "etc", "data", "workspace", "tmp"):
        (root / folder).mkdir(parents=True)
    for name in ("sh", "cat", "echo", "id", "touch", "stat"):
        program = subprocess.run(
            ["sh", "-c", f"command -v {name} | grep / || echo /bin/{name}"], capture_output=True
        )
        _copy_with_libraries(program.stdout.decode().strip(), root, f"bin/{name}")
    return root


@pytest.fixture
def image(docker_engine: Engine, root: Path) -> Iterator[str]:
    """An image that the engine has and that is not ours, with a volume and an unkind environment."""
    tar = subprocess.run(["tar", "-C", root, "-c", "."], capture_output=True, check=True).stdout
    docker(
        "import", "-c", "VOLUME /data", "-c", "USER 77", "-c", "ENV FROM_IMAGE=yes", "-", "mine:1", stdin=tar
    )
    yield "mine:1"
    docker("rmi", "-f", "mine:1")
