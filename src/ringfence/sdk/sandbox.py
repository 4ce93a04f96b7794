"""A sandbox of a service, as coroutines. ``ringfence.sdk.blocking`` has the same without ``await``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakSet

from ringfence.model.errors import DeadlineExceeded, GuestRefused, NotFound, WrongState
from ringfence.sdk import service as services
from ringfence.sdk import sse, wire
from ringfence.sdk.contexts import AsyncContexts
from ringfence.sdk.files import AsyncFiles
from ringfence.sdk.policy import Policy
from ringfence.sdk.ports import AsyncTunnel
from ringfence.sdk.process import AsyncProcess
from ringfence.sdk.results import (
    Answer,
    Change,
    CodeResult,
    CommandResult,
    LogEntry,
    Port,
    ProcessInfo,
    SandboxInfo,
    SnapshotInfo,
)
from ringfence.sdk.service import AsyncService, Opening
from ringfence.sdk.transport import Transport, closing
from ringfence.sdk.volumes import AsyncVolume
from ringfence.sdk.wire import Command

Sink = Callable[[bytes], Any]
_Held = TypeVar("_Held", AsyncProcess, AsyncTunnel)
LONGEST_WAIT = 100.0  # seconds of one request that waits; the service takes 120 at most


class AsyncSandbox:
    """One sandbox. Leaving ``async with`` ends it, and whatever runs in it; :meth:`close` leaves it alone.

    >>> async with AsyncSandbox.create() as sandbox:
    ...     result = await sandbox.run("echo hello")
    ...     print(result.stdout, end="")
    hello

    Every call may raise, besides what it names: ``ServiceUnreachable``, ``NotAuthenticated``,
    ``NotAllowed``, ``RateLimited``, ``NodeUnavailable`` and ``NotFound`` (the sandbox is gone); all are
    ``RingfenceError`` with ``message``, ``hint`` and ``details``.
    """

    def __init__(self, service: AsyncService, transport: Transport, info: SandboxInfo) -> None:
        self._service: AsyncService | None = service
        self._transport = transport
        self.info = info  # its record as it was last seen; :meth:`refresh` looks again
        self._path = f"/v1/sandboxes/{wire.segment(info.id)}"
        self._files: AsyncFiles | None = None
        self._contexts: AsyncContexts | None = None
        self._door: dict[int, Port] | None = None
        self._open: WeakSet[AsyncProcess | AsyncTunnel] = WeakSet()  # closed with us

    # -- making and finding

    @classmethod
    def create(
        cls,
        *,
        template: str | None = None,
        policy: Policy | Mapping[str, Any] | str | None = None,
        runtime: str | None = None,
        level: str | None = None,
        pool: str | None = None,
        snapshot: str | None = None,
        size: str | None = None,
        cpus: float | None = None,
        memory: int | str | None = None,
        disk: int | str | None = None,
        network: str | Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        files: Mapping[str, str | bytes] | None = None,
        labels: Mapping[str, str] | None = None,
        volumes: Mapping[str, AsyncVolume | str] | Sequence[Mapping[str, Any]] | None = None,
        timeout: float | str | None = None,
        idle: float | str | None = None,
        on_idle: str | None = None,
        name: str | None = None,
        task: str | None = None,
        agent: str | None = None,
        parent_agent: str | None = None,
        agent_class: str | None = None,
        wait: bool = True,
        wait_for_room: float = 0.0,
        start_timeout: float | None = None,
        idempotency_key: str | None = None,
        service: AsyncService | None = None,
    ) -> Opening[AsyncSandbox]:
        """Start a sandbox; what is left out is the service's default.

        >>> async with AsyncSandbox.create(memory="256MiB", timeout="5m", env={"NAME": "world"}) as sandbox:
        ...     print((await sandbox.run("echo hello $NAME")).stdout, end="")
        hello world

        Args:
            template: root file system; ``host``, or what ``ringfence template ls`` lists.
            policy: a :class:`Policy`, a preset's name or a policy's document; what follows replaces parts.
            runtime, level: which wall, or how strong it must be at least (``L1`` to ``L4``).
            pool: take a started one from this pool. ``snapshot``: go on from this saved sandbox.
            size, cpus, memory, disk: how big; bytes or ``"512MiB"``.
            network: ``none``, ``egress`` or ``open``, or the network part of a policy.
            env: variables of its commands. ``secrets``: files in ``/run/secrets``, never stored.
            files: path inside → content, written before it is handed over.
            labels: to find it by; ``name`` and ``task`` are labels as well.
            volumes: path inside → volume or its name (writable), or the API's own form.
            timeout: seconds (or ``"30m"``) until it ends whatever happens; ``idle``: without use until it
                is paused or stopped (``on_idle``).
            agent, parent_agent, agent_class: for whom.
            wait: return when it runs; else at once, see :meth:`wait`.
            wait_for_room: seconds for which it is asked again while a quota, or the pool's queue, is full.
            start_timeout: seconds that queueing and starting may take.
            idempotency_key: the same key again gives the same sandbox; one is made up for each call, so
                that a create that is repeated after a broken connection does not start two.
            service: if not the configured one.

        Raises:
            InvalidRequest, PolicyError: what is asked for can't be.
            QuotaExceeded: there are too many; told at once, unless ``wait_for_room``.
            RuntimeUnavailable: no healthy runtime meets it. StartFailed, HostLimit: the start failed.
        """
        tags = dict(labels or {}) | ({"name": name} if name else {})
        body = wire.filled(
            template=template, policy=wire.policy(policy), runtime=runtime, level=level, pool=pool,
            snapshot=snapshot, size=size, cpus=cpus, memory=memory, disk=disk,
            network=dict(network) if isinstance(network, Mapping) else network,
            env=dict(env) if env else None, secrets=dict(secrets) if secrets else None,
            files=wire.contents(files) if files else None, labels=tags or None,
            volumes=wire.volumes(volumes), timeout=timeout, idle=idle, on_idle=on_idle, task=task,
            agent=agent, parent_agent=parent_agent, agent_class=agent_class, start_timeout=start_timeout,
        )  # fmt: skip
        if not wait:
            body["wait"] = False
        key = idempotency_key or str(uuid.uuid4())

        async def make() -> AsyncSandbox:
            held = services.of(service)
            try:
                transport = await held.transport()
                longest = None if start_timeout is None else start_timeout + transport.settings.timeout
                value = await transport.call(
                    "POST", "/v1/sandboxes", json=body, key=key, timeout=longest, room=wait_for_room
                )
                return cls(held, transport, wire.sandbox(value))
            except BaseException:
                await held.release()
                raise

        return Opening(make)

    @classmethod
    def connect(cls, id: str, *, service: AsyncService | None = None) -> Opening[AsyncSandbox]:
        """One that exists, by its id. Raises NotFound."""

        async def make() -> AsyncSandbox:
            held = services.of(service)
            try:
                transport = await held.transport()
                value = await transport.call("GET", f"/v1/sandboxes/{wire.segment(id)}")
                return cls(held, transport, wire.sandbox(value))
            except BaseException:
                await held.release()
                raise

        return Opening(make)

    @classmethod
    async def list(
        cls,
        *,
        labels: Mapping[str, str] | None = None,
        states: Sequence[str] = (),
        newest_first: bool = False,
        service: AsyncService | None = None,
    ) -> AsyncIterator[SandboxInfo]:
        """Those of the project, one after the other.

        >>> async with AsyncSandbox.create(labels={"team": "a"}) as sandbox:
        ...     async for info in AsyncSandbox.list(labels={"team": "a"}, states=["running"]):
        ...         print(info.id == sandbox.id)
        True
        """
        asked = {
            "label": [f"{name}={value}" for name, value in (labels or {}).items()] or None,
            "state": [*states] or None,
            "order": "newest" if newest_first else None,
        }
        async with closing(services.items(service, "/v1/sandboxes", asked)) as values:
            async for value in values:
                yield wire.sandbox(value)

    # -- what it is

    @property
    def id(self) -> str:
        """Its id."""
        return self.info.id

    @property
    def state(self) -> str:
        """Its state as it was last seen."""
        return self.info.state

    async def refresh(self) -> SandboxInfo:
        """Its record as it is now."""
        return self._seen(await self._call("GET"))

    async def wait(self, *states: str, timeout: float = 300.0) -> SandboxInfo:
        """Return when it is in one of these states (default: running).

        Raises:
            WrongState: it came to another end. DeadlineExceeded: not within ``timeout`` seconds.
        """
        wanted = states or ("running",)
        until = time.monotonic() + timeout
        while True:
            left = min(max(until - time.monotonic(), 0.0), LONGEST_WAIT)
            asked = {"state": [*wanted], "timeout": round(left, 3)}
            try:
                info = self._seen(await self._call("GET", "/wait", params=asked, timeout=left + 30))
                break
            except DeadlineExceeded:
                if time.monotonic() >= until:
                    raise
        if info.state not in wanted:
            raise WrongState(
                f"sandbox {info.id} is {info.state}: {info.cause} {info.detail}".rstrip(" :"),
                hint=f"waited for {', '.join(wanted)}",
            )
        return info

    async def update(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        idle: float | str | None = None,
        on_idle: str | None = None,
        network: str | Mapping[str, Any] | None = None,
    ) -> SandboxInfo:
        """Change what can change while it runs; what is left out stays."""
        body = wire.filled(labels=labels, env=env, idle=idle, on_idle=on_idle, network=network)
        return self._seen(await self._call("PATCH", json=body, safe=True))

    async def boundary(self) -> Mapping[str, Any]:
        """The wall, measured now on the living sandbox: runtime, level, seccomp, limits …"""
        found: Mapping[str, Any] = await self._call("GET", "/boundary")
        return found

    # -- commands

    async def run(
        self,
        command: Command,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes | str | None = None,
        timeout: float | None = None,
        on_stdout: Sink | None = None,
        on_stderr: Sink | None = None,
        check: bool = False,
        root: bool = False,
    ) -> CommandResult:
        """Run a command to its end. Text is a line for the shell inside, a sequence goes as it is.

        >>> async with AsyncSandbox.create() as sandbox:
        ...     result = await sandbox.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
        ...     print(result.exit_code, result.stdout.strip(), result.stderr.strip(), result.cause)
        3 out err exited

        Args:
            command: what to run.
            env, cwd, stdin: more variables, its folder, its input (else empty).
            timeout: seconds after which it is killed with all its children.
            on_stdout, on_stderr: called with each piece of output as it comes.
            check: raise CommandFailed if it ends with anything but 0.
            root: as root of the sandbox itself, where the policy has one.
        """
        spec = wire.command(command, env=env, cwd=cwd, timeout=timeout, root=root)
        if on_stdout is None and on_stderr is None and len(stdin or b"") < wire.MOST_INLINE:
            result = await AsyncProcess.run_at_once(self._transport, self._path, spec, stdin, timeout)
        else:
            async with await AsyncProcess.begin(
                self._transport, self._path, spec | {"stdin": True}
            ) as process:
                result = await process.communicate(stdin, on_stdout, on_stderr)
        return result.check() if check else result

    async def start(
        self,
        command: Command,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bool = False,
        pty: bool = False,
        rows: int = 24,
        columns: int = 80,
        timeout: float | None = None,
        id: str | None = None,
        root: bool = False,
    ) -> AsyncProcess:
        """Start a command and look on; iterate over it for its output.

        >>> async with AsyncSandbox.create() as sandbox:
        ...     process = await sandbox.start("read line; echo got $line", stdin=True)
        ...     await process.write(b"something\\n")
        ...     async for piece in process:
        ...         print(piece.stream, piece.text, end="")
        stdout got something

        It goes on when the connection is lost, or this process ends; :meth:`attach` finds it by its id.
        """
        spec = wire.command(command, env=env, cwd=cwd, timeout=timeout, root=root)
        spec |= wire.filled(id=id, stdin=stdin or pty or None, pty=pty or None)
        if pty:
            spec |= {"rows": rows, "columns": columns}
        return self._holding(await AsyncProcess.begin(self._transport, self._path, spec))

    async def attach(self, id: str, *, stdout: int = 0, stderr: int = 0) -> AsyncProcess:
        """A command that was started before, from these offsets of its output on. Raises NotFound."""
        return self._holding(await AsyncProcess.follow(self._transport, self._path, id, stdout, stderr))

    async def processes(self) -> Sequence[ProcessInfo]:
        """The commands that it knows: running, and ended ones whose output is kept."""
        found = self._transport.pages(f"{self._path}/processes")
        return [wire.process(each) async for each in found]

    # -- code

    async def run_code(
        self,
        code: str,
        *,
        language: str = "python",
        timeout: float | None = None,
        on_stdout: Callable[[str], Any] | None = None,
        on_stderr: Callable[[str], Any] | None = None,
        on_result: Callable[[Any], Any] | None = None,
        check: bool = False,
    ) -> CodeResult:
        """Run code in the sandbox's own interpreter of this language: variables live on between calls.

        >>> async with AsyncSandbox.create() as sandbox:
        ...     _ = await sandbox.run_code("x = 6")
        ...     print((await sandbox.run_code("x * 7")).text)
        42
        """
        context = await self.contexts.default(language)
        return await context.run(
            code, timeout=timeout, on_stdout=on_stdout, on_stderr=on_stderr, on_result=on_result, check=check
        )

    @property
    def contexts(self) -> AsyncContexts:
        """Its interpreters."""
        if self._contexts is None:
            self._contexts = AsyncContexts(self._transport, self._path)
        return self._contexts

    @property
    def files(self) -> AsyncFiles:
        """Its files."""
        if self._files is None:
            self._files = AsyncFiles(self._transport, self._path)
        return self._files

    async def changes(self) -> Sequence[Change]:
        """Files that differ from its template, found on the host. Raises Unsupported."""
        return [wire.change(each) async for each in self._transport.pages(f"{self._path}/changes")]

    # -- ports

    async def port(self, port: int, *, seconds: float | None = None) -> Port:
        """How a port that something inside listens on is reached from outside: its address and a token.

        >>> async with AsyncSandbox.create() as sandbox:
        ...     port = await sandbox.port(8000)
        ...     print(port.url.startswith("http://8000-sb-"))
        True

        Args:
            port: inside.
            seconds: how long the token is good for (default: the sandbox's life).
        """
        body: dict[str, Any] = {"ports": [wire.port_number(port)]} | wire.filled(seconds=seconds)
        value = await self._call("POST", "/token", json=body, safe=True)
        direct = f"{self._transport.settings.base}{self._path}/ports/{port}/"
        return Port(
            port, value["urls"][str(port)], direct, value["headers"], value["token"], value.get("expires_at")
        )

    async def fetch(
        self,
        port: int,
        path: str = "/",
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
    ) -> Answer:
        """One HTTP request to a server inside, through the service; what it answers is the answer.

        >>> async with AsyncSandbox.create(files={"index.html": "<p>hello"}) as sandbox:
        ...     server = await sandbox.start("python3 -m http.server 8000")
        ...     await sandbox.wait_for_port(8000)
        ...     print((await sandbox.fetch(8000)).text)
        <p>hello
        """
        if self._door is None or port not in self._door:
            self._door = (self._door or {}) | {port: await self.port(port)}
        place = f"{self._path}/ports/{wire.port_number(port)}/{path.removeprefix('/')}"
        response = await self._transport.raw(
            method, place, headers={**self._door[port].headers, **(headers or {})}, content=content
        )
        return Answer(response.status_code, dict(response.headers), response.content)

    async def wait_for_port(self, port: int, *, timeout: float = 60.0) -> None:
        """Return when something inside listens on this port.

        Raises:
            DeadlineExceeded: nothing does, within ``timeout`` seconds.
        """
        until = time.monotonic() + timeout
        pause = 0.02
        while True:
            with contextlib.suppress(GuestRefused):
                socket = await self._transport.connect(f"{self._path}/tunnel/{wire.port_number(port)}")
                await socket.close()
                return
            if time.monotonic() >= until:
                raise DeadlineExceeded(f"nothing listens on port {port} after {timeout:g} s")
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.5)

    async def url(self, port: int) -> str:
        """The address of a port; requests need the headers of :meth:`port`."""
        return (await self.port(port)).url

    async def tunnel(self, port: int, *, local_port: int = 0, host: str = "127.0.0.1") -> AsyncTunnel:
        """A local TCP port that leads to a port inside, for clients that speak something else than HTTP.

        The tunnel listens until it is closed; ``tunnel.port`` is its local port.
        """
        return self._holding(
            await AsyncTunnel.open(self._transport, self._path, wire.port_number(port), host, local_port)
        )

    # -- its life

    async def snapshot(self, name: str | None = None, *, kind: str | None = None) -> SnapshotInfo:
        """Save it; it goes on. ``kind``: disk, or memory (with everything that runs).

        Raises:
            Unsupported: its runtime can't.
        """
        body = wire.filled(name=name, kind=kind)
        value = await self._call("POST", "/snapshot", json=body, key=str(uuid.uuid4()), timeout=600)
        return wire.snapshot(value)

    async def fork(
        self, count: int = 1, *, labels: Mapping[str, str] | None = None
    ) -> Sequence[AsyncSandbox]:
        """Copies of it, each with an identity of its own. Raises Unsupported."""
        body = wire.filled(count=count, labels=dict(labels) if labels else None)
        value = await self._call("POST", "/fork", json=body, key=str(uuid.uuid4()), timeout=600)
        return [
            AsyncSandbox(services.of(self._service), self._transport, wire.sandbox(each))
            for each in value["items"]
        ]

    async def pause(self) -> SandboxInfo:
        """Stop everything in it for a while. Raises Unsupported."""
        return self._seen(await self._call("POST", "/pause", safe=True))

    async def resume(self) -> SandboxInfo:
        """Let it go on."""
        return self._seen(await self._call("POST", "/resume", safe=True))

    async def reset(self) -> SandboxInfo:
        """Begin anew from the template: no process and no file is left, the id stays. Raises Unsupported."""
        return self._seen(await self._call("POST", "/reset"))

    async def extend(self, seconds: float) -> SandboxInfo:
        """It ends so many seconds from now, and not before."""
        return self._seen(await self._call("POST", "/extend", json={"timeout": float(seconds)}, safe=True))

    async def logs(self, *, follow: bool = False) -> AsyncIterator[LogEntry]:
        """What happened to it, oldest first; ``follow``: and what is going to, until its end."""
        after = 0
        while True:
            page = await self._call("GET", "/events", params={"after": after})
            for value in page["items"]:
                yield wire.log(value)
            after = page["next_after"]
            if page["items"]:
                continue
            if not follow:
                return
            events = sse.events(self._transport, f"{self._path}/events/stream", {"after": after})
            async with closing(events) as found:
                async for _, value in found:
                    entry = wire.log(value)
                    after = max(after, entry.number)
                    yield entry
            if (await self.refresh()).final:
                follow = False  # once more: what came between the stream's end and now

    async def metrics(self) -> Mapping[str, Any]:
        """What it takes now, measured on the host: CPU seconds, memory, disk, processes."""
        found: Mapping[str, Any] = await self._call("GET", "/metrics")
        return found

    # -- its door

    async def connections(self, limit: int = 100) -> Mapping[str, Any]:
        """What it asked for through its egress door: the newest ``items``, newest last, and its ``usage``."""
        return dict(await self._call("GET", "/connections", params={"limit": limit}))

    async def records(self, limit: int = 1000) -> Mapping[str, Any]:
        """The newest requests that its policy records (``network.record``), as a HAR 1.2 document."""
        async with self._transport.stream("GET", f"{self._path}/records", params={"limit": limit}) as answer:
            return dict(json.loads(await answer.aread()))

    async def revoke_placeholders(self, *sandboxes: str) -> SandboxInfo:
        """Take back placeholders of secrets, for good: those that it inherited as a copy, or, by sandboxes'
        ids, those of these (its own id: its own).
        """
        body = {"sandboxes": list(sandboxes) or None}
        return self._seen(await self._call("POST", "/placeholders/revoke", json=body, safe=True))

    # -- its end

    async def kill(self, *, grace: float = 0.0) -> SandboxInfo | None:
        """End it and remove all that is its own; ``grace``: seconds between SIGTERM and SIGKILL.

        Succeeds if it is gone; ``None`` then.
        """
        try:
            value = await self._call("DELETE", params={"grace": grace or None}, timeout=grace + 60)
        except NotFound:
            return None
        finally:
            await self.close()
        return self._seen(value) if value else None

    async def close(self) -> None:
        """Let go of it, its processes and tunnels; it lives on, and they in it. Idempotent."""
        for each in list(self._open):
            await each.close()
        service, self._service = self._service, None
        if service is not None:
            await service.release()

    async def __aenter__(self) -> AsyncSandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._service is not None:  # else it was ended, or let go of, in the middle
            await self.kill()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, {self.state})"

    def _holding(self, made: _Held) -> _Held:
        self._open.add(made)
        return made

    def _seen(self, value: Mapping[str, Any]) -> SandboxInfo:
        self.info = wire.sandbox(value)
        return self.info

    async def _call(self, method: str, path: str = "", **options: Any) -> Any:
        return await self._transport.call(method, self._path + path, **options)
