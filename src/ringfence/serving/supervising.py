"""The process that `ringfence serve` is: it starts node and API, watches over them, and has the privileges
that only starting them needs.

It opens the listening sockets, so a restarted API takes up where the killed one left: connections wait in the
socket's queue. Children die with it. It reads nothing that clients send.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringfence.model.errors import HostLimit, InvalidRequest, RingfenceError
from ringfence.serving import privileges
from ringfence.serving.settings import Worker

_BACKOFF = (0.1, 5.0)  # seconds before a restart: first, at most
_HEALTHY = 10.0  # seconds after which a child counts as well started
_STOP = 30.0  # seconds that children have to end
_START = 60.0
_LAST = 5.0  # seconds for one that has said nothing more, to end


class Child:
    """A child process that is started again whenever it ends, until :meth:`stop`."""

    def __init__(self, name: str, start: Callable[[], Any], said: Callable[[str], None]) -> None:
        self.name = name
        self.process: asyncio.subprocess.Process | None = None
        self.restarts = 0
        self._start = start
        self._said = said
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Start it, and wait until it is ready.

        Raises:
            HostLimit: it ended before, or is not ready in time.
        """
        self.process, ready = await self._start()
        try:
            async with asyncio.timeout(_START):
                await ready
        except (TimeoutError, EOFError):
            await self._end()
            raise HostLimit(f"{self.name} did not start", hint="its messages are above") from None
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        delay = _BACKOFF[0]
        loop = asyncio.get_running_loop()
        while True:
            assert self.process is not None
            began = loop.time()
            code = await self.process.wait()
            if self._stopping:
                return
            if loop.time() - began > _HEALTHY:
                delay = _BACKOFF[0]
            self._said(f"{self.name} ended ({_told(code)}); it is started again")
            while True:
                await asyncio.sleep(delay)
                delay = min(delay * 2, _BACKOFF[1])
                self.restarts += 1
                try:
                    self.process, ready = await self._start()
                    async with asyncio.timeout(_START):
                        await ready
                    break
                except (OSError, EOFError, TimeoutError) as error:
                    self._said(f"{self.name} can't be started: {error or type(error).__name__}")
                    await self._end()

    async def _end(self) -> None:
        """Let one that is ending end. A signal at that moment would find it dead before asyncio's own waiting
        does, which then tells the user of a child that it does not know.
        """
        if self.process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST):
                    await self.process.wait()
        await self._kill()

    async def _kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()

    async def stop(self) -> None:
        """SIGTERM, time to end, SIGKILL."""
        self._stopping = True
        process = self.process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(_STOP):
                    await process.wait()
            except TimeoutError:
                await self._kill()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._kill()


