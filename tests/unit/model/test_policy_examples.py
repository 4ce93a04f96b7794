"""Every example that people will copy is loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ringfence.model import policies, policy_file
from ringfence.model.errors import PolicyError
from ringfence.model.policy_checks import BASELINE

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "examples" / "policies").glob("*.yaml"))
PAGE = (ROOT / "docs" / "policy.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_example_file(path: Path) -> None:
    assert policies.load(path).name


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_example_on_the_page_is_the_file(block: str) -> None:
    policy = policies.load(block)
    known = {policies.load(path).name: policies.load(path) for path in FILES}
    assert known[policy.name] == policy


def test_there_is_one_example_for_each_preset() -> None:
    assert {policies.load(path).trust for path in FILES} == {None, *policies.PRESETS}
    assert len(BLOCKS) == len(FILES)


def test_the_page_has_every_key_and_no_other() -> None:
    documented = set(re.findall(r"^\| `([a-zA-Z.\[\]]+)` \|", PAGE, re.M))
    expected = {"apiVersion", "kind", "metadata.name", "preset"}
    for section in ("isolation", "filesystem", "process", "resources", "limits", "network", "audit"):
        expected |= {f"{section}.{key}" for key in getattr(policy_file, f"_{section.upper()}")}
    expected |= {f"network.allow[].{key}" for key in policy_file._RULE}
    assert documented == expected


def test_the_messages_on_the_page_are_real() -> None:
    text = "apiVersion: ringfence/v1\nkind: Policy\nproces: {}\n"
    with pytest.raises(PolicyError) as caught:
        policies.load(text, file="tools.yaml")
    assert "tools.yaml:3: proces: unknown key" in PAGE
    assert str(caught.value) == "tools.yaml:3: proces: unknown key"


def test_the_baseline_is_on_the_page() -> None:
    section = PAGE[PAGE.index("## What no policy can change") :]
    for word in ("root", "capability", "no_new_privs", "system call filter", "/proc", "swap", "AppArmor"):
        assert word in section
        assert any(word in sentence for sentence in BASELINE)
