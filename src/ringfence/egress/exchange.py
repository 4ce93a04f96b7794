"""One request and its answer, whatever protocol either side speaks: judged, paid for, given its key."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ringfence.egress import injection
from ringfence.egress.door import Flow, Grant, Refused, refused
from ringfence.egress.http1 import BadMessage, Headers, Incomplete, ResponseHead
from ringfence.egress.inference import Guard, Refusal
from ringfence.egress.injection import CannotInject, Outgoing
from ringfence.egress.keys import SecretsUnavailable
from ringfence.egress.meter import tokens
from ringfence.egress.names import Host
from ringfence.egress.outward import BodyFailed, Pool, Upstream
from ringfence.egress.policy import Decision, Rule
from ringfence.egress.recording import Taking
from ringfence.egress.redaction import Starring
from ringfence.egress.secrets import PLACEHOLDER, PLACEHOLDER_SIZE
from ringfence.egress.streams import BROKEN
from ringfence.egress.upstream import Unreachable
from ringfence.model.values import dataclass

if TYPE_CHECKING:
    from ringfence.egress.door import Door

_RETRIES = 2
_IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "QUERY", "PUT", "DELETE"})
_TAIL = 64 * 1024  # bytes of an answer in which it is looked for what it cost
_BYTES_PLACEHOLDER = re.compile(PLACEHOLDER.pattern.encode(), re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Request:
    """A request from inside, understood: where it goes, and its path in one form."""

    method: str
    scheme: str
    host: Host
    port: int
    path: str
    query: str
    headers: Headers
    length: int  # of the body, -1 not known
    upgrade: str = ""


class Front(Protocol):
    """The side of the client."""

    speaks_h2: bool
    begun: bool  # the answer's head is out: no other answer can be given any more

    def pieces(self) -> AsyncIterator[bytes]:
        """The request's body."""
        ...

    async def ready(self) -> bytes | None:
        """The whole body, if it is known to be small."""
        ...

    async def start(self, response: ResponseHead) -> None:
        """The answer's head."""

    async def piece(self, data: bytes) -> None:
        """A piece of its body."""

    async def finish(self, trailers: Headers) -> None:
        """It is whole."""

    async def switch(self, response: ResponseHead, upstream: Upstream) -> str:
        """Both sides go on in another protocol; returns how it ended."""
        ...


class _Body:
    """A request's body on its way: watched for placeholders that go where they should not."""

    def __init__(self, exchange: Exchange, front: Front, length: int, whole: bytes | None) -> None:
        self._exchange = exchange
        self._front = front
        self.length = length
        self.whole = whole
        self.begun = False

    async def pieces(self) -> AsyncIterator[bytes]:
        """See ``Sending``."""
        self.begun = True
        if self.whole is not None:
            yield self.whole
            return
        tail = b""
        async for data in self._front.pieces():
            window = tail + data
            if b"rfsecret0" in window.lower() and _BYTES_PLACEHOLDER.search(window):
                raise self._exchange.alarm("the body")
            tail = window[-PLACEHOLDER_SIZE:]
            door = self._exchange.door
            if (bucket := door.engine.bucket_out(door)) is not None:
                await bucket.take(len(data))
            if self._exchange.taking is not None:
                self._exchange.taking.sent(data)
            yield data


async def _one(data: bytes) -> AsyncIterator[bytes]:
    if data:
        yield data


