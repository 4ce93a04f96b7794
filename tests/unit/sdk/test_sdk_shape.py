"""What both halves of the SDK have, and what importing it costs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import ringfence
from ringfence import sdk
from ringfence.sdk.blocking.base import Facade
from ringfence.sdk.policy import Policy

ROOT = Path(__file__).resolve().parents[3]
SPECIAL = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
}
INNER = {"transport", "hold", "release", "begin", "run_at_once", "follow", "open"}


def test_the_blocking_half_is_what_the_script_writes() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/sdk_blocking.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [name for name in sdk.__all__ if name.startswith("Async")])
def test_every_method_is_in_both_halves(name: str) -> None:
    ours, other = getattr(sdk, name), getattr(sdk, name.removeprefix("Async"))
    assert issubclass(other, Facade)
    for member, found in vars(ours).items():
        if member.startswith("_") and member not in SPECIAL:
            continue
        if member in INNER:
            continue
        twin = inspect.getattr_static(other, SPECIAL.get(member, member))
        if isinstance(found, property):
            assert isinstance(twin, property), member
            continue
        function, copy = (getattr(each, "__func__", each) for each in (found, twin))
        assert list(inspect.signature(function).parameters) == list(inspect.signature(copy).parameters), (
            member
        )


def test_names_come_with_the_package_and_cost_nothing_before() -> None:
    code = (
        "import sys, ringfence; before = set(sys.modules);"
        "from ringfence import Sandbox, AsyncSandbox, Job, Volume, Template, Policy, Pool;"
        "print(sorted({'asyncio', 'httpx2', 'websockets', 'ringfence.sdk'} & before),"
        "sorted({'httpx2', 'websockets', 'fastapi', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); {code}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split("\n")[0] == "[] []"


def test_unknown_names_are_what_they_are() -> None:
    with pytest.raises(AttributeError, match="Sandbx"):
        ringfence.Sandbx  # type: ignore[attr-defined]  # noqa: B018
    assert "Sandbox" in dir(ringfence)


def test_policies_are_values() -> None:
    assert Policy.preset("controlled").to_wire() == "controlled"
    own = Policy("controlled", limits={"timeout": "1m"})
    assert own.to_dict()["limits"]["timeout"] == 60
    assert own == Policy("controlled", limits={"timeout": "1m"})
    assert own != Policy()
    assert Policy.from_dict(own.to_dict()).digest == own.digest
    with pytest.raises(ringfence.RingfenceError, match="no section"):
        Policy(nonsense={})  # type: ignore[arg-type]
