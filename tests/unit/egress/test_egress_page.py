"""The policies on the page are policies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ringfence.egress.policy import Rules
from ringfence.model import policies

PAGE = (Path(__file__).parents[3] / "docs" / "egress.md").read_text()
BLOCKS = [block for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.S) if block.startswith("apiVersion")]


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_policy_on_the_page_loads_and_comes_back(block: str) -> None:
    policy = policies.load(block)
    assert policies.from_dict(policies.to_dict(policy)) == policy
    network = policy.door.network
    assert policies.network_from_dict(policies.network_to_dict(network)) == network
    Rules(network)


def test_there_is_one_for_each_case() -> None:
    assert {policies.load(block).name for block in BLOCKS} == {
        "model-api", "packages", "git-read", "database", "guarded-model",
    }  # fmt: skip


def test_ways_to_inject_on_the_page_are_all_of_them() -> None:
    from ringfence.model.policy_network_checks import INJECTIONS

    table = PAGE[PAGE.index("| `inject` |") :].partition("\n\n")[0]
    assert set(re.findall(r"`\{(\w+):", table)) == set(INJECTIONS)


def test_untrusted_code_gets_no_credential_by_the_guard_either() -> None:
    from ringfence.model.errors import PolicyError

    network = {
        "mode": "egress",
        "inference": {"upstream": "https://a.example/v1", "inject": {"bearer": "{{secret:k}}"}},
    }
    document = {"apiVersion": "ringfence/v1", "kind": "Policy", "network": network}
    with pytest.raises(PolicyError) as caught:
        policies.from_dict(document | {"preset": "untrusted"})
    assert caught.value.details["field"] == "network.inference.inject"
    policy = policies.from_dict(document | {"preset": "controlled"})  # the control
    [sentence] = policies.warnings(policy)
    assert "private data (the secret k)" in sentence and "https://a.example/v1" in sentence
    with pytest.raises(PolicyError, match="learn"):
        policies.from_dict(document | {"preset": "controlled", "network": {"mode": "egress", "learn": True}})
