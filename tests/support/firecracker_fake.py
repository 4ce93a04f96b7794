"""Scripted stand-ins for ``firecracker`` and ``jailer``: the published interface without a machine behind it.

The jailer makes the jail, gives up its rights and becomes the monitor, as the real one does. The monitor
checks every request against the API description and keeps its order. What answers behind its vsock
is the *real guest agent*, a process beside it in place of a guest. ``install`` writes both programs into a
folder; ``faults.json`` there says what goes wrong. Standard library only: it runs as the sandbox's user.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

try:
    import firecracker_api as description
except ImportError:
    from support import firecracker_api as description

VERSION = "1.15.1"
AGENT_PORT, CONTROL_PORT = 1024, 1025


def install(folder: Path, agent: str, faults: dict[str, Any] | None = None) -> Path:
    """Write both programs; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    support = Path(__file__).parent
    for name in ("firecracker", "jailer"):
        script = (
            f"#!{os.path.realpath(sys.executable)} -IS\nimport sys\nsys.path.insert(0, {str(support)!r})\n"
            f"import firecracker_fake\nfirecracker_fake.main({name!r}, {str(folder)!r}, {agent!r})\n"
        )
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    set_faults(folder, faults or {})
    return folder


def set_faults(folder: Path, faults: dict[str, Any]) -> None:
    """From the next call on. Keys: version, jailer_version, die_in_jailer, no_guest; refuse, slow, hang, die,
    garbage, huge (by path)."""
    (folder / "faults.json").write_text(json.dumps(faults))


def calls(folder: Path) -> list[dict[str, Any]]:
    """What the programs were told: the jailer's arguments, then every request."""
    path = folder / "calls.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main(name: str, folder: str, agent: str) -> None:
    """Either program."""
    faults = json.loads((Path(folder) / "faults.json").read_text())
    version = faults.get("version", VERSION)
    if "--version" in sys.argv:
        if name == "jailer":
            print(f"Jailer v{faults.get('jailer_version', version)}")
        else:
            print(f"Firecracker v{version}\n\nSupported snapshot data format versions: 8.0.0")
    elif name == "jailer":
        jail(folder, agent, faults)
    else:
        sys.exit("a monitor without its jailer is not what anybody wants here")


