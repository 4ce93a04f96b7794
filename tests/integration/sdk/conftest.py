"""One service for all tests of the SDK, configured as a user configures it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ringfence
from ringfence.sdk import settings
from ringfence.sdk.background import BACKGROUND
from support.awaiting import Adapted
from support.sdk_halves import Half
from support.serving import Serving, needs_root_or_users, serving


@pytest.fixture(scope="package")
def served() -> Iterator[Serving]:
    """The service."""
    needs_root_or_users()
    with serving("--no-egress") as made:
        yield made


@pytest.fixture
def service(served: Serving, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    """The service, named by the environment."""
    monkeypatch.setenv(settings.URL, served.url)
    monkeypatch.setenv(settings.KEY, served.key)
    monkeypatch.setenv(settings.FILE, "/nonexistent")
    yield served
    BACKGROUND.end()


@pytest.fixture(params=["async", "sync"])
def sdk(request: pytest.FixtureRequest, service: Serving) -> Half:
    """Both halves, one after the other."""
    kinds = ("Sandbox", "Pool", "Volume", "Template", "Snapshot", "Service")
    if request.param == "async":
        return Half("async", *(getattr(ringfence, f"Async{kind}") for kind in kinds))
    return Half("sync", *(Adapted(getattr(ringfence, kind)) for kind in kinds))
