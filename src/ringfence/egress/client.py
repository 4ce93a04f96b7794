"""Doors, as the rest of Ringfence uses them: the proxy process is started, restarted, and told what to do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ringfence.egress.door import DoorSpec, ProjectLimits
from ringfence.egress.messages import Messages
from ringfence.egress.remembering import as_text
from ringfence.model import errors
from ringfence.model.errors import NotFound, RingfenceError

__all__ = ["DoorSpec", "Doors", "ProjectLimits"]

Dial = Callable[[], Awaitable[socket.socket]]
_START = 30.0  # seconds for the process to come up
_CALL = 60.0
_LAST = 2.0  # seconds for one that has no owner any more, to end
_BACKOFF = (0.05, 5.0)  # seconds between tries: the first, the longest
_MOST_EVENTS = 10_000
_POSTS = 8  # questions that are posted at once


def egress_user() -> int:
    """The user that the proxy runs as when we are root."""
    for name in ("ringfence-egress", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_uid
    return 65534


class Doors:
    """The doors of this process's sandboxes. Made by :meth:`start`; one event loop.

    Every call may raise NodeUnavailable when the proxy process can't be reached.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], webhook: str = "") -> None:
        self._folder = folder
        self._webhook = webhook
        self._posting: ThreadPoolExecutor | None = None
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._messages: Messages | None = None
        self._specs: dict[str, tuple[DoorSpec, Dial]] = {}
        self._revoked: dict[str, set[str]] = {}
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._ready: asyncio.Future[None] | None = None
        self._up = asyncio.Event()
        self._listeners: set[asyncio.Queue[dict[str, Any]]] = set()
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._relinking: set[str] = set()
        self._locks: dict[str, asyncio.Lock] = {}
        self._openings: dict[str, int] = {}  # the last one of each sandbox

    @classmethod
    async def start(
        cls,
        folder: str | os.PathLike[str],
        *,
        dns: str | None = None,
        ca_file: str | None = None,
        webhook: str = "",
        **settings: Any,
    ) -> Doors:
        """Start the proxy process, with its state in ``folder`` (made if missing, private).

        Args:
            folder: logs, secrets, counters, sockets. Several processes may share one.
            dns: a DNS server to resolve names with, in place of the system's resolver.
            ca_file: authorities for upstream certificates, in place of the system's.
            webhook: a URL that gets each question as JSON, and may answer `{"answer": "allow"}`.
            settings: others of ``ringfence.egress.engine.Settings``.

        Raises:
            NodeUnavailable: the process does not come up.
        """
        path = Path(folder)
        await asyncio.to_thread(prepare, path)
        values: dict[str, Any] = {"dns": dns, "ca_file": ca_file} | settings
        if os.geteuid() == 0:
            values["user"] = egress_user()
        doors = cls(path, values, webhook)
        await doors._launch()
        return doors

    # -- the process

    async def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        try:
            with open(self._folder / "proxy.log", "ab") as log:  # noqa: ASYNC230 - a local file, once
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "ringfence.egress",
                    str(self._folder.absolute()), str(theirs.fileno()), json.dumps(self._settings),
                    stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(theirs.fileno(),),
                    start_new_session=True, env=_environment(),
                )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._ready = loop.create_future()
        self._messages = Messages(ours, self._received, self._ended)
        try:
            async with asyncio.timeout(_START):
                await self._ready
        except (TimeoutError, errors.NodeUnavailable):
            await self._reap()
            text = await asyncio.to_thread(self._last_words)
            raise errors.NodeUnavailable(f"the egress proxy did not start: {text}") from None
        self._up.set()

    def _last_words(self) -> str:
        try:
            data = (self._folder / "proxy.log").read_bytes()[-2000:]
        except OSError:
            return "it left no log"
        lines = data.decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:300] if lines else "it said nothing"

    async def _reap(self) -> None:
        process, self._process = self._process, None
        if self._messages is not None:
            self._messages.close()
        if process is not None:
            # It ends by itself, mostly it has: a signal at that moment would find it dead before asyncio's
            # own waiting does, which then tells the user of a child that it does not know.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST):
                    await process.wait()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    def _ended(self) -> None:
        """The process has gone: every door is shut until there is another."""
        self._up.clear()
        gone = errors.NodeUnavailable("the egress proxy has ended", hint="it is started again; try again")
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(gone)
        self._waiting.clear()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(gone)
        elif not self._closing:
            self._spawn(self._restart())

    async def _restart(self) -> None:
        wait = _BACKOFF[0]
        while not self._closing:
            await self._reap()
            try:
                await self._launch()
            except (RingfenceError, OSError):  # no processes or descriptors left, perhaps: not for ever
                await asyncio.sleep(wait)
                wait = min(wait * 2, _BACKOFF[1])
                continue
            self._publish({"event": "egress.restarted"})
            for sandbox in list(self._specs):
                self._relink(sandbox)
            return

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- messages

    def _received(self, message: dict[str, Any], descriptors: list[int]) -> None:
        for descriptor in descriptors:
            os.close(descriptor)
        if "event" in message:
            if message["event"] == "egress.ready":
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(None)
                return
            if message["event"] == "egress.answered":
                self._learn(message)
            if message["event"] == "egress.asked" and self._webhook:
                self._spawn(self._ask_webhook(message))
            if message["event"] == "egress.link_lost" and message.pop("opening", 0) == self._openings.get(
                message["sandbox"]
            ):
                self._relink(message["sandbox"])
            self._publish(message)
            return
        waiter = self._waiting.pop(message.get("number", -1), None)
        if waiter is None or waiter.done():
            return
        if "error" in message:
            waiter.set_exception(errors.from_dict(message["error"]))
        else:
            waiter.set_result(message.get("result"))

    async def _call(self, command: str, *descriptors: int, **values: Any) -> Any:
        if not self._up.is_set():
            try:
                async with asyncio.timeout(_START):
                    await self._up.wait()
            except TimeoutError:
                for descriptor in descriptors:
                    os.close(descriptor)
                raise errors.NodeUnavailable("the egress proxy is not up") from None
            except BaseException:
                for descriptor in descriptors:
                    os.close(descriptor)
                raise
        assert self._messages is not None
        self._number += 1
        number = self._number
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiter
        self._messages.send({"number": number, "command": command, **values}, *descriptors)
        try:
            async with asyncio.timeout(_CALL):
                return await waiter
        except TimeoutError:
            raise errors.NodeUnavailable(f"the egress proxy did not answer to {command}") from None
        finally:
            self._waiting.pop(number, None)

    # -- doors

    async def open(self, spec: DoorSpec, dial: Dial) -> None:
        """Open a sandbox's door; returns when its proxy ports listen inside.

        Should the link or the proxy end, the sandbox is dialled again, until :meth:`close`.

        Args:
            spec: whose, and with which rules.
            dial: gives a new connected socket to the sandbox's agent, e.g. ``Runtime.connect``.

        Raises:
            PolicyError: the rules are wrong.
            GuestRefused, LinkLost: the agent can't serve it.
        """
        async with self._locks.setdefault(spec.sandbox, asyncio.Lock()):
            try:
                await self._open(spec, dial)
            except BaseException:
                self._relink(spec.sandbox)  # if it had one: that one is closed
                raise

    async def _open(self, spec: DoorSpec, dial: Dial) -> None:
        before = self._specs.get(spec.sandbox)
        sock = await dial()
        descriptor = os.dup(sock.fileno())
        sock.close()
        revoked = sorted(self._revoked.get(spec.sandbox, ()))
        # What is told of the link that this one follows is old news from here on.
        self._number += 1
        opening = self._openings[spec.sandbox] = self._number
        await self._call("open", descriptor, spec=_values(spec), revoked=revoked, opening=opening)
        if self._openings.get(spec.sandbox) != opening:  # closed meanwhile
            if spec.sandbox in self._openings:
                return  # and opened anew, in this one's place
            await self._call("close", sandbox=spec.sandbox, keep=True)  # who closed it said what to forget
            raise NotFound(f"the door of sandbox {spec.sandbox} was closed meanwhile")
        now = self._specs.get(spec.sandbox)
        if now is before or now is None:
            self._specs[spec.sandbox] = (spec, dial)
            return
        # Other rules, given meanwhile: the proxy may have had them before it opened the door with these.
        newer = now[0]
        budget, limits = newer.project_budget, newer.limits
        spec = replace(
            spec, network=newer.network, answers=newer.answers, project_budget=budget, limits=limits
        )
        self._specs[spec.sandbox] = (spec, dial)
        await self._call("update", sandbox=spec.sandbox, network=spec.network)
        await self._call("limit", sandbox=spec.sandbox, budget=budget, limits=asdict(limits))
        await self._call("remember", sandbox=spec.sandbox, answers=list(spec.answers))

    async def _ask_webhook(self, event: dict[str, Any]) -> None:
        """Post a question; an answer in the response is taken."""
        from ringfence.egress.webhook import post

        # Not the loop's own threads: a slow program, asked by what is inside, must not hold up others' work.
        if self._posting is None:
            self._posting = ThreadPoolExecutor(_POSTS, "egress-webhook")
        loop = asyncio.get_running_loop()
        answered = await loop.run_in_executor(self._posting, post, self._webhook, event)
        if answered is not None:
            with contextlib.suppress(RingfenceError):
                await self.answer(event["id"], answered["allow"], remember=answered["remember"])

    def _relink(self, sandbox: str) -> None:
        if sandbox in self._specs and sandbox not in self._relinking and not self._closing:
            self._relinking.add(sandbox)
            self._spawn(self._open_again(sandbox))

    async def _open_again(self, sandbox: str) -> None:
        wait = _BACKOFF[0]
        try:
            lost = self._openings.get(sandbox)
            while not self._closing and sandbox in self._specs:
                try:
                    async with self._locks.setdefault(sandbox, asyncio.Lock()):
                        if self._openings.get(sandbox) != lost or sandbox not in self._specs:
                            return  # somebody else has opened or closed it meanwhile
                        try:
                            await self._open(*self._specs[sandbox])
                        finally:
                            lost = self._openings.get(sandbox)
                except (RingfenceError, OSError, TimeoutError):
                    await asyncio.sleep(wait)
                    wait = min(wait * 2, _BACKOFF[1])
                    continue
                if sandbox not in self._specs:
                    continue
                self._publish({"event": "egress.reopened", "sandbox": sandbox})
                return
        finally:
            self._relinking.discard(sandbox)

    async def limit(self, sandbox: str, budget: dict[str, Any] | None, limits: ProjectLimits) -> None:
        """Another budget and other limits of its project from now on.

        Raises:
            NotFound: no door is open for it. PolicyError: it is no budget.
        """
        if sandbox not in self._specs:
            raise NotFound(f"no door is open for sandbox {sandbox}")
        await self._call("limit", sandbox=sandbox, budget=budget, limits=asdict(limits))
        self._changed(sandbox, project_budget=budget, limits=limits)

    async def update(self, sandbox: str, network: dict[str, Any]) -> int:
        """Other rules, for open connections too; returns how many ended by it. The old ones stay on error.

        Raises:
            PolicyError: the rules are wrong.
            NotFound: no door is open for it.
        """
        if sandbox not in self._specs:
            raise NotFound(f"no door is open for sandbox {sandbox}")
        result = await self._call("update", sandbox=sandbox, network=network)
        self._changed(sandbox, network=network)
        return int(result["ended"])

    def _changed(self, sandbox: str, **changes: Any) -> None:
        if sandbox in self._specs:  # else it was closed meanwhile
            spec, dial = self._specs[sandbox]
            self._specs[sandbox] = (replace(spec, **changes), dial)

    async def close(self, sandbox: str, *, keep: bool = False) -> None:
        """Close a sandbox's door. Idempotent. ``keep``: it is opened again, maybe by another process: what
        it used and its authority are not forgotten.
        """
        self._revoked.pop(sandbox, None)
        known = self._specs.pop(sandbox, None) is not None
        self._locks.pop(sandbox, None)
        self._openings.pop(sandbox, None)
        if known and self._up.is_set():
            with contextlib.suppress(errors.NodeUnavailable):
                await self._call("close", sandbox=sandbox, keep=keep)

    async def ca(self, sandbox: str) -> bytes:
        """The certificate (PEM) that programs in a sandbox have to trust for inspected connections.

        The same one until :meth:`close`, also after the proxy was restarted.
        """
        pem: str = await self._call("ca", sandbox=sandbox)
        return pem.encode()

    # -- questions

    async def pending(self) -> list[dict[str, Any]]:
        """Requests that are held until somebody answers: id, sandbox, host, port, method, path, expires."""
        found: list[dict[str, Any]] = await self._call("pending")
        return found

    async def answer(self, number: str, allow: bool, *, remember: bool = False) -> dict[str, Any]:
        """Answer a question. With ``remember`` it is a rule of the sandbox from now on, which is returned.

        Raises:
            NotFound: no such question is open (any more).
        """
        result: dict[str, Any] = await self._call("answer", id=number, allow=allow, remember=remember)
        self._learn(result)
        return result

    def _learn(self, answered: dict[str, Any]) -> None:
        """An answer that became a rule is one after a restart of the proxy, too."""
        if "remembered" in answered:
            self._add_answers(answered.get("sandbox", ""), [as_text(answered["remembered"])])

    def _add_answers(self, sandbox: str, answers: Iterable[str]) -> None:
        if sandbox in self._specs:
            known = self._specs[sandbox][0].answers
            self._changed(sandbox, answers=tuple(dict.fromkeys((*known, *answers))))

    async def remember(self, sandbox: str, answers: Iterable[str]) -> None:
        """Answers that were given elsewhere (``DoorSpec.answers``) hold at this door, too.

        Raises:
            NotFound: no door is open for it.
        """
        given = list(answers)
        if sandbox not in self._specs:
            raise NotFound(f"no door is open for sandbox {sandbox}")
        await self._call("remember", sandbox=sandbox, answers=given)
        self._add_answers(sandbox, given)

    # -- secrets

    async def secret_put(self, project: str, name: str, value: str) -> dict[str, Any]:
        """Store a secret or rotate it; returns name, project, version, changed.

        Raises:
            InvalidRequest: the name or value can't be one.
        """
        info: dict[str, Any] = await self._call("secret_put", project=project, name=name, value=value)
        return info

    async def secret_list(self, project: str) -> list[dict[str, Any]]:
        """The secrets of a project, without values."""
        found: list[dict[str, Any]] = await self._call("secret_list", project=project)
        return found

    async def secret_remove(self, project: str, name: str) -> None:
        """Forget a secret.

        Raises:
            NotFound: there is none of that name.
        """
        await self._call("secret_remove", project=project, name=name)

    async def placeholders(self, sandbox: str, names: Iterable[str]) -> dict[str, str]:
        """What the sandbox may see in place of secrets, by name; the same at every call, open door or not."""
        found: dict[str, str] = await self._call("placeholders", sandbox=sandbox, names=list(names))
        return found

    async def revoke(self, sandbox: str, sandboxes: Iterable[str]) -> None:
        """Placeholders of these sandboxes (its own, or ones it was forked from) are worth nothing now."""
        names = list(sandboxes)
        self._revoked.setdefault(sandbox, set()).update(names)
        await self._call("revoke", sandbox=sandbox, sandboxes=names)

    # -- shares of a project's limits

    async def share_wants(self) -> dict[str, dict[str, int]]:
        """What was needed of each limit since the last call, by project (``egress.shares``)."""
        found: dict[str, dict[str, int]] = await self._call("share_wants")
        return found

    async def share_shrink(self, project: str, amounts: Mapping[str, int]) -> dict[str, Any]:
        """No more than this from now on: see ``egress.sharing.Shared.shrink``."""
        found: dict[str, Any] = await self._call("share_shrink", project=project, amounts=dict(amounts))
        return found

    async def share_grant(
        self,
        project: str,
        limits: Mapping[str, float],
        amounts: Mapping[str, int],
        until: float,
        gain: float,
        elsewhere: list[float] | None,
    ) -> None:
        """This share, until that moment of the machine's monotonic clock; and what others have used."""
        values: dict[str, Any] = {"limits": dict(limits), "amounts": dict(amounts), "until": until}
        await self._call("share_grant", project=project, gain=gain, elsewhere=elsewhere, **values)

    async def share_drop(self, project: str, *, cut: bool) -> dict[str, Any]:
        """No share any more; with ``cut`` what counts ends. See ``egress.engine.Engine.unshare``."""
        found: dict[str, Any] = await self._call("share_drop", project=project, cut=cut)
        return found

    # -- what was used

    async def usage(self, of: str) -> dict[str, Any]:
        """Requests, bytes and spend of ``sandbox/ID`` or ``project/ID``."""
        found: dict[str, Any] = await self._call("usage", of=of)
        return found

    async def metrics(self) -> dict[str, Any]:
        """Doors, connections, open questions, and circuit breakers that are not closed."""
        found: dict[str, Any] = await self._call("metrics")
        return found

    async def status(self) -> dict[str, Any]:
        """The process, and its doors with their connections."""
        found: dict[str, Any] = await self._call("status")
        return found

    # -- events

    def _publish(self, event: dict[str, Any]) -> None:
        for queue in self._listeners:
            if queue.qsize() >= _MOST_EVENTS:
                queue.get_nowait()  # who does not listen misses the oldest
            queue.put_nowait(event)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """What happens from now on: denied, asked, over budget, alarms, restarts. Ends with :meth:`stop`."""
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._listeners.add(queue)
        try:
            while (event := await queue.get()).get("event") != "egress.stopped":
                yield event
        finally:
            self._listeners.discard(queue)

    async def stop(self) -> None:
        """Close all doors and end the process. Idempotent."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._specs.clear()
        if self._posting is not None:
            self._posting.shutdown(wait=False, cancel_futures=True)
        if self._messages is not None:
            self._messages.close()  # the process ends by itself when we have gone
        process, self._process = self._process, None
        if process is not None:
            try:
                async with asyncio.timeout(10.0):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        self._publish({"event": "egress.stopped"})

    async def __aenter__(self) -> Doors:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


def prepare(folder: Path) -> None:
    """Make the folder and what is in it, for the proxy's user alone."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in ("sockets", "authorities", "usage", "records"):
        (folder / name).mkdir(mode=0o700, exist_ok=True)
    if os.geteuid() == 0:
        user = egress_user()
        for path in (folder, *folder.iterdir()):
            os.chown(path, user, user, follow_symlinks=False)


def _environment() -> dict[str, str]:
    kept = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "SSL_CERT_FILE", "SSL_CERT_DIR", "VIRTUAL_ENV")
    return {name: os.environ[name] for name in kept if name in os.environ} | {"PYTHONDONTWRITEBYTECODE": "1"}


def _values(spec: DoorSpec) -> dict[str, Any]:
    lists = {"lineage": list(spec.lineage), "revoked": list(spec.revoked), "answers": list(spec.answers)}
    return asdict(spec) | lists
