"""Several API processes, each with doors of its own: a project sees all its questions, whichever is asked."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from support.serving import Serving, eventually, serving

pytest.importorskip("h2")
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.fixture(scope="module")
def both() -> Iterator[Serving]:
    with serving("--workers", "2") as made:
        yield made


def test_questions_are_seen_and_answered_by_every_process(both: Serving) -> None:
    asking = {"mode": "egress", "onUnknown": "ask", "askTimeout": 300}
    boxes = [both.sandbox(network=asking)["id"] for _ in range(2)]
    code = "curl -sS -m 300 -x $http_proxy http://192.0.2.1/ -o /dev/null -w '%{http_code}'"
    for box in boxes:
        body = {"argv": ["sh", "-c", code], "id": "asks", "wait": False, "detached": True}
        both.http.post(f"/v1/sandboxes/{box}/processes", json=body)

    def fresh() -> list[dict[str, str]]:
        """What a client sees that has just come: the kernel decides which process serves it."""
        with both.client(both.key) as client:
            found: list[dict[str, str]] = client.get("/v1/egress/questions").json()["items"]
            return found

    eventually(lambda: len(fresh()) == 2, "both are asked")
    for _ in range(10):
        assert {each["sandbox"] for each in fresh()} == set(boxes)
    _, stranger = both.tenant("bystander")
    for question in fresh():
        place = f"/v1/egress/questions/{question['id']}"
        with both.client(stranger) as client:
            assert client.post(place, json={"allow": True}).status_code == 404
        with both.client(both.key) as client:
            assert client.post(place, json={"allow": False}).json()["answer"] == "deny"
        with both.client(both.key) as client:
            assert client.post(place, json={"allow": True}).status_code == 404
    for box in boxes:
        place = f"/v1/sandboxes/{box}/processes/asks/output"
        told = eventually(lambda at=place: both.http.get(at).json()["stdout"]["data"], "it goes on")
        assert told == "403"
        both.http.delete(f"/v1/sandboxes/{box}")
