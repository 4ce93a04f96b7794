"""``ringfence.sdk.sandbox`` without ``await``; scripts/sdk_blocking.py writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ringfence.sdk.background import BACKGROUND
from ringfence.sdk.blocking.base import Facade, _opened, _plain
from ringfence.sdk.blocking.contexts import Contexts
from ringfence.sdk.blocking.files import Files
from ringfence.sdk.blocking.ports import Tunnel
from ringfence.sdk.blocking.process import Process
from ringfence.sdk.blocking.service import Service
from ringfence.sdk.blocking.volumes import Volume
from ringfence.sdk.policy import Policy
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
from ringfence.sdk.sandbox import AsyncSandbox, Sink
from ringfence.sdk.wire import Command


class Sandbox(Facade):
    """One sandbox. Leaving ``with`` ends it, and whatever runs in it; :meth:`close` leaves it alone.

    >>> with Sandbox.create() as sandbox:
    ...     result = sandbox.run("echo hello")
    ...     print(result.stdout, end="")
    hello

    Every call may raise, besides what it names: ``ServiceUnreachable``, ``NotAuthenticated``,
    ``NotAllowed``, ``RateLimited``, ``NodeUnavailable`` and ``NotFound`` (the sandbox is gone); all are
    ``RingfenceError`` with ``message``, ``hint`` and ``details``.
    """

    _async: AsyncSandbox

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
        volumes: Mapping[str, Volume | str] | Sequence[Mapping[str, Any]] | None = None,
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
        service: Service | None = None,
    ) -> Sandbox:
        """Start a sandbox; what is left out is the service's default.

        >>> with Sandbox.create(memory="256MiB", timeout="5m", env={"NAME": "world"}) as sandbox:
        ...     print(sandbox.run("echo hello $NAME").stdout, end="")
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
        return Sandbox._of(
            BACKGROUND.run(
                _opened(
                    AsyncSandbox.create(
                        template=template,
                        policy=policy,
                        runtime=runtime,
                        level=level,
                        pool=pool,
                        snapshot=snapshot,
                        size=size,
                        cpus=cpus,
                        memory=memory,
                        disk=disk,
                        network=network,
                        env=env,
                        secrets=secrets,
                        files=files,
                        labels=labels,
                        volumes=_plain(volumes),
                        timeout=timeout,
                        idle=idle,
                        on_idle=on_idle,
                        name=name,
                        task=task,
                        agent=agent,
                        parent_agent=parent_agent,
                        agent_class=agent_class,
                        wait=wait,
                        wait_for_room=wait_for_room,
                        start_timeout=start_timeout,
                        idempotency_key=idempotency_key,
                        service=_plain(service),
                    )
                )
            )
        )

    @classmethod
    def connect(cls, id: str, *, service: Service | None = None) -> Sandbox:
        """One that exists, by its id. Raises NotFound."""
        return Sandbox._of(BACKGROUND.run(_opened(AsyncSandbox.connect(id, service=_plain(service)))))

    @classmethod
    def list(
        cls,
        *,
        labels: Mapping[str, str] | None = None,
        states: Sequence[str] = (),
        newest_first: bool = False,
        service: Service | None = None,
    ) -> Iterator[SandboxInfo]:
        """Those of the project, one after the other.

        >>> with Sandbox.create(labels={"team": "a"}) as sandbox:
        ...     for info in Sandbox.list(labels={"team": "a"}, states=["running"]):
        ...         print(info.id == sandbox.id)
        True
        """
        return BACKGROUND.iterate(
            AsyncSandbox.list(
                labels=labels, states=states, newest_first=newest_first, service=_plain(service)
            )
        )

    @property
    def id(self) -> str:
        """Its id."""
        return self._async.id

    @property
    def state(self) -> str:
        """Its state as it was last seen."""
        return self._async.state

    def refresh(self) -> SandboxInfo:
        """Its record as it is now."""
        return BACKGROUND.run(self._async.refresh())

    def wait(self, *states: str, timeout: float = 300.0) -> SandboxInfo:
        """Return when it is in one of these states (default: running).

        Raises:
            WrongState: it came to another end. DeadlineExceeded: not within ``timeout`` seconds.
        """
        return BACKGROUND.run(self._async.wait(*states, timeout=timeout))

    def update(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        idle: float | str | None = None,
        on_idle: str | None = None,
        network: str | Mapping[str, Any] | None = None,
    ) -> SandboxInfo:
        """Change what can change while it runs; what is left out stays."""
        return BACKGROUND.run(
            self._async.update(labels=labels, env=env, idle=idle, on_idle=on_idle, network=network)
        )

    def boundary(self) -> Mapping[str, Any]:
        """The wall, measured now on the living sandbox: runtime, level, seccomp, limits …"""
        return BACKGROUND.run(self._async.boundary())

    def run(
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

        >>> with Sandbox.create() as sandbox:
        ...     result = sandbox.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
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
        return BACKGROUND.run_calling(
            lambda here: self._async.run(
                command,
                env=env,
                cwd=cwd,
                stdin=stdin,
                timeout=timeout,
                on_stdout=here(on_stdout),
                on_stderr=here(on_stderr),
                check=check,
                root=root,
            )
        )

    def start(
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
    ) -> Process:
        """Start a command and look on; iterate over it for its output.

        >>> with Sandbox.create() as sandbox:
        ...     process = sandbox.start("read line; echo got $line", stdin=True)
        ...     process.write(b"something\\n")
        ...     for piece in process:
        ...         print(piece.stream, piece.text, end="")
        stdout got something

        It goes on when the connection is lost, or this process ends; :meth:`attach` finds it by its id.
        """
        return Process._of(
            BACKGROUND.run(
                self._async.start(
                    command,
                    env=env,
                    cwd=cwd,
                    stdin=stdin,
                    pty=pty,
                    rows=rows,
                    columns=columns,
                    timeout=timeout,
                    id=id,
                    root=root,
                )
            )
        )

    def attach(self, id: str, *, stdout: int = 0, stderr: int = 0) -> Process:
        """A command that was started before, from these offsets of its output on. Raises NotFound."""
        return Process._of(BACKGROUND.run(self._async.attach(id, stdout=stdout, stderr=stderr)))

    def processes(self) -> Sequence[ProcessInfo]:
        """The commands that it knows: running, and ended ones whose output is kept."""
        return BACKGROUND.run(self._async.processes())

    def run_code(
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

        >>> with Sandbox.create() as sandbox:
        ...     _ = sandbox.run_code("x = 6")
        ...     print(sandbox.run_code("x * 7").text)
        42
        """
        return BACKGROUND.run_calling(
            lambda here: self._async.run_code(
                code,
                language=language,
                timeout=timeout,
                on_stdout=here(on_stdout),
                on_stderr=here(on_stderr),
                on_result=here(on_result),
                check=check,
            )
        )

    @property
    def contexts(self) -> Contexts:
        """Its interpreters."""
        return Contexts._of(self._async.contexts)

    @property
    def files(self) -> Files:
        """Its files."""
        return Files._of(self._async.files)

    def changes(self) -> Sequence[Change]:
        """Files that differ from its template, found on the host. Raises Unsupported."""
        return BACKGROUND.run(self._async.changes())

    def port(self, port: int, *, seconds: float | None = None) -> Port:
        """How a port that something inside listens on is reached from outside: its address and a token.

        >>> with Sandbox.create() as sandbox:
        ...     port = sandbox.port(8000)
        ...     print(port.url.startswith("http://8000-sb-"))
        True

        Args:
            port: inside.
            seconds: how long the token is good for (default: the sandbox's life).
        """
        return BACKGROUND.run(self._async.port(port, seconds=seconds))

    def fetch(
        self,
        port: int,
        path: str = "/",
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
    ) -> Answer:
        """One HTTP request to a server inside, through the service; what it answers is the answer.

        >>> with Sandbox.create(files={"index.html": "<p>hello"}) as sandbox:
        ...     server = sandbox.start("python3 -m http.server 8000")
        ...     sandbox.wait_for_port(8000)
        ...     print(sandbox.fetch(8000).text)
        <p>hello
        """
        return BACKGROUND.run(self._async.fetch(port, path, method=method, headers=headers, content=content))

    def wait_for_port(self, port: int, *, timeout: float = 60.0) -> None:
        """Return when something inside listens on this port.

        Raises:
            DeadlineExceeded: nothing does, within ``timeout`` seconds.
        """
        BACKGROUND.run(self._async.wait_for_port(port, timeout=timeout))

    def url(self, port: int) -> str:
        """The address of a port; requests need the headers of :meth:`port`."""
        return BACKGROUND.run(self._async.url(port))

    def tunnel(self, port: int, *, local_port: int = 0, host: str = "127.0.0.1") -> Tunnel:
        """A local TCP port that leads to a port inside, for clients that speak something else than HTTP.

        The tunnel listens until it is closed; ``tunnel.port`` is its local port.
        """
        return Tunnel._of(BACKGROUND.run(self._async.tunnel(port, local_port=local_port, host=host)))

    def snapshot(self, name: str | None = None, *, kind: str | None = None) -> SnapshotInfo:
        """Save it; it goes on. ``kind``: disk, or memory (with everything that runs).

        Raises:
            Unsupported: its runtime can't.
        """
        return BACKGROUND.run(self._async.snapshot(name, kind=kind))

    def fork(self, count: int = 1, *, labels: Mapping[str, str] | None = None) -> Sequence[Sandbox]:
        """Copies of it, each with an identity of its own. Raises Unsupported."""
        return [Sandbox._of(each) for each in BACKGROUND.run(self._async.fork(count, labels=labels))]

    def pause(self) -> SandboxInfo:
        """Stop everything in it for a while. Raises Unsupported."""
        return BACKGROUND.run(self._async.pause())

    def resume(self) -> SandboxInfo:
        """Let it go on."""
        return BACKGROUND.run(self._async.resume())

    def reset(self) -> SandboxInfo:
        """Begin anew from the template: no process and no file is left, the id stays. Raises Unsupported."""
        return BACKGROUND.run(self._async.reset())

    def extend(self, seconds: float) -> SandboxInfo:
        """It ends so many seconds from now, and not before."""
        return BACKGROUND.run(self._async.extend(seconds))

    def logs(self, *, follow: bool = False) -> Iterator[LogEntry]:
        """What happened to it, oldest first; ``follow``: and what is going to, until its end."""
        return BACKGROUND.iterate(self._async.logs(follow=follow))

    def metrics(self) -> Mapping[str, Any]:
        """What it takes now, measured on the host: CPU seconds, memory, disk, processes."""
        return BACKGROUND.run(self._async.metrics())

    def connections(self, limit: int = 100) -> Mapping[str, Any]:
        """What it asked for through its egress door: the newest ``items``, newest last, and its ``usage``."""
        return BACKGROUND.run(self._async.connections(limit))

    def records(self, limit: int = 1000) -> Mapping[str, Any]:
        """The newest requests that its policy records (``network.record``), as a HAR 1.2 document."""
        return BACKGROUND.run(self._async.records(limit))

    def revoke_placeholders(self, *sandboxes: str) -> SandboxInfo:
        """Take back placeholders of secrets, for good: those that it inherited as a copy, or, by sandboxes'
        ids, those of these (its own id: its own).
        """
        return BACKGROUND.run(self._async.revoke_placeholders(*sandboxes))

    def kill(self, *, grace: float = 0.0) -> SandboxInfo | None:
        """End it and remove all that is its own; ``grace``: seconds between SIGTERM and SIGKILL.

        Succeeds if it is gone; ``None`` then.
        """
        return BACKGROUND.run(self._async.kill(grace=grace))

    def close(self) -> None:
        """Let go of it, its processes and tunnels; it lives on, and they in it. Idempotent."""
        BACKGROUND.run(self._async.close())

    def __enter__(self) -> Sandbox:
        BACKGROUND.run(self._async.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        BACKGROUND.run(self._async.__aexit__(*_))

    def __repr__(self) -> str:
        return repr(self._async).removeprefix("Async")

    @property
    def info(self) -> SandboxInfo:
        """As it was last seen."""
        return self._async.info
