"""The driver of container engines: everything but where the engine is.

The wall's first process is the guest agent, whose stdin and stdout the engine attaches; a ``ringfence-link``
process of this machine owns that stream (``runtimes.linking``). Where the engine runs on this machine and the
node is root, the handle names the agent's process, and the workload is in the node's cgroups; otherwise it
names the link process, which lives exactly as long as the stream, and the limits are the engine's own.

A sandbox that must not outlive its node: the link ends with the node, the engine closes the agent's stdin,
the agent ends, and the engine removes the container. A kept one: the container runs on, the link too; if the
link is killed, the next who connects starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import socket
import tarfile
from collections.abc import Awaitable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ringfence.model.errors import (
    HostLimit,
    LinkLost,
    RingfenceError,
    RuntimeUnavailable,
    StartFailed,
    Unsupported,
)
from ringfence.model.levels import Boundary, Level
from ringfence.runtimes import linking
from ringfence.runtimes.contract import Capabilities, Exit, Handle, Probe, StartSpec, WallStats
from ringfence.runtimes.engines import containers, endpoints
from ringfence.runtimes.engines.client import Client, EngineError
from ringfence.runtimes.engines.containers import Facts, name_of
from ringfence.runtimes.engines.mourning import Mourning
from ringfence.runtimes.engines.stock import Stock
from ringfence.runtimes.launching.driver import LaunchedRuntime
from ringfence.runtimes.launching.processes import ProcessRef, boot_id

if TYPE_CHECKING:
    from ringfence.model.sandbox import EffectiveBoundary
    from ringfence.runtimes.context import RuntimeContext

_GONE_TIMEOUT = 30.0  # seconds that the engine may take to remove a container
_CODE_TIMEOUT = 20.0  # seconds from a wall's end until the engine must have said how it ended
_T = TypeVar("_T")
# OCI runtimes whose container is not made of this kernel's namespaces, by what their name begins with.
_OTHERS = {
    "runsc": (Level.L3, Boundary.USERSPACE_KERNEL),
    "io.containerd.runsc": (Level.L3, Boundary.USERSPACE_KERNEL),
    "kata": (Level.L3, Boundary.HARDWARE),
    "io.containerd.kata": (Level.L3, Boundary.HARDWARE),
}


class EngineRuntime(LaunchedRuntime):
    """Base of docker and podman; ``NAME:RUNTIME`` chooses one of the engine's OCI runtimes."""

    engine: str
    oldest: tuple[int, ...]
    at_once: int  # starts and removals: more of them only wait within the engine, each beyond its time
    start_deadline = 900.0  # seconds: the first of a template sends its image

    def __init__(self, context: RuntimeContext, oci: str = "") -> None:
        super().__init__(context)
        self.name = f"{self.engine}:{oci}" if oci else self.engine
        self.oci = oci or os.environ.get(f"RINGFENCE_{self.engine.upper()}_RUNTIME", "")
        found = next((what for start, what in _OTHERS.items() if self.oci.startswith(start)), None)
        self.level, self.boundary = found or (Level.L2, Boundary.NAMESPACES)
        self._client: Client | None = None
        self._info: dict[str, Any] | None = None
        self.stock = Stock(self.engine, self.client)
        self._mourning = Mourning()
        self._turns = asyncio.Semaphore(self.at_once)
        self._asking = asyncio.Lock()
        self._begun: set[str] = set()  # sandboxes of which the engine was told something

    # -- the engine

    def client(self) -> Client:
        """Of the engine that the user's own tools would use.

        Raises:
            RuntimeUnavailable: its address makes no sense.
        """
        if self._client is None:
            self._client = Client(endpoints.find(self.engine))
        return self._client

    async def info(self) -> dict[str, Any]:
        """What the engine says of itself; asked once.

        Raises:
            RuntimeUnavailable: it can't be reached, or is too old.
        """
        async with self._asking:  # a dozen starts at once are one question
            return self._info or await self._asked()

    async def _asked(self) -> dict[str, Any]:
        if self._info is None:
            try:
                version = await self.client().call("GET", "/version")
                found = await self.client().call("GET", "/info")
            except EngineError as error:
                raise RuntimeUnavailable(
                    f"{self.engine} does not say what it is: {error.message}", hint="look at its log"
                ) from error
            text = str(version.get("Version", ""))
            numbers = tuple(
                int(part) for part in text.split("-")[0].split("+")[0].split(".") if part.isdigit()
            )
            if numbers < self.oldest:
                wanted = ".".join(map(str, self.oldest))
                raise RuntimeUnavailable(
                    f"{self.engine} {text or '?'} is too old",
                    hint=f"install {wanted} or later",
                    runtime=self.name,
                )
            if found.get("OSType", "linux") != "linux":
                raise RuntimeUnavailable(f"{self.engine} runs no Linux containers", hint="switch it to Linux")
            if containers.unlimited(found):
                raise RuntimeUnavailable(
                    f"{self.engine} runs without root here and enforces no limit of memory or processes: it "
                    "says so itself, and starts containers all the same",
                    hint="control groups of version 2, delegated to the user, or the engine as root",
                    runtime=self.name,
                )
            found["_version"] = text
            found["_host"] = os.uname().nodename  # a host that is renamed later is still the same
            self._info = found
        return self._info

    async def facts(self, spec: StartSpec) -> Facts:
        """How a container is made on this engine. Raises as :meth:`info`."""
        info = await self.info()
        words = " ".join(map(str, info.get("SecurityOptions") or []))
        remapped = "name=userns" in words or "name=rootless" in words or bool(info.get("Rootless"))
        own_kernel = self.boundary is not Boundary.NAMESPACES
        local = self._local(info)
        return Facts(
            runtime=self.oci,
            local=local,
            nested=not remapped and not own_kernel,
            grouped=local
            and self.context.root
            and not remapped
            and not own_kernel
            and bool(spec.cgroup.agent)
            and str(info.get("CgroupVersion", "1")) == "1",
            podman=self.engine == "podman",
        )

    def _local(self, info: dict[str, Any]) -> bool:
        """Whether it runs on this very machine: then paths and process numbers mean the same to both."""
        here = os.uname()
        return (
            bool(self.client().endpoint.path)
            and info.get("Name") == info.get("_host", here.nodename)
            and info.get("KernelVersion") == here.release
        )

    # -- the contract

    def capabilities(self) -> Capabilities:
        """See the contract."""
        return Capabilities(
            rootless=True,
            user_zero=True,
            mounts=True,
            recover=True,
            disk_limit=True,
            pause=True,
            gpu=self.context.root,
            network=("none", "egress"),
            transparent=True,
        )

    async def probe(self) -> Probe:
        """See the contract: starts a container and talks to the agent in it."""
        from ringfence.runtimes.launching.probing import probe, unavailable
        from ringfence.runtimes.vulnerabilities import vulnerabilities

        try:
            info = await self.info()
        except RingfenceError as error:
            return unavailable(self, error.message, error.hint)
        version = info["_version"]
        known = vulnerabilities(self.engine, version)
        runtimes = info.get("Runtimes") or {}
        if self.oci and runtimes and self.oci not in runtimes and "." not in self.oci:
            return unavailable(
                self,
                f"{self.engine} has no OCI runtime {self.oci} (it has {', '.join(sorted(runtimes))})",
                f"add it to the engine's configuration: {self.engine}d --add-runtime {self.oci}=PATH",
                version,
                known,
            )
        found = await probe(self, version, known)
        if "hybrid mode" in found.reason:  # crun's words
            found = replace(
                found, remedy="use the runtime crun itself, or the engine's runc; or version 2 only"
            )
        return found

    async def start(self, spec: StartSpec) -> Handle:
        """See the contract."""
        containers.check(spec)
        _check_folders("folder", spec.folder)
        facts = await self.facts(spec)
        if facts.local:  # an engine may make what is missing, on the host
            _check_sources(spec)
        async with self._turns:
            return await self._start(spec, facts)

    async def _start(self, spec: StartSpec, facts: Facts) -> Handle:
        stream: socket.socket | None = None
        self._begun.add(spec.id)
        try:
            image, volumes = await self._image(spec)
            name = name_of(spec.id)
            body = self._document(spec, image, facts, volumes)
            if spec.ephemeral:
                self._mourning.begin(name, self.client().endpoint)
            # To its end even if the caller is cancelled: what is not known to be there can't be removed.
            made = await _whole(
                self._step("create", self.client().call("POST", "/containers/create", {"name": name}, body))
            )
            container = str(made["Id"])
            self._mourning.made(name)
            archive = self._archive(spec)
            await self._step(
                "agent",
                self.client().upload(
                    "PUT", f"/containers/{container}/archive", {"path": containers.PLACE}, archive
                ),
            )
            stream = await self._step("attach", self._attach(container))
            await _whole(self._step("start", self.client().call("POST", f"/containers/{container}/start")))
            pid = await self._pid(container) if facts.local else 0
            if facts.grouped:
                self._join(spec, pid)
            link = await linking.start(
                spec.folder, stream=stream.fileno(), docker=True, fresh=True, owned=spec.ephemeral
            )
            return self._handle(spec, facts, container, pid, link)
        except BaseException as error:
            said = await self._said(spec) if isinstance(error, StartFailed) else ""
            await asyncio.shield(asyncio.ensure_future(self._remove(spec.id)))
            _forget_gpus(spec.folder)
            if said and isinstance(error, StartFailed):
                raise StartFailed(f"{error.message}: {said}", **error.details) from error
            raise
        finally:
            if stream is not None:
                stream.close()

    def _document(
        self, spec: StartSpec, image: str, facts: Facts, volumes: tuple[str, ...]
    ) -> dict[str, Any]:
        """The body of a ``create``, with the GPUs that are asked for and the host's security module."""
        gpus = None
        if spec.gpus:
            from ringfence.runtimes.gpu import handing

            if not facts.local:
                raise Unsupported(
                    "what GPUs the engine's machine has can't be seen from here",
                    hint="use an engine on this machine",
                    capability="gpu",
                )
            spec, gpus = handing.prepare(spec)
        body = containers.document(spec, image, facts, volumes)
        if gpus is not None:
            for key, more in handing.engine_host_config(gpus).items():
                body["HostConfig"][key] = [*(body["HostConfig"].get(key) or []), *more]
        if facts.local:
            body["HostConfig"]["SecurityOpt"] += self.context.engine_security(spec)
        return body

    async def recover(self, handle: Handle) -> bool:
        """See the contract: the container runs, and somebody can reach its agent."""
        if handle.version != self.version or not self.ref(handle).alive():
            return False
        try:
            found = await self._inspect(handle)
        except RuntimeUnavailable:
            return False
        return found is not None and bool((found.get("State") or {}).get("Running"))

    async def connect(self, handle: Handle) -> socket.socket:
        """See the contract. Starts another link process where the last one was killed."""
        try:
            return await super().connect(handle)
        except LinkLost:
            if handle.data["ephemeral"] or not self.ref(handle).alive() or _link_of(handle).alive():
                raise
            await self._link_anew(handle)
            return await super().connect(handle)

    async def wait(self, handle: Handle) -> Exit:
        """See the contract; the code is the engine's word."""
        asking = asyncio.ensure_future(self._code(handle))
        try:
            await self.ref(handle).wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CODE_TIMEOUT):
                    code = await asking
                    if code is not None:
                        return Exit(signal=code - 128) if code > 128 else Exit(code=code)
        finally:
            asking.cancel()
        return Exit()

    async def kill(self, handle: Handle) -> None:
        """See the base."""
        await self.thaw(handle)
        if not handle.data["local"]:
            with contextlib.suppress(EngineError):
                await self.client().call("POST", f"/containers/{name_of(handle.id)}/kill", {"signal": "KILL"})
        await super().kill(handle)

    async def thaw(self, handle: Handle) -> None:
        """See the base."""
        with contextlib.suppress(EngineError, RuntimeUnavailable):
            await self.client().call("POST", f"/containers/{name_of(handle.id)}/unpause")

    async def destroy(self, handle: Handle) -> None:
        """See the contract. A handle of a start that failed names the sandbox only."""
        if handle.version or handle.id in self._begun:
            async with self._turns:
                await self._remove(handle.id)
        if "link" in handle.data:
            await linking.end(_link_of(handle))
        with contextlib.suppress(OSError):
            os.unlink(handle.socket_path)
        _forget_gpus(handle.folder)

    async def remove_named(self, sandbox: str) -> None:
        """Remove what a node that died in the middle of a start may have made, of which there is no handle.

        Raises:
            HostLimit: the engine does not remove it. RuntimeUnavailable: it can't be reached.
        """
        await self.info()
        await self._remove(sandbox)

    async def pause(self, handle: Handle) -> None:
        """See the contract."""
        await self._ask("POST", handle, "/pause")

    async def resume(self, handle: Handle) -> None:
        """See the contract."""
        await self._ask("POST", handle, "/unpause")

    async def stats(self, handle: Handle) -> WallStats:
        """See the contract: of the processes where they are this machine's, else the engine's figures."""
        if handle.data["local"] and self.boundary is Boundary.NAMESPACES:
            return await super().stats(handle)
        found = await self._ask("GET", handle, "/stats", {"stream": "false"})
        return WallStats(
            int((found.get("pids_stats") or {}).get("current") or 1),
            int((found.get("memory_stats") or {}).get("usage") or 0),
        )

    async def measure(self, handle: Handle) -> EffectiveBoundary:
        """See the contract: read from /proc where the engine is local, else from what the engine says."""
        from ringfence.runtimes.engines import measuring

        if not self.ref(handle).alive():
            raise LinkLost(f"sandbox {handle.id} has ended", id=handle.id)
        if handle.data["local"] and self.boundary is Boundary.NAMESPACES:
            return measuring.from_proc(self, handle)
        found = await self._inspect(handle)
        if found is None:
            raise LinkLost(f"sandbox {handle.id} has ended", id=handle.id)
        info = await self.info()
        pid = int((found.get("State") or {}).get("Pid") or 0) if self._local(info) else 0
        known = pid and _is_of(pid, str(found["Id"]))
        return measuring.from_engine(self, handle, found, info, pid if known else 0)

    # -- steps of a start

    async def _image(self, spec: StartSpec) -> tuple[str, tuple[str, ...]]:
        """The image's name, sent if the engine has it not, and the volumes that it declares."""
        if spec.root.image:
            return await self.stock.foreign(spec.root.image)
        _check_folders("lower", *spec.root.lowers)
        return await self.stock.own(spec.root.template, containers.layers(spec), spec.folder), ()

    def _archive(self, spec: StartSpec) -> list[bytes]:
        """A tar with the agent and its filter."""
        descriptor = self.context.filter_fd(spec.seccomp)
        program = os.pread(descriptor, 1 << 20, 0)
        with open(self.context.agent, "rb") as file:
            agent = file.read()
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for name, data, mode in (("ringfence-agent", agent, 0o555), ("filter", program, 0o444)):
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(data), mode
                tar.addfile(member, io.BytesIO(data))
        return [out.getvalue()]

    async def _attach(self, container: str) -> socket.socket:
        return await self.client().hijack(
            f"/containers/{container}/attach", {"stream": "1", "stdin": "1", "stdout": "1"}
        )

    async def _pid(self, container: str) -> int:
        found = await self._step("start", self.client().call("GET", f"/containers/{container}/json"))
        pid = int((found.get("State") or {}).get("Pid") or 0)
        if not pid:
            code = (found.get("State") or {}).get("ExitCode")
            raise StartFailed(f"the guest agent ended at once, with {code}", step="agent")
        return pid

    def _join(self, spec: StartSpec, pid: int) -> None:
        """Put the agent into the node's cgroups, but for the freezer: the engine pauses by its own."""
        for path in spec.cgroup.agent:
            if "/freezer/" in path:
                continue
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
                try:
                    os.write(descriptor, str(pid).encode())
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise StartFailed(
                    f"can't join {path}: {error.strerror}", step="cgroup", errno=str(error.errno)
                ) from error

    def _handle(self, spec: StartSpec, facts: Facts, container: str, pid: int, link: ProcessRef) -> Handle:
        ours = self.context.root and bool(pid) and _is_of(pid, container)
        first = ProcessRef.of(pid) if ours else link
        if not first.birth:
            raise StartFailed("the guest agent has ended", step="agent")
        uid = spec.identity.uid
        data = {
            "container": container,
            "link": [link.pid, link.birth],
            "local": ours,
            "ephemeral": spec.ephemeral,
            "nested": facts.nested,
            "uid": containers.outside(spec, facts, uid),
            "capabilities": spec.identity.capabilities,
            "network": spec.network,
        }
        return Handle(self.name, self.version, spec.id, spec.folder, first.pid, first.birth, boot_id(), data)

    async def _step(self, step: str, work: Awaitable[_T]) -> _T:
        try:
            return await work
        except EngineError as error:
            raise StartFailed(
                f"{self.engine} refused: {error.message}", step=step, status=str(error.status)
            ) from error
        except OSError as error:
            raise StartFailed(
                f"{error.filename or step}: {error.strerror}", step=step, errno=str(error.errno)
            ) from error

    async def _said(self, spec: StartSpec) -> str:
        """Why a container that did not start ended, in the engine's words."""
        try:
            found = await self.client().call("GET", f"/containers/{name_of(spec.id)}/json")
        except (EngineError, RuntimeUnavailable):
            return ""
        state = found.get("State") or {}
        if state.get("Running") or state.get("Status") == "Created":
            return ""
        return str(state.get("Error") or "") or f"its first process ended with {state.get('ExitCode')}"

    # -- what else is asked of the engine

    async def _link_anew(self, handle: Handle) -> None:
        try:
            with await self._attach(name_of(handle.id)) as stream:
                link = await linking.start(handle.folder, stream=stream.fileno(), docker=True)
        except (EngineError, RingfenceError) as error:
            raise LinkLost(
                f"the guest agent can't be reached again: {error}", hint="destroy the sandbox", id=handle.id
            ) from error
        handle.data["link"] = [link.pid, link.birth]

    async def _ask(self, method: str, handle: Handle, what: str, query: dict[str, Any] | None = None) -> Any:
        try:
            return await self.client().call(method, f"/containers/{name_of(handle.id)}{what}", query)
        except EngineError as error:
            if error.status == 404:
                raise LinkLost(f"sandbox {handle.id} has ended", id=handle.id) from error
            raise HostLimit(
                f"{self.engine} did not {what.strip('/')} {handle.id}: {error.message}",
                hint="look at the engine's log",
            ) from error

    async def _inspect(self, handle: Handle) -> dict[str, Any] | None:
        try:
            found = await self.client().call("GET", f"/containers/{name_of(handle.id)}/json")
        except EngineError:
            return None
        return found if isinstance(found, dict) and found.get("Id") == handle.data["container"] else None

    async def _code(self, handle: Handle) -> int | None:
        try:
            found = await self.client().call(
                "POST", f"/containers/{name_of(handle.id)}/wait", {"condition": "not-running"}, within=None
            )
        except (EngineError, RuntimeUnavailable):
            return None
        return int(found["StatusCode"]) if isinstance(found, dict) and "StatusCode" in found else None

    async def _remove(self, sandbox: str) -> None:
        """The container is gone afterwards, whatever its state.

        Raises:
            HostLimit: the engine does not remove it.
        """
        name, last = name_of(sandbox), ""
        try:
            async with asyncio.timeout(_GONE_TIMEOUT):
                while True:
                    try:
                        await self.client().call(
                            "DELETE", f"/containers/{name}", {"force": "true", "v": "true"}
                        )
                    except EngineError as error:
                        if error.status == 404:
                            break
                        last = error.message  # most often: its removal is under way
                    await asyncio.sleep(0.02)
        except (TimeoutError, RuntimeUnavailable) as error:
            text = last or (error.message if isinstance(error, RuntimeUnavailable) else "no answer")
            raise HostLimit(
                f"{self.engine} did not remove the container {name}: {text}",
                hint=f"{self.engine} rm -f {name}",
                container=name,
            ) from error
        self._begun.discard(sandbox)
        await self._mourning.end(name)


