"""A normal user's own Podman: what it says of its limits decides whether it is used at all."""

from __future__ import annotations

import os
import shutil

import pytest

from ringfence.runtimes.engines.containers import unlimited
from support.rootless import normal_user

# Its service, and then what the user asks for. The engine is the user's, with folders of its own.
SCRIPT = r"""
export XDG_RUNTIME_DIR=$TMPDIR/run
mkdir -m 700 $XDG_RUNTIME_DIR
engine="podman --root=$HOME/data --runroot=$XDG_RUNTIME_DIR/root --tmpdir=$XDG_RUNTIME_DIR/tmp
  --cgroup-manager=cgroupfs --events-backend=none --runtime=$(command -v runc || echo /usr/sbin/runc)"
$engine system service --time=0 unix://$XDG_RUNTIME_DIR/socket > $TMPDIR/log 2>&1 &
service=$!
for turn in $(seq 600); do [ -S $XDG_RUNTIME_DIR/socket ] && break; sleep 0.1; done
export CONTAINER_HOST=unix://$XDG_RUNTIME_DIR/socket
python -m ringfence run --runtime podman -- echo inside
echo "ended with $?"
"""


def test_an_engine_that_enforces_no_limit_is_refused() -> None:
    if os.geteuid() != 0:
        pytest.skip("root becomes another user")
    for program in ("podman", "conmon", "newuidmap"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    if os.path.exists("/sys/fs/cgroup/cgroup.controllers"):
        pytest.skip("control groups of version 2 only: limits of rootless containers may hold here")
    with normal_user(ids=True) as user:
        try:
            done = user.run(["sh", "-c", SCRIPT], timeout=110)
        finally:
            # Podman starts itself again in the user's namespaces, with a process that holds them: neither
            # has to end with what was started here.
            user.end_all()
    assert "ended with 125" in done.stdout, done.stdout + done.stderr
    assert "inside" not in done.stdout
    assert "enforces no limit of memory or processes" in done.stderr
    assert "control groups of version 2" in done.stderr


@pytest.mark.parametrize(
    ("info", "refused"),
    [
        ({"Rootless": True, "CgroupVersion": "1"}, True),
        ({"SecurityOptions": ["name=rootless"], "CgroupVersion": "2", "CgroupDriver": "none"}, True),
        ({"Rootless": True, "CgroupVersion": "2", "MemoryLimit": False}, True),
        ({"Rootless": True}, True),  # it does not say
        ({"Rootless": True, "CgroupVersion": "2", "CgroupDriver": "systemd", "MemoryLimit": True}, False),
        ({"SecurityOptions": ["name=seccomp"], "CgroupVersion": "1"}, False),
        ({}, False),
    ],
)
def test_what_engines_say_of_themselves(info: dict[str, object], refused: bool) -> None:
    assert unlimited(info) is refused
