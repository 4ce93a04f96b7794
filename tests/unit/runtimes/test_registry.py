"""Which runtimes there are, built in and from other packages."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from ringfence.model.errors import InvalidRequest, NotFound, RuntimeUnavailable
from ringfence.model.levels import Boundary, Level
from ringfence.runtimes import registry
from ringfence.runtimes.contract import Runtime
from ringfence.runtimes.guarding import Guarded


class Foreign:
    name = "foreign"
    level = Level.L2
    boundary = Boundary.NAMESPACES

    def __init__(self, context: Any) -> None:
        self.context = context


class Broken:
    def __init__(self, context: Any) -> None:
        raise RuntimeError("no library")


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        EntryPoint("zebra", f"{__name__}:Foreign", registry.GROUP),
        EntryPoint("foreign", f"{__name__}:Foreign", registry.GROUP),
        EntryPoint("broken", f"{__name__}:Broken", registry.GROUP),
        EntryPoint("missing", "no.such.module:Driver", registry.GROUP),
        EntryPoint("jail", f"{__name__}:Foreign", registry.GROUP),
    ]

    def entry_points(group: str) -> list[EntryPoint]:
        return entries if group == registry.GROUP else []

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)


CONTEXT: Any = object()


def test_built_in_runtimes_come_first(packages: None) -> None:
    assert registry.names() == [*registry.BUILT_IN, "broken", "foreign", "missing", "zebra"]
    assert next(iter(registry.BUILT_IN)) == "jail"


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_every_built_in_runtime_is_guarded_and_has_its_name(name: str) -> None:
    runtime = registry.load(name, CONTEXT)
    assert isinstance(runtime, Guarded)
    assert isinstance(runtime, Runtime)
    assert runtime.name == name


def test_a_driver_of_another_package_is_loaded_with_the_context(packages: None) -> None:
    runtime = registry.load("foreign", CONTEXT)
    assert isinstance(runtime.driver, Foreign)
    assert runtime.driver.context is CONTEXT


def test_no_package_can_take_a_built_in_name(packages: None) -> None:
    assert not isinstance(registry.load("jail", CONTEXT).driver, Foreign)


def test_an_unknown_runtime_says_which_there_are() -> None:
    with pytest.raises(NotFound, match="'gvisro'") as caught:
        registry.load("gvisro", CONTEXT)
    assert "jail" in caught.value.hint


@pytest.mark.parametrize("name", ["broken", "missing"])
def test_a_broken_package_is_named(packages: None, name: str) -> None:
    with pytest.raises(RuntimeUnavailable, match=name) as caught:
        registry.load(name, CONTEXT)
    assert "package" in caught.value.hint


def test_names_must_agree(packages: None) -> None:
    with pytest.raises(InvalidRequest, match="zebra"):
        registry.load("zebra", CONTEXT)


def test_loading_one_runtime_does_not_look_for_packages() -> None:
    code = (
        "import sys; from ringfence.runtimes import registry; registry.load('fake', None);"
        "unwanted = {'importlib.metadata', 'ringfence.runtimes.jail', 'tarfile', 'msgspec', 'yaml'};"
        "bad = unwanted & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
