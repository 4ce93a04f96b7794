"""The OpenAPI description: valid, complete, and what it says holds under fuzzing."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from schemathesis.config import SchemathesisConfig

from ringfence.api.app import tables
from ringfence.api.openapi import describe
from ringfence.api.routing import Dispatcher
from support.serving import Serving

ROOT = Path(__file__).resolve().parents[3]
ROUTES = Dispatcher(table.table for table in tables()).routes
DESCRIBED = json.loads(json.dumps(describe(ROUTES)))
# Streams that end when something happens, and what would end the fixtures.
SKIPPED = ("/stream", "/watch", "/execute", "/attach", "/tunnel/", "/wait", "/v1/keys/{key}")


def test_the_file_is_what_is_served(service: Serving) -> None:
    checked_in = json.loads((ROOT / "docs" / "openapi.json").read_text())
    assert service.http.get("/openapi.json").json() == checked_in, "run scripts/openapi.py"
    assert checked_in["openapi"] == "3.1.0"


def test_every_route_is_described_once() -> None:
    names = [op["operationId"] for place in DESCRIBED["paths"].values() for op in place.values()]
    assert len(names) == len(set(names))
    for route in ROUTES:
        if "{rest:path}" in route.path:
            continue  # whatever a port takes
        method = "get" if route.socket else route.method.lower()
        operation = DESCRIBED["paths"][route.path.replace(":path}", "}")][method]
        assert operation["summary"], route.path
        if route.creates:
            assert any(p["name"] == "Idempotency-Key" for p in operation["parameters"]), route.path


def operations() -> list[tuple[str, str]]:
    found = []
    for path, place in DESCRIBED["paths"].items():
        for method in place:
            if not any(part in path for part in SKIPPED):
                found.append((method, path))
    return found


@pytest.fixture(scope="module")
def fuzzed(service: Serving) -> Any:
    """Generated requests, by a key of a project of their own, against one real sandbox of it."""
    _, key = service.tenant(f"f{uuid.uuid4().hex[:8]}")
    box = service.sandbox(service.client(key))
    config = SchemathesisConfig.from_dict({"seed": 20261129})
    schema = schemathesis.openapi.from_dict(DESCRIBED, config=config)
    return schema, key, box["id"]


@pytest.mark.parametrize(("method", "path"), operations())
def test_no_request_is_a_fault(service: Serving, fuzzed: Any, method: str, path: str) -> None:
    schema, key, box = fuzzed
    operation = schema[path][method]
    client = service.client(key)

    @hypothesis.seed(20261129)
    @hypothesis.settings(
        max_examples=4, deadline=None, database=None, derandomize=False,
        suppress_health_check=list(HealthCheck), phases=[hypothesis.Phase.generate],
    )  # fmt: skip
    @hypothesis.given(case=operation.as_strategy())
    def check(case: Any) -> None:
        known = {"sandbox": box} if "sandbox" in (case.path_parameters or {}) else {}
        if (
            method == "delete"
            or path.endswith(("/pause", "/reset", "/extend"))
            or path == "/v1/sandboxes/{sandbox}"
        ):
            known = {}  # the sandbox is used by the others
        case.path_parameters = {**(case.path_parameters or {}), **known}
        if isinstance(case.body, dict):
            # No waiting, nothing large: that the checks of shape hold is what is tried.
            case.body.pop("template", None)
            if path.endswith("/processes"):
                case.body["wait"] = False
            if path == "/v1/sandboxes":
                case.body |= {
                    "wait": False,
                    "memory": "64MiB",
                    "disk": "8MiB",
                    "start_timeout": 5.0,
                    "timeout": 20,
                }
            if path == "/v1/pools":
                case.body |= {"min": 0, "max": 0}
        request = case.as_transport_kwargs(base_url=service.url)
        headers = {
            k: v for k, v in dict(request.get("headers") or {}).items() if k.lower() not in ("authorization",)
        }
        try:
            answer = client.request(
                request["method"], request["url"], params=request.get("params"), headers=headers,
                json=request.get("json"), content=request.get("data"),
            )  # fmt: skip
        except (UnicodeError, ValueError, TypeError):
            hypothesis.reject()  # what this client can't even send
        except httpx.RemoteProtocolError:
            assert path.endswith(("/archive", "/content"))  # cut: a file that can't be read to its end
            return
        told = answer.text[:500]
        assert answer.status_code < 500 or answer.json()["error"]["code"] in (
            "unsupported", "deadline_exceeded", "host_limit", "guest_refused", "guest_error", "start_failed",
        ), (answer.status_code, told)  # fmt: skip
        assert answer.status_code != 500 or answer.json()["error"]["code"] == "start_failed", told
        if answer.status_code >= 400:
            error = answer.json()["error"]
            assert error.keys() == {"code", "message", "hint", "details"}, told
        assert answer.headers["x-request-id"]

    check()
    client.close()


def test_the_service_has_survived_it(service: Serving) -> None:
    assert "Traceback" not in service.log, service.log[-3000:]
    assert service.http.get("/readyz").status_code == 200
