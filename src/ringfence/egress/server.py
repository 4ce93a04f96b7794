"""The proxy process: doors opened and closed by whoever started it; questions answered through a socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ringfence.egress.door import Door, DoorSpec, ProjectLimits
from ringfence.egress.engine import Engine, Settings
from ringfence.egress.messages import Messages
from ringfence.egress.serving import Served
from ringfence.guest.doors import DoorPorts, open_ports
from ringfence.guest.link import GuestLink
from ringfence.guest.ports import GuestDatagrams, GuestListener
from ringfence.model.errors import GuestError, InvalidRequest, NotFound, RingfenceError, WrongState

_MOST_WAITING = 10_000  # events that the owner has not read
_MOST_CIRCUITS = 200  # that are told of at once
_OPENING = 20.0  # seconds for the agent to listen


class OpenDoor:
    """A door and the link it is served over. Another link takes the place of one that ended."""

    def __init__(
        self, engine: Engine, spec: DoorSpec, lost: Callable[[str, int], None], opening: int = 0
    ) -> None:
        self.opening = opening
        self.door = Door(engine, spec)
        self.served = Served(self.door)
        self._lost = lost
        self._link: GuestLink | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def attach(self, sock: socket.socket) -> None:
        """Serve over this connection to the agent, which it owns.

        Raises:
            GuestRefused: the agent can't listen there.
            LinkLost, ProtocolViolation: the link did not come about.
        """
        await self.detach()
        async with asyncio.timeout(_OPENING):
            link = await GuestLink.open(sock, role="egress", timeout=_OPENING)
            try:
                ports = await open_ports(link)
            except BaseException:
                await link.close()
                raise
        self._link = link
        self._serve(link, ports)

    def _serve(self, link: GuestLink, ports: DoorPorts) -> None:
        self._spawn(self._watch(link, ports.http, "http"))
        self._spawn(self._accept(ports.socks, "socks"))
        self._spawn(self._accept(ports.caught, "caught"))
        for listener in ports.names_tcp:
            self._spawn(self._accept(listener, "names"))
        for datagrams in ports.names_udp:
            self._spawn(self._answer(datagrams))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a connection of a door failed", "exception": error, "task": task}
            )

    async def _watch(self, link: GuestLink, listener: GuestListener, kind: str) -> None:
        await self._accept(listener, kind)
        if self._link is link:  # nobody took it away: it ended by itself
            self._link = None
            self._lost(self.door.spec.sandbox, self.opening)

    async def _accept(self, listener: GuestListener, kind: str) -> None:
        with contextlib.suppress(GuestError, WrongState):
            while True:
                stream = await listener.accept()
                self._spawn(self.served.connection(kind, stream, stream.peer))

    async def _answer(self, datagrams: GuestDatagrams) -> None:
        with contextlib.suppress(GuestError, WrongState, ValueError):
            while True:
                question = await datagrams.receive()
                answered = self.served.name(question.data)
                if answered is not None:
                    await datagrams.answer(question.number, answered)

    async def detach(self) -> None:
        """Serve no more over the link there is."""
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def close(self, *, forget: bool = False) -> None:
        """End the door. Idempotent. ``forget``: the sandbox is no more, and with it what it has used.

        Otherwise its counts stay: who loses a link on purpose, or outlives a restart, has used what it used.
        """
        await self.door.close()
        await self.detach()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=5.0)
        self.door.engine.closed(self.door, forget=forget)


class Server:
    """Serves the commands of one owner and any number of visitors (the command line)."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.engine = Engine(folder, settings, self._event)
        self.doors: dict[str, OpenDoor] = {}
        self.done = asyncio.Event()
        self._owner: Messages | None = None
        self._visitors: set[Messages] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._path = folder / "sockets" / f"{os.getpid()}.sock"

    def _event(self, event: dict[str, Any]) -> None:
        # An owner that does not listen loses events, and we no memory.
        if self._owner is not None and self._owner.waiting < _MOST_WAITING:
            self._owner.send(event)

    async def run(self, owner: socket.socket) -> None:
        """Serve until the owner's end of this socket closes."""
        self._owner = self._connected(owner, is_owner=True)
        self._listen()
        self._event({"event": "egress.ready", "pid": os.getpid()})
        await self.done.wait()
        await self.close()

    def _listen(self) -> None:
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(str(self._path))
        os.chmod(self._path, 0o600)
        self._listener.listen(16)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._visitor)

    def _visitor(self) -> None:
        if self._listener is None:
            return
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            sock, _ = self._listener.accept()
            self._connected(sock, is_owner=False)

    def _connected(self, sock: socket.socket, *, is_owner: bool) -> Messages:
        def ended() -> None:
            if is_owner:
                self.done.set()
            else:
                self._visitors.discard(messages)

        def received(message: dict[str, Any], descriptors: list[int]) -> None:
            task = asyncio.get_running_loop().create_task(
                self._command(messages, message, descriptors, is_owner)
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        messages = Messages(sock, received, ended)
        if not is_owner:
            self._visitors.add(messages)
        return messages

    async def _command(
        self, messages: Messages, message: dict[str, Any], descriptors: list[int], is_owner: bool
    ) -> None:
        number = message.get("number")
        try:
            name = str(message.get("command", ""))
            known = (self._OWNER | self._EVERYBODY) if is_owner else self._EVERYBODY
            if name not in known:
                raise InvalidRequest(f"there is no command {name[:40]!r}")
            result = await getattr(self, "_do_" + name)(message, descriptors)
            messages.send({"number": number, "result": result})
        except RingfenceError as error:
            messages.send({"number": number, "error": error.as_dict()})
        except TimeoutError:
            error_ = {"code": "deadline_exceeded", "message": "it took too long", "hint": "", "details": {}}
            messages.send({"number": number, "error": error_})
        except (KeyError, TypeError, ValueError, OSError) as error:
            text = f"{type(error).__name__}: {error}"
            messages.send({"number": number, "error": InvalidRequest(text[:300]).as_dict()})
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    _OWNER = frozenset(
        {"open", "attach", "update", "limit", "close", "ca", "placeholders", "revoke", "remember",
         "share_wants", "share_shrink", "share_grant", "share_drop"}
    )  # fmt: skip
    _EVERYBODY = frozenset(
        {"status", "pending", "answer", "secret_put", "secret_list", "secret_remove", "usage", "metrics"}
    )

    # -- the owner's commands

    async def _do_open(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        values = dict(message["spec"])
        for name in ("lineage", "revoked", "answers"):
            values[name] = tuple(str(each) for each in values.get(name, ()))
        values["limits"] = ProjectLimits(**values.get("limits", {}))
        spec = DoorSpec(**values)
        if spec.sandbox in self.doors:
            await self.doors.pop(spec.sandbox).close()
        opened = OpenDoor(self.engine, spec, self._lost, int(message.get("opening", 0)))
        opened.door.revoked |= {str(name) for name in message.get("revoked", ())}
        self.doors[spec.sandbox] = opened
        result = await self._attach(opened, descriptors)
        if self.doors.get(spec.sandbox) is not opened:  # closed while what is inside was waited for
            await opened.close()
            raise NotFound(f"the door of sandbox {spec.sandbox} was closed meanwhile")
        return result

    async def _do_attach(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        return await self._attach(self._door(message), descriptors)

    async def _attach(self, opened: OpenDoor, descriptors: list[int]) -> dict[str, Any]:
        if descriptors:
            sock = socket.socket(fileno=descriptors.pop(0))
            try:
                await opened.attach(sock)
            except BaseException:
                sock.close()
                raise
        return {}

    def _lost(self, sandbox: str, opening: int) -> None:
        self._event({"event": "egress.link_lost", "sandbox": sandbox, "opening": opening})

    async def _do_update(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        return {"ended": self._door(message).door.update(message["network"])}

    async def _do_limit(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        self._door(message).door.limit(message.get("budget"), ProjectLimits(**message["limits"]))
        return {}

    async def _do_close(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        opened = self.doors.pop(str(message["sandbox"]), None)
        if opened is not None:
            keep = bool(message.get("keep"))
            await opened.close(forget=not keep)
            if not keep:
                self.engine.authorities.forget(opened.door.spec.sandbox)
        return {}

    async def _do_ca(self, message: dict[str, Any], descriptors: list[int]) -> str:
        authority = await self.engine.authorities.of(self._door(message).door.spec.sandbox)
        return authority.certificate.decode()

    async def _do_placeholders(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, str]:
        # Before its door is open, too: a sandbox is started with them.
        sandbox = str(message["sandbox"])
        names = [str(name) for name in message["names"]]
        return {name: await self.engine.secrets.placeholder(sandbox, name) for name in names}

    async def _do_revoke(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        self._door(message).door.revoked |= {str(name) for name in message["sandboxes"]}
        return {}

    async def _do_remember(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        self._door(message).door.add_answers(str(text) for text in message["answers"])
        return {}

    async def _do_share_wants(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        return {project: shared.wants() for project, shared in self.engine.shares().items()}

    async def _do_share_shrink(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        project = str(message["project"])
        told = self.engine.shared(project).shrink(message["amounts"])
        return told | {"used": self.engine.meter.own(f"project/{project}")}

    async def _do_share_grant(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        until, gain = float(message["until"]), float(message["gain"])
        project, elsewhere = str(message["project"]), message["elsewhere"]
        if elsewhere is not None:
            self.engine.meter.elsewhere(f"project/{project}", [float(count) for count in elsewhere])
        self.engine.shared(project).grant(message["limits"], message["amounts"], until, gain)
        return {}

    async def _do_share_drop(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        return await self.engine.unshare(str(message["project"]), cut=bool(message["cut"]))

    # -- everybody's

    async def _do_pending(self, message: dict[str, Any], descriptors: list[int]) -> list[dict[str, Any]]:
        return self.engine.questions.pending()

    async def _do_answer(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        return self.engine.questions.answer(
            str(message["id"]), bool(message["allow"]), bool(message.get("remember"))
        )

    async def _do_secret_put(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        value = str(message["value"])
        info = await self.engine.secrets.put(str(message["project"]), str(message["name"]), value)
        self.engine.redactors.of(info.project).learn([value])
        return asdict(info)

    async def _do_secret_list(self, message: dict[str, Any], descriptors: list[int]) -> list[dict[str, Any]]:
        project = message.get("project")
        return [asdict(one) for one in self.engine.secrets.list(None if project is None else str(project))]

    async def _do_secret_remove(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        self.engine.secrets.remove(str(message["project"]), str(message["name"]))
        return {}

    async def _do_usage(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        requests, sent, received, spend = self.engine.meter.seen(str(message["of"]))
        return {"requests": int(requests), "sent": int(sent), "received": int(received), "spend": spend}

    async def _do_metrics(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        breakers = self.engine.upstreams.breakers
        return {
            "doors": len(self.doors),
            "connections": sum(len(one.door.flows) for one in self.doors.values()),
            "pending": len(self.engine.questions.pending()),
            "circuits": [
                {"project": project, "host": host, "port": port, "state": breaker.state,
                 "failures": breaker.failures}
                for (project, host, port), breaker in breakers.items() if breaker.failures
            ][:_MOST_CIRCUITS],
        }  # fmt: skip

    async def _do_status(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "doors": {name: {"connections": len(one.door.flows)} for name, one in self.doors.items()},
        }

    def _door(self, message: dict[str, Any]) -> OpenDoor:
        found = self.doors.get(str(message.get("sandbox")))
        if found is None:
            raise NotFound(f"no door is open for sandbox {str(message.get('sandbox'))[:60]}")
        return found

    async def close(self) -> None:
        """End all doors and let go of everything."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
        for opened in list(self.doors.values()):
            await opened.close()
        for messages in [*self._visitors, *([self._owner] if self._owner else [])]:
            messages.close()
        await self.engine.close()
