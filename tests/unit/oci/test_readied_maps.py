"""Two user namespaces, one in the other, must come to the identity that the node gave."""

from __future__ import annotations

import pytest

from ringfence.model.errors import HostLimit
from ringfence.runtimes.contract import AGENT_UID, Identity, IdMap
from ringfence.runtimes.launching import readied

SINGLE = Identity(1000, 1000, (IdMap(1000, 501, 1),), 1000, gid_maps=(IdMap(1000, 20, 1),))
WITH_IDS = Identity(
    1000,
    1000,
    (IdMap(0, 100_000, 1000), IdMap(1000, 501, 1), IdMap(1001, 101_000, 64_535)),
    AGENT_UID,
    helper=True,
    gid_maps=(IdMap(0, 300_000, 1000), IdMap(1000, 20, 1), IdMap(1001, 301_000, 64_535)),
)
ZERO = Identity(0, 0, (IdMap(0, 501, 1), IdMap(1, 100_000, 65_535)), AGENT_UID, helper=True)


def through(maps: tuple[IdMap, ...], number: int) -> int:
    for line in maps:
        if line.inside <= number < line.inside + line.count:
            return line.outside + number - line.inside
    raise KeyError(number)


@pytest.mark.parametrize("identity", [SINGLE, WITH_IDS, ZERO])
def test_inner_through_outer_is_the_identity(identity: Identity) -> None:
    outer, inner = readied.outer_maps(identity), readied.inner_maps(identity, root=False)
    for kind, lines in enumerate((identity.maps, identity.gid_maps or identity.maps)):
        for line in lines:
            for number in (line.inside, line.inside + line.count - 1):
                assert through(outer[kind], through(inner[kind], number)) == through(lines, number)
    assert through(outer[0], 0) == identity.host_uid(identity.uid)


def test_as_root_there_is_one_namespace_only() -> None:
    assert readied.inner_maps(WITH_IDS, root=True) == (WITH_IDS.maps, WITH_IDS.gid_maps)


def test_a_workload_that_is_not_the_caller_is_refused() -> None:
    with pytest.raises(HostLimit):
        readied.outer_maps(Identity(5, 5, (IdMap(0, 100_000, 10),), 5))
