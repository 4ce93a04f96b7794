"""The table of routes: how paths are found."""

from __future__ import annotations

import pytest

from ringfence.api.app import tables
from ringfence.api.routing import Dispatcher, Routes


async def nothing(*_: object) -> None: ...


def dispatcher() -> Dispatcher:
    routes = Routes("t")
    for method, path in (
        ("GET", "/a"),
        ("POST", "/a"),
        ("GET", "/a/{one}"),
        ("GET", "/a/fixed"),
        ("GET", "/a/{one}/b"),
        ("DELETE", "/a/fixed/b"),
        ("*", "/p/{one}/{rest:path}"),
    ):
        routes.add(method, path)(nothing)
    routes.websocket("/a/{one}/b")(nothing)
    routes.websocket("/p/{one}/{rest:path}")(nothing)
    return Dispatcher([routes.table])


def find(method: str, path: str) -> tuple[str, dict[str, str]]:
    found = dispatcher().find(method, path.split("/")[1:])
    return (found.route.path if found.route else "-", found.params)


def test_words_come_before_parameters() -> None:
    assert find("GET", "/a/fixed") == ("/a/fixed", {})
    assert find("GET", "/a/other") == ("/a/{one}", {"one": "other"})
    assert find("GET", "/a/fixed/b") == ("/a/{one}/b", {"one": "fixed"})  # the word has no GET there
    assert find("DELETE", "/a/fixed/b") == ("/a/fixed/b", {})
    assert find("WEBSOCKET", "/a/x/b") == ("/a/{one}/b", {"one": "x"})


def test_the_rest_of_a_path() -> None:
    assert find("PUT", "/p/x/y/z") == ("/p/{one}/{rest:path}", {"one": "x", "rest": "y/z"})
    assert find("PUT", "/p/x/") == ("/p/{one}/{rest:path}", {"one": "x", "rest": ""})
    assert find("WEBSOCKET", "/p/x/y")[0] == "/p/{one}/{rest:path}"


def test_what_is_not_there_says_what_would_be() -> None:
    found = dispatcher().find("PUT", ["a"])
    assert found.route is None and found.methods == ("GET", "POST")
    assert dispatcher().find("GET", ["nothing"]).methods == ()
    assert dispatcher().find("GET", ["a", ""]).route is None  # a parameter is never empty


def test_two_routes_for_one_place_are_a_mistake() -> None:
    routes = Routes("t")
    routes.get("/a/{one}")(nothing)
    routes.get("/a/{other}")(nothing)
    with pytest.raises(ValueError, match="two routes"):
        Dispatcher([routes.table])


def test_the_real_table() -> None:
    found = Dispatcher(table.table for table in tables()).routes
    names = [route.name for route in found]
    assert len(names) == len(set(names))
    for route in found:
        assert route.summary, route.path
        assert route.scope in ("", "token", "read", "run", "admin")
        if route.method in ("POST", "PUT", "PATCH", "DELETE"):
            assert route.scope in ("run", "admin", "token"), f"{route.path} changes something"
        if route.scope == "":
            assert route.tag == "system", f"{route.path} is open to everybody"
