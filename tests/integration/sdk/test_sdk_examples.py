"""The examples in docstrings, as they stand, against a real service."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

import ringfence
from ringfence.sdk import _WHERE
from support import examples
from support.serving import Serving

NAMES = (
    "sandbox",
    "process",
    "files",
    "contexts",
    "ports",
    "volumes",
    "templates",
    "pools",
    "jobs",
    "service",
)
PLAIN = ("policy", "results", "wire")
FOUND = [
    pytest.param(text, id=f"{half}{module}:{label}")
    for half, modules in (("", (*NAMES, *PLAIN)), ("blocking.", NAMES))
    for module in modules
    for label, text in examples.examples(importlib.import_module(f"ringfence.sdk.{half}{module}"))
]


def names() -> dict[str, Any]:
    """What examples may use without importing it."""
    found = {name: getattr(importlib.import_module("ringfence.sdk"), name) for name in _WHERE}
    wire = importlib.import_module("ringfence.sdk.wire")
    return found | {"argv": wire.argv, "ringfence": ringfence}


@pytest.mark.parametrize("text", FOUND)
def test_the_example_does_what_it_says(text: str, service: Serving) -> None:
    examples.run(text, names())


def test_both_halves_have_examples() -> None:
    assert len(FOUND) > 30
