"""A template store of the test's own, and a registry on loopback."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.images.store import TemplateStore
from support.leaks import Leaks

PATIENCE = 60  # seconds for a program to be up


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TemplateStore]:
    """Afterwards nothing that was being made is left."""
    with TemplateStore.open(tmp_path / "images") as made:
        yield made
    assert os.listdir(tmp_path / "images/tmp") == []


@pytest.fixture
def home(no_leaks: Leaks) -> Iterator[TemplateStore]:
    """The store of the state root that nodes of the test open."""
    assert no_leaks.home is not None
    with TemplateStore.open(no_leaks.home / "images") as made:
        yield made


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``127.0.0.1:PORT`` of a real, empty registry."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("not installed: docker-registry")
    folder = tmp_path_factory.mktemp("registry")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = folder / "config.yml"
    config.write_text(
        "version: 0.1\n"
        "log: {level: error, accesslog: {disabled: true}}\n"
        f"storage: {{filesystem: {{rootdirectory: {folder}/data}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n"
    )
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [program, "serve", str(config)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        end = time.monotonic() + PATIENCE
        while True:
            with socket.socket() as dial:
                if dial.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < end, "the registry does not listen"
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
