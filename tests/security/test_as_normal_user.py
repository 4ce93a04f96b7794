"""The same attacks on walls that a normal user makes, with and without subordinate ids."""

from __future__ import annotations

import os
import shutil

import pytest

from security.payloads import FOLDER, program
from support.rootless import normal_user

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="this session is a normal user's already")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ids", [False, True], ids=["one-id", "subordinate-ids"])
def test_attacks(ids: bool, request: pytest.FixtureRequest) -> None:
    with normal_user(ids=ids) as user:
        compiled = user.folder / "payloads"
        compiled.mkdir()
        for source in FOLDER.glob("*.c"):
            (compiled / source.stem).write_bytes(program(source.name))
        decoys = user.folder / "decoys"
        decoys.mkdir()
        suid = decoys / "print_uid"
        shutil.copy(compiled / "print_uid", suid)
        suid.chmod(0o4755)
        args = ["tests/security/test_attacks.py"]
        if not ids:  # controls have no wall, and outputs are read by the host: there the map changes nothing
            args += ["tests/security/test_controls.py", "tests/security/test_outputs.py"]
        chosen = request.config.getoption("--ringfence-runtime")
        if ids:  # only the jail uses them: bubblewrap maps one id always
            chosen = ["jail"]
        args += [f"--ringfence-runtime={name}" for name in chosen]
        env = {"RINGFENCE_TEST_PAYLOADS": str(compiled), "RINGFENCE_TEST_SUID": str(suid)}
        outcomes, done = user.pytest(*args, timeout=1100, env=env)
    failures = [f"{found.test}\n{found.text}" for found in outcomes if found.outcome == "failed"]
    assert not failures, "\n\n".join(failures)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert sum(found.outcome == "passed" for found in outcomes) > 100
