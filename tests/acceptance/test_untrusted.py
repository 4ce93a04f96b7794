"""What nobody trusts runs behind a kernel of its own, if the host has one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from support.leaks import Leaks

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0
    or not (shutil.which("runsc") or shutil.which("runsc", path="/usr/local/sbin:/usr/sbin")),
    reason="a kernel of its own needs root and runsc here (scripts/setup.sh test installs it)",
)


def test_preset_untrusted_runs_behind_another_kernel(no_leaks: Leaks) -> None:
    argv = [sys.executable, "-m", "ringfence", "run", "--preset", "untrusted", "--json", "--", "uname", "-r"]
    done = subprocess.run(argv, env=no_leaks.env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["boundary"]["level"] == "L3"
    assert found["boundary"]["runtime"] == "gvisor"
    assert found["boundary"]["boundary"] == "userspace-kernel"
    assert found["stdout"].strip() != os.uname().release
