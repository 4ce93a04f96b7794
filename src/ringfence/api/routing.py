"""The table of routes: what is served, to whom, with which body. One table gives dispatch, OpenAPI and tests.

A module in ``ringfence.api.routes`` makes a table, and is served from then on::

    routes = Routes("contexts")

    @routes.post("/v1/sandboxes/{sandbox}/contexts", body=CreateContext, answer=Context, status=201)
    async def create(call: Call, body: CreateContext) -> Context: ...

    @routes.get("/v1/sandboxes/{sandbox}/contexts", query=Paging, answer=ContextList)
    async def list(call: Call, query: Paging) -> ContextList: ...

    @routes.websocket("/v1/sandboxes/{sandbox}/contexts/{context}/run", scope="run")
    async def stream(socket: Socket) -> None: ...

A handler returns what is to be JSON (a pydantic model, dataclass, mapping or list; ``None``: 204) or an
:class:`~ringfence.api.calls.Answer` (status, headers, bytes or a stream of bytes). It raises errors of
``ringfence.model.errors``. Authentication, scope, limits, idempotency and the shape of errors are the
application's, for every route.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import field
from typing import Any, TypeVar

from ringfence.model.values import dataclass

Handler = Callable[..., Awaitable[Any]]
Wrapped = TypeVar("Wrapped", bound=Callable[..., Awaitable[Any]])

JSON_BODY = 8 * 1024 * 1024  # bytes of a JSON body, files of a create request included


@dataclass(frozen=True, slots=True)
class Route:
    """One line of the table.

    ``scope``: read, run or admin, ``""``: open to everybody, ``"token"``: the handler checks a token of a
    sandbox or a signature. ``body``: the model of a JSON body; ``"stream"``: the handler reads bytes.
    ``query``: the model of the query. ``answer``: a model, a media type, or ``None``. ``creates``: takes an
    Idempotency-Key. ``socket``: a WebSocket.
    """

    method: str
    path: str
    handler: Handler
    tag: str = ""
    scope: str = "read"
    body: Any = None
    query: Any = None
    answer: Any = None
    status: int = 200
    creates: bool = False
    socket: bool = False
    most: int = JSON_BODY
    summary: str = ""
    description: str = ""
    names: tuple[str, ...] = field(default_factory=tuple)

    @property
    def name(self) -> str:
        """Stable name: OpenAPI's operationId, the metric's label."""
        return f"{self.tag}_{self.handler.__name__.strip('_')}"


class Routes:
    """A table of routes that belong together; ``tag`` groups them in the OpenAPI description."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.table: list[Route] = []

    def add(self, method: str, path: str, **options: Any) -> Callable[[Wrapped], Wrapped]:
        """Serve ``method path`` by the decorated function; ``options``: fields of :class:`Route`."""

        def keep(handler: Wrapped) -> Wrapped:
            text = inspect.getdoc(handler) or ""
            summary, _, description = text.partition("\n")
            names = tuple(part[1:-1] for part in path.split("/") if part.startswith("{"))
            self.table.append(
                Route(
                    method,
                    path,
                    handler,
                    self.tag,
                    summary=summary.strip(),
                    description=description.strip(),
                    names=names,
                    **options,
                )
            )
            return handler

        return keep

    def get(self, path: str, **options: Any) -> Callable[[Wrapped], Wrapped]:
        """GET, scope ``read`` unless said otherwise."""
        return self.add("GET", path, **options)

    def post(self, path: str, *, scope: str = "run", **options: Any) -> Callable[[Wrapped], Wrapped]:
        """POST, scope ``run`` unless said otherwise."""
        return self.add("POST", path, scope=scope, **options)

    def put(self, path: str, *, scope: str = "run", **options: Any) -> Callable[[Wrapped], Wrapped]:
        """PUT, scope ``run`` unless said otherwise."""
        return self.add("PUT", path, scope=scope, **options)

    def patch(self, path: str, *, scope: str = "run", **options: Any) -> Callable[[Wrapped], Wrapped]:
        """PATCH, scope ``run`` unless said otherwise."""
        return self.add("PATCH", path, scope=scope, **options)

    def delete(self, path: str, *, scope: str = "run", **options: Any) -> Callable[[Wrapped], Wrapped]:
        """DELETE, scope ``run`` unless said otherwise."""
        return self.add("DELETE", path, scope=scope, **options)

    def websocket(self, path: str, *, scope: str = "run", **options: Any) -> Callable[[Wrapped], Wrapped]:
        """A WebSocket, scope ``run`` unless said otherwise."""
        return self.add("GET", path, scope=scope, socket=True, **options)


class Found:
    """What a path led to: the route and its parameters, or the methods that the path would take."""

    __slots__ = ("methods", "params", "route")

    def __init__(self, route: Route | None, params: dict[str, str], methods: tuple[str, ...] = ()) -> None:
        self.route = route
        self.params = params
        self.methods = methods


class _Node:
    __slots__ = ("any", "rest", "routes", "words")

    def __init__(self) -> None:
        self.words: dict[str, _Node] = {}
        self.any: _Node | None = None
        self.rest: dict[str, Route] = {}
        self.routes: dict[str, Route] = {}


class Dispatcher:
    """Finds routes: a tree by segment, words before parameters; ``{name:path}`` last takes all that follows.

    Works on the decoded path's segments, which the caller has split before decoding: a ``%2F`` stays within
    its parameter.
    """

    def __init__(self, tables: Iterable[Iterable[Route]]) -> None:
        self._root = _Node()
        self.routes: list[Route] = []
        for table in tables:
            for route in table:
                self._add(route)

    def _add(self, route: Route) -> None:
        node = self._root
        key = "WEBSOCKET" if route.socket else route.method
        for part in route.path.strip("/").split("/"):
            if part.startswith("{") and part.endswith(":path}"):
                if key in node.rest:
                    raise ValueError(f"two routes for {key} {route.path}")
                node.rest[key] = route
                self.routes.append(route)
                return
            if part.startswith("{"):
                node.any = node.any or _Node()
                node = node.any
            else:
                node = node.words.setdefault(part, _Node())
        if key in node.routes:
            raise ValueError(f"two routes for {key} {route.path}")
        node.routes[key] = route
        self.routes.append(route)

    def find(self, key: str, segments: list[str]) -> Found:
        """The route of a method (``WEBSOCKET`` for sockets) and the segments of a path."""
        values: list[str] = []
        found = self._walk(self._root, segments, 0, values, key)
        if isinstance(found, Route):
            names = [name.removesuffix(":path") for name in found.names]
            return Found(found, dict(zip(names, values, strict=True)))
        return Found(None, {}, found or ())

    def _walk(
        self, node: _Node, segments: list[str], at: int, values: list[str], key: str
    ) -> Route | tuple[str, ...] | None:
        other: tuple[str, ...] | None = None
        if at == len(segments):
            if key in node.routes:
                return node.routes[key]
            if node.routes:
                return tuple(sorted(node.routes))
        else:
            if (following := node.words.get(segments[at])) is not None:
                found = self._walk(following, segments, at + 1, values, key)
                if isinstance(found, Route):
                    return found
                other = found
            if node.any is not None and segments[at]:
                values.append(segments[at])
                found = self._walk(node.any, segments, at + 1, values, key)
                if isinstance(found, Route):
                    return found
                values.pop()
                other = other or found
        if node.rest:
            route = node.rest.get(key) or (node.rest.get("*") if key != "WEBSOCKET" else None)
            if route is not None:
                values.append("/".join(segments[at:]))
                return route
            other = other or tuple(sorted(node.rest))
        return other
