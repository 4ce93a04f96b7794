"""Which runtime is tried, in which order, and what is said when none will do."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from ringfence.model.errors import NotFound, RuntimeUnavailable, Unsupported
from ringfence.model.levels import Boundary, Level
from ringfence.model.policy import Filesystem, Isolation, Mount, Network, Policy, Process
from ringfence.model.sandbox import SandboxRequest
from ringfence.node.selecting import Rejected, candidates, none_left
from ringfence.runtimes.contract import Capabilities


@dataclass
class Driver:
    name: str
    level: Level = Level.L2
    boundary: Boundary = Boundary.NAMESPACES
    has: Capabilities = field(
        default_factory=lambda: Capabilities(rootless=True, user_zero=True, mounts=True, recover=True)
    )

    def capabilities(self) -> Capabilities:
        return self.has


DRIVERS = {
    driver.name: driver
    for driver in (
        Driver("jail"),
        Driver("bubblewrap", has=Capabilities(rootless=True)),
        Driver("gvisor", Level.L3, Boundary.USERSPACE_KERNEL, Capabilities()),
        Driver("qemu", Level.L4, Boundary.EMULATED, Capabilities(rootless=True)),
        Driver("fake", Level.L1, Boundary.NONE, Capabilities(rootless=True)),
        Driver("theirs", Level.L3, Boundary.HARDWARE, Capabilities(rootless=True)),
    )
}


def tried(request: SandboxRequest, *, root: bool = True, loaded: list[str] | None = None) -> list[str]:
    rejected: list[Rejected] = []

    def load(name: str) -> Driver:
        if loaded is not None:
            loaded.append(name)
        if name not in DRIVERS:
            raise NotFound(f"no runtime is called {name!r}", hint=f"use one of {', '.join(DRIVERS)}")
        return DRIVERS[name]

    found = candidates(request, lambda: list(DRIVERS), load, root=root, rejected=rejected)  # type: ignore[arg-type]
    return [runtime.name for runtime in found]


def asking(isolation: Isolation | None = None, keep: bool = False, **wall: object) -> SandboxRequest:
    return SandboxRequest(policy=Policy().with_wall(isolation=isolation or Isolation(), **wall), keep=keep)


def test_fastest_first_and_never_the_fake() -> None:
    assert tried(asking()) == ["jail", "bubblewrap", "gvisor", "theirs"]


def test_only_what_is_needed_is_loaded() -> None:
    loaded: list[str] = []
    found = candidates(
        asking(),
        lambda: pytest.fail("nobody has to look for other packages"),
        lambda name: loaded.append(name) or DRIVERS[name],  # type: ignore[arg-type, return-value, func-returns-value]
        root=True,
        rejected=[],
    )
    assert next(iter(found)).name == "jail"
    assert loaded == ["jail"]


def test_a_higher_level_leaves_the_weak_out() -> None:
    assert tried(asking(Isolation(Level.L3))) == ["gvisor", "theirs"]


def test_emulation_must_be_allowed() -> None:
    assert tried(asking(Isolation(Level.L4))) == []
    assert tried(asking(Isolation(Level.L4, allow_emulated=True))) == ["qemu"]


def test_preferences_come_first_if_strong_enough() -> None:
    assert tried(asking(Isolation(prefer=("theirs", "fake")))) == ["theirs", "jail", "bubblewrap", "gvisor"]


def test_an_unknown_preference_is_an_error() -> None:
    with pytest.raises(NotFound) as caught:
        tried(asking(Isolation(prefer=("jial",))))
    assert "jail" in caught.value.hint


def test_the_named_one_and_no_other() -> None:
    assert tried(asking(Isolation(runtime="bubblewrap"))) == ["bubblewrap"]


def test_by_name_even_what_is_never_chosen() -> None:
    assert tried(asking(Isolation(runtime="fake"))) == ["fake"]


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(NotFound) as caught:
        tried(asking(Isolation(runtime="jial")))
    assert "jail" in caught.value.hint


def test_a_named_one_below_the_level_is_refused() -> None:
    with pytest.raises(RuntimeUnavailable, match="L2 and the policy asks for L3"):
        tried(asking(Isolation(Level.L3, runtime="jail")))


@pytest.mark.parametrize(
    ("request_", "capability"),
    [
        (asking(Isolation(runtime="bubblewrap"), process=Process(user=0)), "user_zero"),
        (
            asking(Isolation(runtime="bubblewrap"), filesystem=Filesystem(mounts=(Mount("/a", "/b"),))),
            "mounts",
        ),
        (asking(Isolation(runtime="bubblewrap"), keep=True), "recover"),
        (
            SandboxRequest(
                policy=Policy()
                .with_wall(isolation=Isolation(runtime="jail"))
                .with_door(network=Network("open"))
            ),
            "network",
        ),
    ],
)
def test_what_the_named_one_lacks_is_said(request_: SandboxRequest, capability: str) -> None:
    with pytest.raises(Unsupported) as caught:
        tried(request_)
    assert caught.value.details["capability"] == capability


def test_without_a_name_what_lacks_it_is_passed_over() -> None:
    assert tried(asking(process=Process(user=0))) == ["jail"]
    assert tried(asking(Isolation(Level.L3)), root=False) == ["theirs"]


def test_when_none_is_left_each_has_its_reason() -> None:
    rejected: list[Rejected] = []
    request = asking(Isolation(Level.L4))
    assert not list(
        candidates(
            request,
            lambda: list(DRIVERS),
            lambda n: DRIVERS[n],  # type: ignore[arg-type, return-value]
            root=True,
            rejected=rejected,
        )
    )
    error = none_left(request, rejected)
    assert set(error.details["reasons"]) == {"jail", "bubblewrap", "gvisor", "qemu", "theirs"}
    assert "L4" in error.message
    assert "emulation" in error.details["reasons"]["qemu"]
    assert "doctor" in error.hint
