"""Requests that can't be right, said before anything is made."""

from __future__ import annotations

import functools
import math
import os
import re
import time

from ringfence.model.errors import InvalidRequest
from ringfence.model.ids import SANDBOX_ID
from ringfence.model.policy import LEAST_MEMORY
from ringfence.model.quantities import format_size
from ringfence.model.sandbox import SandboxRequest
from ringfence.runtimes.contract import AGENT_UID

MOST_PROCESSES = 32_768
MOST_OPEN_FILES = 1 << 20
_COUNT_EVERY = 5.0  # seconds
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*", re.ASCII)


def check(request: SandboxRequest) -> None:
    """Refuse what no host could do, or this one can't.

    Raises:
        InvalidRequest: a value is impossible; the message names it, the hint what would do.
    """
    policy = request.policy
    if request.template != "host":
        _check_template(request.template)
    if request.id is not None and not SANDBOX_ID.fullmatch(request.id):
        raise InvalidRequest(
            f"sandbox id {request.id!r} is not sb- and 20 base-32 digits", hint="leave it out: one is made"
        )
    _check_size(request)
    process = policy.wall.process
    if not (0 <= process.user < 65534) or process.user == AGENT_UID:
        raise InvalidRequest(
            f"process.user {process.user} is impossible",
            hint=f"0 (root of the sandbox) or 1 to 65533, but not {AGENT_UID}, the guest agent's",
        )
    if not 1 <= process.max_processes <= MOST_PROCESSES:
        raise InvalidRequest(
            f"a limit of {process.max_processes} processes is impossible", hint=f"1 to {MOST_PROCESSES}"
        )
    if not 16 <= process.max_open_files <= MOST_OPEN_FILES:
        raise InvalidRequest(
            f"a limit of {process.max_open_files} open files is impossible", hint=f"16 to {MOST_OPEN_FILES}"
        )
    if process.cpu_time is not None and not _positive(process.cpu_time):
        raise InvalidRequest("process.cpuTime must be more than 0", hint="as in 10m")
    limits = policy.door.limits
    if not _positive(limits.timeout):
        raise InvalidRequest("the timeout must be more than 0", hint="as in 30m")
    if limits.output < 0:
        raise InvalidRequest("the output limit must be 0 or more bytes", hint="as in 10MiB")
    for name, value in request.env.items():
        if not _NAME.fullmatch(name) or "\0" in value:
            raise InvalidRequest(f"environment variable {name!r} has an impossible name or value")


def _check_template(name: str) -> None:
    from ringfence.images import names
    from ringfence.images.contract import ENGINE

    if name.startswith(ENGINE):
        image = name.removeprefix(ENGINE)
        if (
            not image
            or image.startswith("-")
            or any(ord(letter) < 33 or ord(letter) > 126 for letter in image)
        ):
            raise InvalidRequest(f"{name!r} names no image of an engine", hint="as in docker:python:3.12")
    elif not names.is_digest_or_part(name):
        names.full_name(name)


def _check_size(request: SandboxRequest) -> None:
    size = request.policy.wall.resources
    processors = processor_count()
    if not _positive(size.cpus) or size.cpus < 0.01:
        raise InvalidRequest(f"{size.cpus} CPUs are impossible", hint=f"0.01 to {processors}")
    if size.cpus > processors:
        raise InvalidRequest(
            f"{size.cpus:g} CPUs: this host has {processors}", hint=f"ask for {processors} or less"
        )
    if size.memory < LEAST_MEMORY:
        raise InvalidRequest(
            f"{format_size(size.memory)} of memory is too little",
            hint=f"ask for {format_size(LEAST_MEMORY)} or more",
        )
    total = host_memory()
    if size.memory > total:
        raise InvalidRequest(
            f"{format_size(size.memory)} of memory: this host has {format_size(total)}", hint="ask for less"
        )


def _positive(number: float) -> bool:
    return math.isfinite(number) and number > 0


_counted = (-math.inf, 1)  # when, and how many


def processor_count() -> int:
    """Processors of this machine, looked up every few seconds: some can be added and taken away."""
    global _counted
    now = time.monotonic()
    if now - _counted[0] > _COUNT_EVERY:
        _counted = now, os.cpu_count() or 1
    return _counted[1]


@functools.cache
def host_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