def _told(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


class Supervisor:
    """Everything that `serve` starts."""

    def __init__(
        self,
        worker: Worker,
        *,
        workers: int,
        node: list[str] | None,
        user: tuple[int, int] | None,
        keep: tuple[int, ...],
        said: Callable[[str], None],
        on_key: Callable[[str], None],
    ) -> None:
        self._worker = worker
        self._node = node
        self._user = user
        self._keep = keep
        self._said = said
        self._on_key = on_key
        self._readers: set[asyncio.Task[None]] = set()
        self.children: list[Child] = []
        if node is not None:
            self.children.append(Child("node", self._start_node, said))
        for number in range(workers):
            name = "API" if workers == 1 else f"API {number}"
            self.children.append(Child(name, lambda n=number: self._start_api(n), said))  # type: ignore[misc]

    async def run(self, ready: Callable[[], None], stop: asyncio.Event) -> None:
        """Start all, serve until ``stop``, end all; the API first: nobody asks a node that is gone."""
        try:
            # The node and the first API at once: each spends its time on loading, and an API that is up
            # first waits for its node as it does when that is started anew.
            at_once = 2 if self._node is not None else 1
            await _all_begun(self.children[:at_once])
            for child in self.children[at_once:]:
                await child.begin()
            ready()
            await stop.wait()
        finally:
            apis = [child for child in self.children if child.name != "node"]
            await asyncio.gather(*(child.stop() for child in apis))
            for child in self.children:
                await child.stop()
            for task in self._readers:
                task.cancel()
            await asyncio.gather(*self._readers, return_exceptions=True)

    async def _start_node(self) -> tuple[asyncio.subprocess.Process, asyncio.Future[None]]:
        assert self._node is not None
        read, write = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._node,
                "--ready-fd",
                str(write),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=(write,),
                preexec_fn=_dies_with_us,
                start_new_session=True,  # Ctrl-C is the supervisor's to pass on, in order
            )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        return process, self._listen(read, {})

    async def _start_api(self, number: int) -> tuple[asyncio.subprocess.Process, asyncio.Future[None]]:
        read, write = os.pipe()
        config = os.memfd_create("worker", 0)
        worker = Worker.from_json(
            json.dumps(
                {
                    **json.loads(self._worker.to_json()),
                    "told": write,
                    "owner": f"{self._worker.owner}.{number}",
                }
            ).encode()
        )
        os.write(config, worker.to_json())
        os.lseek(config, 0, os.SEEK_SET)
        user = self._user

        def prepare() -> None:
            if user is not None:
                privileges.drop(*user)
            _dies_with_us()  # after the change of user, which clears it

        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "ringfence.serving.worker",
                str(config),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(write, config, *self._keep),
                preexec_fn=prepare,
                start_new_session=True,
                env=_environment(),
                cwd="/",
            )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
            os.close(config)
        return process, self._listen(read, {"key": self._on_key})

    def _listen(self, read: int, hooks: dict[str, Callable[[str], None]]) -> asyncio.Future[None]:
        """Read what a child says about itself; the future is done when it is ready."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ready.add_done_callback(lambda f: f.cancelled() or f.exception())

        async def follow() -> None:
            reader = asyncio.StreamReader()
            pipe = os.fdopen(read, "rb")
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), pipe
            )
            try:
                while line := await reader.readline():
                    told: dict[str, Any] = {"ready": True} if line == b"ready\n" else json.loads(line)
                    for name, hook in hooks.items():
                        if name in told:
                            hook(told[name])
                    if told.get("ready") and not ready.done():
                        ready.set_result(None)
            finally:
                transport.close()
                if not ready.done():
                    ready.set_exception(EOFError("it ended"))

        task = asyncio.get_running_loop().create_task(follow())
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)
        return ready


async def _all_begun(children: list[Child]) -> None:
    begun = [asyncio.ensure_future(child.begin()) for child in children]
    try:
        await asyncio.gather(*begun)
    except BaseException:
        for each in begun:
            each.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        raise


def _dies_with_us() -> None:
    privileges.dies_with_parent(signal.SIGTERM)


def _environment() -> dict[str, str]:
    """What the API's process gets: where our code is, how to log, nothing of the operator's."""
    kept = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "RINGFENCE_LOG", "SSL_CERT_FILE", "SSL_CERT_DIR")
    found = {name: os.environ[name] for name in kept if name in os.environ}
    source = str(Path(__file__).resolve().parents[2])
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [source, found.get("PYTHONPATH", "")]))
    found["PYTHONDONTWRITEBYTECODE"] = "1"
    return found


def listen_tcp(address: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        HostLimit: the address can't be used.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind((address, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise HostLimit(
            f"can't listen on {address}:{port}: {error.strerror}", hint="choose another with --bind"
        ) from None
    return sock


def listen_unix(path: Path) -> socket.socket:
    """A listening unix socket for this user and its group; one that nobody listens on is replaced.

    Raises:
        HostLimit: somebody listens there, or it can't be made.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    folder = -1
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # Of several at once each would take what another has bound, and not yet listens on, for left over.
        fcntl.flock(folder, fcntl.LOCK_EX)
        if path.is_socket():
            probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                probe.connect(str(path))
            except OSError:
                path.unlink()
            else:
                raise HostLimit(f"somebody listens on {path}", hint="choose another with --uds")
            finally:
                probe.close()
        os.fchmod(sock.fileno(), 0o660)  # Linux makes the file with it, less the umask
        sock.bind(str(path))
        path.chmod(0o660)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise HostLimit(
            f"can't listen on {path}: {error.strerror}", hint="choose another with --uds"
        ) from None
    except BaseException:
        sock.close()
        raise
    finally:
        if folder >= 0:
            os.close(folder)
    return sock


def sealed(path: str) -> int:
    """A file's contents in memory, for a process that may not read the file.

    Raises:
        InvalidRequest: it can't be read.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path} can't be read: {error.strerror}", hint="give a PEM file") from None
    number = os.memfd_create("pem", os.MFD_CLOEXEC)
    os.write(number, data)
    os.lseek(number, 0, os.SEEK_SET)
    return number


__all__ = ["Child", "RingfenceError", "Supervisor", "listen_tcp", "listen_unix", "sealed"]
