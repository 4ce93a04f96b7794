"""Several API processes on one store: what somebody has answered at a door holds at whoever opens it next."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from support.apis import another, kill
from support.beyond import Web, web_beyond
from support.postgres import PostgresServer
from support.serving import Serving, eventually, needs_root_or_users, serving

pytest.importorskip("h2")
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
ASK = {"mode": "egress", "onUnknown": "ask", "askTimeout": 300}


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with web_beyond() as server:
        yield server


class Asking:
    """A sandbox, and requests inside that may have to wait for an answer."""

    def __init__(self, service: Serving, web: Web) -> None:
        self.web = web
        self.box = service.sandbox(network=ASK)["id"]
        self._count = 0

    def begin(self, service: Serving, path: str) -> str:
        """Ask for a path; returns the command's place."""
        self._count += 1
        url = f"http://127.0.0.1:{self.web.port}{path}"
        # A proxy that is about to go may take a connection and never answer.
        line = "curl -sS -m 300 --path-as-is --retry 90 --retry-delay 1 --retry-all-errors "
        line += f"--noproxy '' -x $http_proxy '{url}' -o /dev/null -w '%{{http_code}}'"
        body: dict[str, Any] = {"argv": ["sh", "-c", line], "id": f"c{self._count}"}
        body |= {"wait": False, "detached": True}
        made = service.http.post(f"/v1/sandboxes/{self.box}/processes", json=body)
        assert made.status_code in (201, 202), made.text
        return f"/v1/sandboxes/{self.box}/processes/c{self._count}/output"

    def questions(self, service: Serving) -> list[dict[str, Any]]:
        """What is open of it."""
        found = service.http.get("/v1/egress/questions").json()["items"]
        return [each for each in found if each["sandbox"] == self.box]

    def answer(self, service: Serving, path: str, **answer: bool) -> tuple[str, dict[str, Any]]:
        """Ask for a path and answer the question: the status that the request got, and what was said."""
        place = self.begin(service, path)
        (question,) = eventually(lambda: self.questions(service), f"{path} is asked about")
        assert question["path"] == path
        told = service.http.post(f"/v1/egress/questions/{question['id']}", json=answer)
        assert told.status_code == 200, told.text
        return self.end(service, place), told.json()

    def end(self, service: Serving, place: str) -> str:
        """The status that a request got."""
        return str(eventually(lambda: service.http.get(place).json()["stdout"]["data"], "it goes on"))


def check_after(asking: Asking, service: Serving) -> None:
    """What was remembered passes unasked; what was not is asked about, or refused."""
    assert asking.end(service, asking.begin(service, "/kept")) == "200"
    assert asking.end(service, asking.begin(service, "/star*")) == "200"
    assert asking.questions(service) == []
    for path in ("/once", "/no", "/starfish", "/kept/below"):
        status, _ = asking.answer(service, path, allow=False)
        assert status == "403", path


def answer_all(asking: Asking, service: Serving) -> None:
    assert asking.answer(service, "/once", allow=True)[0] == "200"
    assert asking.answer(service, "/no", allow=False)[0] == "403"
    status, told = asking.answer(service, "/kept", allow=True, remember=True)
    assert status == "200" and told["rule"]["paths"] == ["/kept"]
    # A star is a letter in a question and a pattern in a policy: the answer is no wider than the question.
    status, told = asking.answer(service, "/star*", allow=True, remember=True)
    assert status == "200" and "rule" not in told
    assert asking.answer(service, "/starlight", allow=False)[0] == "403"


def test_an_answer_holds_where_the_door_goes(postgres: PostgresServer, web: Web) -> None:
    needs_root_or_users()
    with serving(store=postgres.fresh()) as first, another(first) as holder:
        asking = Asking(holder, web)
        elsewhere = Asking(first, web)
        answer_all(asking, holder)
        kill(holder)
        check_after(asking, first)
        # It is an answer about that sandbox.
        assert elsewhere.answer(first, "/kept", allow=False)[0] == "403"
        row = first.http.get(f"/v1/sandboxes/{asking.box}")
        assert row.status_code == 200 and "/kept" not in row.text
        for one in (asking, elsewhere):
            first.http.delete(f"/v1/sandboxes/{one.box}")


def test_an_answer_holds_after_a_restart(web: Web) -> None:
    needs_root_or_users()
    with serving() as service:
        asking = Asking(service, web)
        answer_all(asking, service)
        (pid,) = service.children()["api"]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: service.children()["api"] not in ([], [pid]), "there is another one")
        eventually(lambda: service.http.get("/readyz").status_code == 200, "it is back")
        check_after(asking, service)
        # A copy is another sandbox.
        copy = service.http.post(f"/v1/sandboxes/{asking.box}/fork", json={}).json()["items"][0]["id"]
        original, asking.box = asking.box, copy
        assert asking.answer(service, "/kept", allow=False)[0] == "403"
        for box in (original, copy):
            service.http.delete(f"/v1/sandboxes/{box}")
