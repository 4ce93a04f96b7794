"""What of the suites runs on which runtime when nobody has chosen one."""

from __future__ import annotations

import pytest

# A start of Podman takes a second or two, and its containers are made from the same document as Docker's, by
# another program: what is left to show is that it makes them so. ``--ringfence-runtime podman`` runs all.
WITH_PODMAN = (
    "probe", "capabilities", "ended", "names_the_step", "what_it_can_not_do", "paused_wall", "level_two",
    "what_the_inside_shows", "user_zero", "survives_kill_9", "ephemeral_sandbox", "test_memory",
    "test_processes",
)  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the rest of Podman's."""
    if "podman" in config.getoption("--ringfence-runtime"):
        return
    left = [
        item
        for item in items
        if getattr(item, "callspec", None) is not None
        and item.callspec.params.get("ringfence_runtime") == "podman"  # type: ignore[attr-defined]
        and not any(part in item.name for part in WITH_PODMAN)
    ]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