class Exchange:
    """Serves one request. ``flow`` carries its counts."""

    def __init__(self, flow: Flow, front: Front, pool: Pool) -> None:
        self.flow = flow
        self.front = front
        self.pool = pool
        self.door: Door = flow.door
        self.taking: Taking | None = None
        self._notes: dict[str, Any] = {}
        self._secrets: list[str] = []

    async def run(self, request: Request) -> None:
        """Serve it, and write it into the log.

        Raises:
            Refused, Unreachable: the client has to be told; nothing was written yet.
            Everything that the client's stream raises.
        """
        flow = self.flow
        flow.host, flow.port = request.host, request.port
        flow.protocol = "tls" if request.scheme == "https" else "http"
        flow.method, flow.path = request.method, request.path
        status: int | None = None
        error: Refused | Unreachable | None = None
        try:
            if self.door.network.total_timeout is None:
                status = await self._run(request)
            else:
                async with asyncio.timeout(self.door.network.total_timeout):
                    status = await self._run(request)
        except Refused as refusal:
            error, status = refusal, refusal.status
            raise
        except Unreachable as failure:
            error, status = failure, failure.status
            raise
        except TimeoutError:
            status = 504
            error = Unreachable(f"{request.host} took too long", 504, "timeout")
            raise error from None
        finally:
            self._record(request, status, error)
            flow.method = flow.path = ""

    async def _run(self, request: Request) -> int:
        flow, door = self.flow, self.door
        guard = door.guard if request.host.name == "inference" else None
        if guard is not None:
            request, grant = await self._guarded(guard, request)
        else:
            grant = await door.admit(
                flow, request.host, request.port, flow.protocol, request.method, request.path
            )
        rule = flow.rule = grant.rule
        if request.upgrade and request.upgrade != "websocket":
            raise refused("upgrade", f"an upgrade to {request.upgrade[:40]!r} is not let through", 400)
        door.engine.begin(door, rule)
        level = rule.source.record or door.network.record
        if level in ("headers", "bodies"):
            url = f"{request.scheme}://{request.host.bracketed()}:{request.port}{request.path}{request.query}"
            self.taking = Taking(level, request.method, url, request.headers)
        outgoing = await self._prepare(request, rule, guard)
        body = _Body(self, self.front, request.length, outgoing.body)
        if outgoing.body is None and request.length == 0:
            body.whole = b""
        elif outgoing.body is not None and self.taking is not None:
            self.taking.sent(outgoing.body)
        upstream, response = await self._send(request, grant, outgoing, body)
        flow.address = str(upstream.address)
        await self._bring(request, rule, upstream, response)
        return response.status

    async def _guarded(self, guard: Guard, request: Request) -> tuple[Request, Grant]:
        try:
            path, query = guard.target(request.path + request.query)
        except Refusal as error:
            raise refused(error.code, f"the inference guard: {error}") from None
        found = await self.door.engine.upstreams.resolve(guard.host)
        good, decision = self.door.rules.address(guard.rule, guard.host, found)
        if not decision.allowed:
            raise Refused(decision)
        self._notes["upstream"] = f"{guard.host}:{guard.port}"
        moved = Request(
            request.method, guard.scheme, guard.host, guard.port, path, query, request.headers, request.length
        )
        return moved, Grant(guard.host, guard.port, guard.rule, tuple(good))

    # -- credentials

    def alarm(self, where: str) -> Refused:
        """A placeholder is on its way to where it does not belong."""
        host = str(self.flow.host)
        self.door.engine.alarm(self.door, where, host)
        self._notes["alarm"] = "placeholder"
        return refused(
            "placeholder",
            f"a placeholder of a secret in {where}, on its way to {host}",
        )

    async def _prepare(self, request: Request, rule: Rule, guard: Guard | None) -> Outgoing:
        """The request with its credential, masks and all; the body is read if it has to be."""
        host = request.host.bracketed()
        if request.port != (443 if request.scheme == "https" else 80):
            host += f":{request.port}"
        inject = rule.source.inject
        target = request.path + request.query
        headers = request.headers
        counts = self.door.engine.meter.counts_tokens(self.door, rule)
        if inject or counts:  # answers are looked through, so they must not be compressed
            headers = [pair for pair in headers if pair[0].lower() != "accept-encoding"]
            headers.append(("Accept-Encoding", "identity"))
        body: bytes | None = None
        reads = guard is not None and guard.reads
        if request.length != 0 and (reads or (inject and injection.needs_body(inject))):
            body = await self._whole(request)
        elif request.length != 0:
            body = await self.front.ready()
        if guard is not None and reads and body is not None:
            kind = injection.content_type(headers)
            try:
                body, masked = await self.door.engine.heavy(len(body), partial(guard.body, kind, body))
            except Refusal as error:
                raise refused(error.code, f"the inference guard: {error}") from None
            if masked:
                self._notes["masked"] = masked
        outgoing = Outgoing(request.method, host, target, headers, body)
        found = injection.found_in(target, headers, body)
        if not inject:
            if found:
                raise self.alarm("the request")
            return outgoing
        return await self._injected(request, rule, inject, outgoing, found)

    async def _injected(
        self, request: Request, rule: Rule, inject: dict[str, str], outgoing: Outgoing, found: set[str]
    ) -> Outgoing:
        store = self.door.engine.secrets
        spec = self.door.spec
        if request.scheme != "https" and not (rule.protocol == "http" and rule.addresses):
            raise refused(
                "not_authenticated",
                f"{request.host} does not prove who it is, so it gets no credential",
                hint="use https; in the clear only with protocol: http and addresses in the rule",
            )
        if "field" in inject and outgoing.body is None:
            outgoing = Outgoing(outgoing.method, outgoing.host, outgoing.target, outgoing.headers, b"")
        try:
            names = injection.secret_names(inject)
            values = {name: await store.value(spec.project, name) for name in names}
            bound = await store.bound(self.door.family(), names) if found else {}
        except SecretsUnavailable as error:
            raise Unreachable(f"{error.message}; nothing was sent", 503, error.code, error.hint) from None
        if found - bound.keys():
            raise self.alarm("the request")
        self._secrets = [*values.values(), *(value for value in values.values() if ":" in value)]
        self.door.engine.redactors.of(spec.project).learn(values.values())
        try:
            marks = {mark: values[name] for mark, name in bound.items()}
            return await self.door.engine.heavy(
                len(outgoing.body or b""),
                lambda: injection.apply(inject, values, injection.swap(outgoing, marks)),
            )
        except CannotInject as error:
            raise refused("inject", f"no place for the credential: {error}", 400) from None

    async def _whole(self, request: Request) -> bytes:
        for name, _ in request.headers:
            if name.lower() == "content-encoding":
                raise refused("encoded_body", "a body that has to be read must not be compressed", 415)
        body = bytearray()
        async for data in self.front.pieces():
            body += data
            if len(body) > injection.MOST_BODY:
                raise refused(
                    "body_too_large",
                    f"a body that has to be read has at most {injection.MOST_BODY} bytes",
                    413,
                )
        return bytes(body)

    # -- out and back

    async def _send(
        self, request: Request, grant: Grant, outgoing: Outgoing, body: _Body
    ) -> tuple[Upstream, ResponseHead]:
        tries = 0
        bucket = self.door.engine.bucket_out(self.door)
        while True:
            upstream = await self.pool.get(grant, request.scheme, fresh=tries > 0, h2=self.front.speaks_h2)
            reused = upstream.used > 0
            upstream.used += 1
            try:
                if bucket is not None:
                    await bucket.take(len(body.whole or b"") + 200)
                idle = self.door.network.idle_timeout
                response = await upstream.request(outgoing, body, request.upgrade, self._count, idle)
                return upstream, response
            except BodyFailed as error:
                await upstream.close()
                raise error.error from None
            except (*BROKEN, Incomplete, BadMessage) as error:
                await upstream.close()
                tries += 1
                # A connection that the server gave up meanwhile says nothing about the server.
                again = request.method in _IDEMPOTENT
                if again and tries <= _RETRIES and (body.whole is not None or not body.begun):
                    if not reused:
                        await asyncio.sleep(0.1 * 4 ** (tries - 1))
                    continue
                text = f"{grant.host}:{grant.port} broke off: {error or 'no answer'}"
                raise Unreachable(text, 502, "broken") from None
            except TimeoutError:
                await upstream.close()
                raise Unreachable(
                    f"{grant.host}:{grant.port} did not answer in time", 504, "timeout"
                ) from None
            except BaseException:
                await upstream.close()
                raise

    def _count(self, data: bytes) -> None:
        self.flow.out(len(data))

    async def _bring(self, request: Request, rule: Rule, upstream: Upstream, response: ResponseHead) -> None:
        flow, front = self.flow, self.front
        if self.taking is not None:
            self.taking.response = response
        if response.status == 101:
            try:
                self._notes |= {"upgrade": "websocket", "end": await front.switch(response, upstream)}
            finally:
                await upstream.close()
            return
        starring = Starring(self._secrets)
        if self._secrets:
            headers = [(name, starring.text(value)) for name, value in response.headers]
            response = ResponseHead(
                response.status, starring.text(response.reason), headers, response.length, response.keep,
                response.minor, response.trailers,
            )  # fmt: skip
        counts = self.door.engine.meter.counts_tokens(self.door, rule)
        tail = b""
        engine, door = self.door.engine, self.door
        ended = False
        try:
            await front.start(response)
            whole = upstream.whole(response)
            pieces = upstream.body(response) if whole is None else _one(whole)
            with upstream.patience(self.door.network.idle_timeout) as patience:
                async for data in pieces:
                    if (bucket := engine.bucket_in(door)) is not None:
                        await bucket.take(len(data))
                    flow.back(len(data))
                    if self._secrets:
                        data = starring.feed(data)
                    if counts:
                        tail = (tail + data)[-_TAIL:]
                    if self.taking is not None:
                        self.taking.received(data)
                    if data:
                        await front.piece(data)
                    patience.extend()
            if rest := starring.end():
                await front.piece(rest)
                tail += rest
            await front.finish(upstream.trailers)
            ended = True
        finally:
            if counts:
                self._pay(rule, tail)
            if ended:
                self.pool.put(upstream)
            else:
                await upstream.close()

    def _pay(self, rule: Rule, tail: bytes) -> None:
        reported = tokens(tail)
        if reported:
            cost = self.door.engine.meter.spend_tokens(self.door, rule, reported)
            self._notes |= {"tokens": reported, "cost": round(cost, 9)}

    def _record(self, request: Request, status: int | None, error: Refused | Unreachable | None) -> None:
        flow = self.flow
        decision = Decision(True, "allowed", flow.rule)
        more: dict[str, Any] = {
            "method": request.method,
            "path": request.path,
            "status": status,
            **self._notes,
        }
        if isinstance(error, Refused):
            decision = error.decision
        elif error is not None:
            more |= {"error": error.code, "reason": str(error)}
        elif flow.cut is not None:
            decision = flow.cut
        elif status is None:
            more["error"] = "broken"
        flow.record(decision, **more)
        if self.taking is not None:
            self.door.engine.keep(self.door, flow, self.taking, decision)
