"""Templates as a normal user: imported, run and collected, with and without subordinate ids."""

from __future__ import annotations

import os

import pytest

from support import images
from support.rootless import normal_user

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="this session is a normal user's already")
TESTS = ["tests/integration/images", "tests/security/test_archives.py"]
# What differs for a normal user, and again with ids of its own to map; the rest is the same code.
CHOSEN = {
    False: "attack or whiteouts or attributes or command_line or (same_image and docker) or zstd or etc_that "
    "or (it_runs and layout) or (links_in_place and (jail or bubblewrap)) or (keeps_its_layers and False)",
    True: "(it_runs and docker) or (links_in_place and (jail or nsjail)) or one_sandbox "
    "or (mounts_and and jail) or taken_down_at_once or ends_with_who",
}
LEAST = {False: 30, True: 6}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ids", [False, True], ids=["one-id", "subordinate-ids"])
def test_as_a_normal_user(ids: bool) -> None:
    for make in (images.docker_archive, images.oci_archive, images.layout, images.zstd_layout):
        make()  # as root, which they are read from
    with normal_user(ids=ids) as user:
        outcomes, done = user.pytest(
            *TESTS, "-k", CHOSEN[ids], timeout=1100, env={"RINGFENCE_TEST_IMAGES": str(images.FOLDER)}
        )
    failed = [f"{found.test}\n{found.text}" for found in outcomes if found.outcome == "failed"]
    assert not failed, "\n\n".join(failed)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len([found for found in outcomes if found.outcome == "passed"]) > LEAST[ids]