def _check_folders(step: str, *paths: str) -> None:
    for path in paths:
        if not os.path.isdir(path):
            raise StartFailed(f"no {step} {path}", step=step, errno=str(errno.ENOENT))


def _check_sources(spec: StartSpec) -> None:
    for bind in spec.root.binds:
        if not os.path.exists(bind.source):
            raise StartFailed(
                f"can't bind {bind.source}: it is not there", step="bind", errno=str(errno.ENOENT)
            )


async def _whole(work: Awaitable[_T]) -> _T:
    """To the end, even if the caller is cancelled; then the cancellation goes on."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(BaseException):
            await asyncio.wait({task})
        if task.done() and not task.cancelled():
            task.exception()  # it is seen
        raise


def _link_of(handle: Handle) -> ProcessRef:
    pid, birth = handle.data["link"]
    return ProcessRef(int(pid), int(birth), handle.boot_id)


def _is_of(pid: int, container: str) -> bool:
    """Whether a process of this machine is that container's: an engine elsewhere has other numbers."""
    try:
        with open(f"/proc/{pid}/cgroup") as file:
            if container in file.read():
                return True
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return containers.PLACE.encode() in file.read()
    except OSError:
        return False


def _forget_gpus(folder: str) -> None:
    if os.path.isdir(os.path.join(folder, "gpu")):
        from ringfence.runtimes.gpu import handing

        handing.forget(folder)