def jail(folder: str, agent: str, faults: dict[str, Any]) -> None:
    """As the jailer: the chroot (in name only: Python could not go on in it), the user, the monitor."""
    own, _, rest = " ".join(sys.argv[1:]).partition(" -- ")
    words = own.split()
    options = {key: words[at + 1] for at, key in enumerate(words[:-1]) if key.startswith("--")}
    log = os.open(f"{folder}/calls.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    network = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    note(log, jailer=sys.argv[1:], pid=os.getpid(), network=[line.split(":")[0].strip() for line in network])
    if faults.get("die_in_jailer"):
        sys.exit(f"Error: {faults['die_in_jailer']}")
    program = os.path.basename(options["--exec-file"])
    root = os.path.join(options["--chroot-base-dir"], program, options["--id"], "root")
    os.makedirs(root, exist_ok=True)
    uid, gid = int(options["--uid"]), int(options["--gid"])
    os.chown(root, uid, gid)
    # In place of a chroot: from here on both are reached by descriptor, whatever lies above them.
    place = os.path.join(os.path.dirname(root), "guest")
    os.makedirs(place, exist_ok=True)
    root, place = (f"/proc/self/fd/{os.open(path, os.O_PATH)}" for path in (root, place))
    start, begin = os.pipe()
    guest = os.fork()
    if guest == 0:
        os.close(begin)
        be_guest(start, place, agent, faults)
    os.close(start)
    threading.Thread(target=lambda: (os.waitpid(guest, 0), os._exit(0)), daemon=True).start()
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    Monitor(root, place, log, begin, faults, rest.split()).serve()


def be_guest(start: int, place: str, agent: str, faults: dict[str, Any]) -> None:
    """Wait for the machine's start; then the real agent, process 1 of its own namespace, until it ends."""
    if not os.read(start, 1) or faults.get("no_guest"):
        signal.pause()
    namespaces = ["--pid", "--fork", "--kill-child"]
    # The agent's own descriptors are others.
    work = os.readlink(place)
    argv = [
        "unshare", *namespaces, "--", agent, f"listen={work}/agent.sock", "uid=0", "gid=0",
        f"workdir={work}", f"home={work}", "oom=0",
    ]  # fmt: skip
    process = subprocess.Popen(argv, env={"PATH": "/usr/bin:/bin"})
    Path(f"{place}/pid").write_text(str(process.pid))
    deadline = time.monotonic() + 60
    while not os.path.exists(f"{place}/agent.sock") and time.monotonic() < deadline:
        time.sleep(0.005)
    os.chmod(place, 0o777)
    with contextlib.suppress(OSError):
        os.chmod(f"{place}/agent.sock", 0o777)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{place}/control.sock")
    os.chmod(f"{place}/control.sock", 0o777)
    listener.listen()
    threading.Thread(target=answer_calls, args=(listener, process, place), daemon=True).start()
    process.wait()
    os._exit(0)


def answer_calls(listener: socket.socket, process: subprocess.Popen[bytes], place: str) -> None:
    """As the guest's first process: one line, one answer."""
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rwb") as file:
            for line in file:
                words = line.decode().split()
                with open(f"{place}/control.log", "ab") as log:
                    log.write(line)
                answer = b"ok\n"
                if words[0] == "kills":
                    answer = b"ok 3\n"
                elif words[0] == "wake":
                    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                    # Numbers of the namespace whose /proc this is; the agent's socket is bound anew.
                    os.kill(int(children[0]), signal.SIGUSR1)
                    deadline = time.monotonic() + 60
                    while not os.path.exists(f"{place}/agent.sock") and time.monotonic() < deadline:
                        time.sleep(0.005)
                    os.chmod(f"{place}/agent.sock", 0o777)
                elif words[0] == "seed" and len(words[1]) < 64:
                    answer = b"error seed: Invalid argument\n"
                file.write(answer)
                file.flush()


def note(log: int, **what: Any) -> None:
    """One line of ``calls.jsonl``."""
    os.write(log, json.dumps(what).encode() + b"\n")


class Monitor:
    """Firecracker's API as far as Ringfence uses it. One thread a connection."""

    def __init__(
        self, root: str, place: str, log: int, begin: int, faults: dict[str, Any], arguments: list[str]
    ) -> None:
        self.root, self.place, self.log, self.begin, self.faults = root, place, log, begin, faults
        self.socket = self.path(arguments[arguments.index("--api-sock") + 1])
        self.done: set[str] = set()
        self.state = "Not started"
        self.uds = ""

    def path(self, inside: str) -> str:
        """Where a path of the jail is."""
        return self.root + inside

    def serve(self) -> None:
        """Until the process is killed."""
        listener = socket.socket(socket.AF_UNIX)
        os.umask(0o077)
        listener.bind(self.socket)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self.handle, args=(connection,), daemon=True).start()

    def handle(self, connection: socket.socket) -> None:
        """Requests of one connection."""
        with connection, connection.makefile("rwb") as file, contextlib.suppress(OSError, ValueError):
            while line := file.readline():
                method, path, _ = line.decode().split()
                size = 0
                while (header := file.readline().strip()) != b"":
                    name, _, value = header.partition(b":")
                    size = int(value) if name.lower() == b"content-length" else size
                body = json.loads(file.read(size)) if size else None
                note(self.log, method=method, path=path, body=body)
                if "slow" in self.faults and path in self.faults["slow"]:
                    time.sleep(self.faults["slow"][path])
                if path == self.faults.get("hang"):
                    threading.Event().wait()
                if path == self.faults.get("die"):
                    sys.stderr.write("2026 [main:ERROR] RunWithApiError error: the scripted end\n")
                    sys.stderr.flush()
                    os._exit(148)
                if path == self.faults.get("garbage"):
                    file.write(b"\x00\xff not HTTP \r\n\r\n")
                elif path == self.faults.get("huge"):
                    file.write(b"HTTP/1.1 200 \r\nContent-Length: 999999999\r\n\r\n")
                else:
                    status, answer = self.answer(method, path, body)
                    content = json.dumps(answer).encode() if answer is not None else b""
                    head = f"HTTP/1.1 {status} \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n"
                    file.write(head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
                file.flush()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Status and body."""
        if method == "GET":
            version = self.faults.get("api_version", self.faults.get("version", VERSION))
            found = {"/version": {"firecracker_version": version}}
            return (
                (200, found[path]) if path in found else (400, {"fault_message": f"Invalid request {path}"})
            )
        fault = self.faults.get("refuse", {}).get(path) or description.problem(method, path, body)
        fault = fault or self.act(path, body)
        return (400, {"fault_message": fault}) if fault else (204, None)

    def act(self, path: str, body: dict[str, Any]) -> str:
        """Do it; the fault, or nothing."""
        started = self.state != "Not started"
        if started and path not in ("/vm", "/snapshot/create"):
            return "The requested operation is not supported after starting the microVM."
        if path == "/snapshot/load":
            return self.load(body)
        if path == "/vsock":
            self.uds = body["uds_path"]
        if path == "/actions":
            lacking = {"/machine-config", "/boot-source", "/vsock"} - self.done
            return f"not configured: {sorted(lacking)}" if lacking else self.start()
        fault = ""
        if path == "/boot-source":
            fault = self.missing(body["kernel_image_path"], body["initrd_path"])
        if path.startswith("/drives/"):
            fault = self.missing(body["path_on_host"], writable=not body["is_read_only"])
        if fault:
            return fault
        if path == "/vm":
            if not started:
                return "The requested operation is not supported before starting the microVM."
            self.state = "Paused" if body["state"] == "Paused" else "Running"
        if path == "/snapshot/create":
            if self.state != "Paused":
                return "Cannot save while the microVM is running"
            for key in ("snapshot_path", "mem_file_path"):
                Path(self.path(body[key])).write_text(f"{key} of {self.root}")
        self.done.add(path)
        return ""

    def missing(self, *paths: str, writable: bool = False) -> str:
        """The fault if one of the files is not there for this user."""
        for path in paths:
            try:
                os.close(os.open(self.path(path), os.O_RDWR if writable else os.O_RDONLY))
            except OSError as error:
                return f"Unable to open file {path}: {error.strerror}"
        return ""

    def load(self, body: dict[str, Any]) -> str:
        """From saved files."""
        if self.done - {"/logger", "/metrics"}:
            return "Loading a microVM snapshot not allowed after configuring boot-specific resources."
        fault = self.missing(body["snapshot_path"], body["mem_backend"]["backend_path"], "/template", "/disk")
        if fault:
            return fault
        if not Path(self.path(body["snapshot_path"])).read_text().startswith("snapshot_path of"):
            return "Failed to restore from snapshot: Cannot deserialize the microVM state: UnexpectedEof"
        self.uds = "/vsock.sock"
        return self.start()

    def start(self) -> str:
        """The guest, and the socket through which it is reached."""
        self.state = "Running"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.path(self.uds))
        listener.listen()
        os.write(self.begin, b"x")
        threading.Thread(target=self.vsock, args=(listener,), daemon=True).start()
        return ""

    def vsock(self, listener: socket.socket) -> None:
        """One thread for each stream from the host."""
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self.forward, args=(connection,), daemon=True).start()

    def forward(self, connection: socket.socket) -> None:
        """The handshake, then bytes in both directions."""
        line = b""
        while not line.endswith(b"\n") and len(line) < 64:
            piece = connection.recv(1)
            if not piece:
                return connection.close()
            line += piece
        names = {b"CONNECT %d\n" % AGENT_PORT: "agent.sock", b"CONNECT %d\n" % CONTROL_PORT: "control.sock"}
        inside = socket.socket(socket.AF_UNIX)
        try:
            inside.connect(f"{self.place}/{names[line]}")
        except (OSError, KeyError):
            return connection.close()
        connection.sendall(b"OK 1073741824\n")
        ends = ((connection, inside), (inside, connection))
        threads = [threading.Thread(target=pump, args=pair, daemon=True) for pair in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        connection.close()
        inside.close()
        return None


def pump(source: socket.socket, target: socket.socket) -> None:
    """Bytes in one direction, and their end."""
    with contextlib.suppress(OSError):
        while piece := source.recv(65536):
            target.sendall(piece)
    for each, way in ((target, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            each.shutdown(way)
