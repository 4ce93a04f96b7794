"""Requests that can't be right are refused by one clear sentence, before anything is made."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import pytest

from ringfence.model.errors import InvalidRequest, RingfenceError
from ringfence.model.policy import GIB, Limits, Policy, Process, Resources
from ringfence.model.sandbox import SandboxRequest
from ringfence.node import requests


def asking(
    wall: dict[str, Any] | None = None, door: dict[str, Any] | None = None, **rest: Any
) -> SandboxRequest:
    return SandboxRequest(policy=Policy().with_wall(**(wall or {})).with_door(**(door or {})), **rest)


def test_the_default_is_right() -> None:
    requests.check(asking())
    requests.check(asking({"resources": Resources(cpus=os.cpu_count() or 1, memory=16 << 20, disk=1 << 20)}))


@pytest.mark.parametrize(
    ("request_", "kind", "words"),
    [
        (asking(template="De bian"), InvalidRequest, "no name of a template"),
        (asking(template="../etc"), InvalidRequest, "no name of a template"),
        (asking(template="docker:"), InvalidRequest, "names no image"),
        (asking(id="sb-../../etc"), InvalidRequest, "sandbox id"),
        (asking(id="sb-" + "0" * 19), InvalidRequest, "sandbox id"),
        (asking({"resources": Resources(cpus=0)}), InvalidRequest, "0 CPUs"),
        (asking({"resources": Resources(cpus=-1)}), InvalidRequest, "CPUs"),
        (asking({"resources": Resources(cpus=math.nan)}), InvalidRequest, "CPUs"),
        (asking({"resources": Resources(cpus=math.inf)}), InvalidRequest, "CPUs"),
        (asking({"resources": Resources(cpus=4096)}), InvalidRequest, "this host has"),
        (asking({"resources": Resources(memory=1)}), InvalidRequest, "too little"),
        (asking({"resources": Resources(memory=1 << 50)}), InvalidRequest, "this host has"),
        (asking({"process": Process(user=-1)}), InvalidRequest, "process.user"),
        (asking({"process": Process(user=64999)}), InvalidRequest, "process.user"),
        (asking({"process": Process(user=65534)}), InvalidRequest, "process.user"),
        (asking({"process": Process(max_processes=0)}), InvalidRequest, "processes"),
        (asking({"process": Process(max_processes=10**9)}), InvalidRequest, "processes"),
        (asking({"process": Process(max_open_files=3)}), InvalidRequest, "open files"),
        (asking({"process": Process(cpu_time=0)}), InvalidRequest, "cpuTime"),
        (asking(door={"limits": Limits(timeout=0)}), InvalidRequest, "timeout"),
        (asking(door={"limits": Limits(timeout=math.nan)}), InvalidRequest, "timeout"),
        (asking(door={"limits": Limits(output=-1)}), InvalidRequest, "output"),
        (asking(env={"A=B": "x"}), InvalidRequest, "environment variable"),
        (asking(env={"": "x"}), InvalidRequest, "environment variable"),
        (asking(env={"A": "\0"}), InvalidRequest, "environment variable"),
    ],
)
def test_impossible(request_: SandboxRequest, kind: type[RingfenceError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        requests.check(request_)
    assert type(caught.value) is kind


def test_host_memory_is_what_the_kernel_says() -> None:
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) * 1024
    assert abs(requests.host_memory() - total) < GIB // 4


def test_a_generated_id_passes() -> None:
    from ringfence.model.ids import new_id

    requests.check(replace(asking(), id=new_id("sb")))
