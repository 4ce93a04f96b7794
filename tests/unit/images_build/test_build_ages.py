"""How old a template is, and the policy that minds."""

from __future__ import annotations

import pytest

from ringfence.images.contract import Layer, Template
from ringfence.images.refreshing import age, check_age
from ringfence.model.errors import WrongState

DAY = 86400.0
LAYERS = (Layer("sha256:" + "a" * 64, "/x"),)


def template(source: str, made_at: float, base_made_at: float = 0.0) -> Template:
    return Template(
        "sha256:" + "b" * 64, "app:1", LAYERS, source=source, made_at=made_at, base_made_at=base_made_at
    )


@pytest.mark.parametrize(
    ("made", "days"),
    [
        (template("oci:docker.io/library/debian:12", 100 * DAY), 10),
        # When its makers made an image says nothing about how long ago we asked for the newest.
        (template("oci:docker.io/library/debian:12", 100 * DAY, base_made_at=1 * DAY), 10),
        # What is built today on an old base is old.
        (template("build", 110 * DAY, base_made_at=50 * DAY), 60),
        (template("build", 100 * DAY), 10),
        (template("rootfs:/x", 200 * DAY), 0),  # a clock that was set back
    ],
)
def test_age(made: Template, days: int) -> None:
    assert age(made, now=110 * DAY) == days * DAY


def test_too_old_is_refused_with_the_remedy() -> None:
    old = template("build", 110 * DAY, base_made_at=50 * DAY)
    check_age(old, None, now=110 * DAY)
    check_age(old, 60 * DAY, now=110 * DAY)
    with pytest.raises(WrongState, match=r"app:1 is 60d old, and the policy wants 30d at most") as caught:
        check_age(old, 30 * DAY, now=110 * DAY)
    assert caught.value.hint == "ringfence template refresh app:1"
