"""Digests and the way through a dictionary: the same policy, whatever the order of its keys."""

# ruff: noqa: E501 (tables of cases)

from __future__ import annotations

import json
import random
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.model import policies
from ringfence.model.levels import Level
from ringfence.model.policy import (
    Audit,
    Door,
    Filesystem,
    Isolation,
    Limits,
    Mount,
    Network,
    NetworkRule,
    Policy,
    Process,
    Resources,
    Wall,
)

names = st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True)
paths = st.lists(names, min_size=1, max_size=3).map(lambda parts: "/srv/" + "/".join(parts))
times = st.one_of(st.integers(1, 10**6).map(float), st.floats(1, 10**6).map(lambda value: round(value, 3)))
hosts = st.lists(names, min_size=2, max_size=3).map(".".join)

isolations = st.builds(
    Isolation,
    minimum=st.sampled_from(Level),
    runtime=st.none() | names,
    prefer=st.lists(names, max_size=3).map(tuple),
    allow_emulated=st.booleans(),
)
filesystems = st.builds(
    Filesystem,
    root=st.sampled_from(["overlay", "readonly"]),
    read_only=st.lists(paths.map(lambda path: "/ro" + path), max_size=2).map(tuple),
    read_write=st.lists(paths, max_size=2).map(tuple),
    mounts=st.lists(
        st.builds(Mount, paths, paths, st.booleans()), max_size=2, unique_by=lambda m: m.target
    ).map(tuple),
)
processes = st.builds(
    Process,
    user=st.integers(0, 60000),
    seccomp=st.just("default"),
    max_processes=st.integers(1, 10**6),
    max_open_files=st.integers(16, 10**6),
    cpu_time=st.none() | times,
)
amounts = st.builds(
    Resources,
    cpus=st.one_of(st.integers(1, 64), st.floats(0.01, 64).map(lambda value: round(value, 2))),
    memory=st.integers(2**24, 2**40),
    disk=st.integers(2**20, 2**40),
    bandwidth=st.none() | st.integers(8000, 10**12),
    gpus=st.integers(0, 64),
)
walls = st.builds(Wall, isolations, filesystems, processes, amounts)
rules = st.builds(
    NetworkRule,
    host=hosts,
    ports=st.lists(st.integers(1, 65535), min_size=1, max_size=3).map(tuple),
    methods=st.lists(st.sampled_from(["GET", "POST"]), max_size=2).map(tuple),
    paths=st.lists(names.map(lambda name: f"/{name}/*"), max_size=2).map(tuple),
    inject=st.none()
    | names.map(lambda name: {"header": "Authorization", "value": f"Bearer {{{{secret:{name}}}}}"}),
)
networks = st.one_of(
    st.builds(
        Network, st.sampled_from(["none", "open", "egress"]), st.just(()), st.sampled_from(["none", "bodies"])
    ),
    st.builds(Network, st.just("egress"), st.lists(rules, max_size=3).map(tuple), st.just("metadata")),
)
limits = st.builds(
    Limits,
    timeout=times,
    idle=st.none() | times,
    on_idle=st.sampled_from(["pause", "stop"]),
    max_template_age=st.none() | times,
    output=st.integers(1, 2**40),
)
doors = st.builds(Door, limits, networks, st.builds(Audit, st.booleans(), st.booleans()))
valid = st.builds(Policy, names, walls, doors, st.none())


def shuffled(value: Any, source: random.Random) -> Any:
    """The same data with the keys of every mapping in another order."""
    if isinstance(value, dict):
        keys = list(value)
        source.shuffle(keys)
        return {key: shuffled(value[key], source) for key in keys}
    if isinstance(value, list):
        return [shuffled(part, source) for part in value]
    return value


@settings(max_examples=50)
@given(valid, st.randoms(use_true_random=False))
def test_through_a_dictionary_and_through_yaml(policy: Policy, source: random.Random) -> None:
    policies.check(policy)
    values = policy.to_dict()
    again = policies.from_dict(shuffled(values, source))
    assert again == policy
    assert again.digest() == policy.digest()
    assert again.wall.digest() == policy.wall.digest()
    text = json.dumps(shuffled(values, source), indent=1)
    assert policies.load(text) == policy


@settings(max_examples=60)
@given(walls, walls)
def test_two_walls_have_one_digest_if_and_only_if_they_are_equal(one: Wall, other: Wall) -> None:
    assert (one.digest() == other.digest()) == (one == other)


@settings(max_examples=40)
@given(valid, doors, names)
def test_the_door_and_the_name_are_not_part_of_the_wall(policy: Policy, door: Door, name: str) -> None:
    changed = replace(policy, door=door, name=name, trust="trusted")
    assert changed.wall.digest() == policy.wall.digest()
    assert (changed.digest() == policy.digest()) == (changed == policy)


@settings(max_examples=40)
@given(walls, st.data())
def test_each_field_of_the_wall_counts(wall: Wall, data: st.DataObject) -> None:
    parts = {"isolation": isolations, "filesystem": filesystems, "process": processes, "resources": amounts}
    part = data.draw(st.sampled_from(sorted(parts)))
    other = data.draw(parts[part])
    name = data.draw(st.sampled_from([field.name for field in fields(other)]))
    before = getattr(wall, part)
    after = replace(before, **{name: getattr(other, name)})
    changed = replace(wall, **{part: after})
    assert (changed.digest() == wall.digest()) == (after == before)


def test_every_field_changes_the_digest() -> None:
    # Written out, so that a new field that nobody thought of here fails.
    changes: dict[str, list[Any]] = {
        "isolation": [
            Isolation(minimum=Level.L3), Isolation(runtime="jail"), Isolation(prefer=("jail",)),
            Isolation(allow_emulated=True),
        ],
        "filesystem": [
            Filesystem(root="readonly"), Filesystem(read_only=("/a",)), Filesystem(read_write=()),
            Filesystem(mounts=(Mount("/a", "/b"),)), Filesystem(mounts=(Mount("/a", "/b", False),)),
        ],
        "process": [
            Process(user=1), Process(max_processes=1), Process(max_open_files=99), Process(cpu_time=1.0),
            Process(host_functions=("env.log",)),
        ],
        "resources": [
            Resources(cpus=2), Resources(memory=1), Resources(disk=1), Resources(bandwidth=1), Resources(gpus=1),
        ],
    }  # fmt: skip
    digests = {Wall().digest()}
    for part, values in changes.items():
        for value in values:
            digests.add(replace(Wall(), **{part: value}).digest())
    assert len(digests) == 1 + sum(map(len, changes.values()))
    assert {field.name for field in fields(Wall)} == set(changes)
    assert {name for cls in (Isolation, Filesystem, Process, Resources) for name in (f.name for f in fields(cls))} == {
        "minimum", "runtime", "prefer", "allow_emulated", "root", "read_only", "read_write", "mounts", "user",
        "seccomp", "max_processes", "max_open_files", "cpu_time", "host_functions", "cpus", "memory", "disk", "bandwidth", "gpus",
    }  # fmt: skip


def test_one_cpu_is_one_cpu() -> None:
    assert Wall(resources=Resources(cpus=1)) == Wall(resources=Resources(cpus=1.0))
    assert Wall(resources=Resources(cpus=1)).digest() == Wall(resources=Resources(cpus=1.0)).digest()


@pytest.mark.parametrize("name", policies.PRESETS)
def test_presets_come_back(name: str) -> None:
    policy = policies.preset(name)
    assert policies.from_dict(policy.to_dict()) == policy
    assert json.loads(json.dumps(policy.to_dict())) == policy.to_dict()
