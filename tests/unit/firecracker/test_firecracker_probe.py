"""What the probe says where something is missing: with made-up programs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.model.errors import RuntimeUnavailable, Unsupported
from ringfence.runtimes.contract import Health
from ringfence.runtimes.firecracker import probing
from ringfence.runtimes.firecracker.driver import FirecrackerRuntime
from ringfence.runtimes.launching.probing import specimen


def driver(folder: Path, monkeypatch: pytest.MonkeyPatch, *, root: bool = True, **programs: str) -> Any:
    """A driver that finds these programs, each saying what it is given."""
    folder.mkdir(exist_ok=True)
    for name, says in programs.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\necho '{says}'\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return FirecrackerRuntime(SimpleNamespace(root=root))  # type: ignore[arg-type]


async def test_nothing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = await driver(tmp_path, monkeypatch).probe()
    assert found.health == Health.UNAVAILABLE
    assert "firecracker and jailer not installed" in found.reason
    assert "ringfence setup firecracker" in found.remedy


async def test_without_its_jailer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = await driver(tmp_path, monkeypatch, firecracker="Firecracker v1.15.1").probe()
    assert (found.health, found.reason) == (Health.UNAVAILABLE, "jailer not installed")


@pytest.mark.parametrize(
    ("firecracker", "jailer", "words"),
    [
        ("Firecracker v1.4.0", "Jailer v1.4.0", "too old"),
        ("something else", "Jailer v1.15.1", "too old"),
        ("Firecracker v1.15.1", "Jailer v1.14.4", "belong to one release"),
        ("Firecracker v1.15.1", "", "belong to one release"),
    ],
)
async def test_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, firecracker: str, jailer: str, words: str
) -> None:
    found = await driver(tmp_path, monkeypatch, firecracker=firecracker, jailer=jailer).probe()
    assert found.health == Health.UNAVAILABLE
    assert words in found.reason


async def test_known_holes_are_told_whatever_else_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "KVM", "/nowhere")
    programs = {"firecracker": "Firecracker v1.13.0", "jailer": "Jailer v1.13.0"}
    found = await driver(tmp_path, monkeypatch, **programs).probe()
    assert found.vulnerabilities == ("CVE-2026-5747", "CVE-2026-1386")
    assert found.reason == "there is no /dev/kvm"
    assert (
        await driver(tmp_path, monkeypatch, root=False, **programs).probe()
    ).reason == "the jailer needs root"


def test_what_it_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    programs = {"firecracker": "Firecracker v1.15.1", "jailer": "Jailer v1.15.1"}
    spec = specimen(str(tmp_path / "sandbox"), True)
    made = driver(tmp_path / "bin", monkeypatch, **programs)
    fit = replace(spec, root=replace(spec.root, template="sha256:0"))
    made.check(fit)
    for changed, words in (
        (replace(fit, network="open"), "network card"),
        (replace(fit, gpus=1), "PCI passthrough"),
        (spec, "host's own files"),
        (replace(fit, root=replace(fit.root, image="debian:12")), "container engine's"),
    ):
        with pytest.raises(Unsupported, match=words):
            made.check(changed)
    with pytest.raises(RuntimeUnavailable, match="needs root"):
        driver(tmp_path / "bin", monkeypatch, root=False).check(fit)
    with pytest.raises(RuntimeUnavailable, match="not installed"):
        driver(tmp_path / "empty", monkeypatch).check(fit)


@pytest.mark.parametrize(
    ("text", "telling"),
    [
        ("", ""),
        (
            "\x1b[0mringfence-vminit: root: /dev/vda: No such device\r\n[ 1.0] reboot: Restarting\n",
            "ringfence-vminit:",
        ),
        ("a\nKernel panic - not syncing: x\nb\n", "Kernel panic"),
        ("only this\n", "only this"),
    ],
)
def test_last_words(text: str, telling: str) -> None:
    assert probing.last_words(text).startswith(telling)
