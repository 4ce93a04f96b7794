"""What a command line means here, and running it: in a child of the worker, which ends when it ends."""

from __future__ import annotations

import errno
import os
import stat
import sys

from ringfence.runtimes.wasm.engine import OUT_OF_FUEL, Engine, EngineError, Instance
from ringfence.runtimes.wasm.lean import signal, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

INTERPRETERS = ("python", "qjs")
CALLER = "ringfence-call"  # runs `ringfence.runtimes.wasm.calling` over its standard streams
FUEL, DEADLINE = "RINGFENCE_WASM_FUEL", "RINGFENCE_WASM_DEADLINE"  # variables of a command
DEADLINE_STATUS = 124  # as `timeout` has it
_FOLDERS = ("", "/bin", "/usr/bin", "/usr/local/bin")
_MAPPED = ("/sys/modules/", "/memfd:wasm")
_WORKLOAD_OOM = "500"
_MOST_CODE = 512 << 20  # bytes of a module that is compiled here
# A few words that scripts and health checks use, as programs of the interpreter behind the same wall.
APPLETS = {
    "true": "",
    "false": "raise SystemExit(1)",
    "echo": "import sys; print(*sys.argv[1:])",
    "sleep": "import sys, time; time.sleep(sum(map(float, sys.argv[1:])))",
    "cat": (
        "import sys, os\n"
        "for name in sys.argv[1:] or ['-']:\n"
        " file = 0 if name == '-' else os.open(name, os.O_RDONLY)\n"
        " while data := os.read(file, 65536):\n"
        "  while data: data = data[os.write(1, data):]\n"
    ),
}
# QuickJS-NG has timers in a module only and no loop once its main script has ended. So the script is run by a
# module that waits, until no timer is left. `%s` are JSON: how to run it, and what.
_QJS = """import * as std from 'qjs:std'; import * as os from 'qjs:os';
let left = 0, wake = () => {};
const due = new Map(), done = id => { if (due.delete(id)) { left--; if (!left) wake(); } };
let last = 0;
const later = (again, f, ms = 0, ...rest) => {
  const id = ++last; left++;
  const fire = () => {
    if (again && due.has(id)) due.set(id, os.setTimeout(fire, Math.max(1, ms)));
    try { f(...rest); } finally { if (!again) done(id); }
  };
  due.set(id, os.setTimeout(fire, ms)); return id;
};
globalThis.setTimeout = (f, ms, ...rest) => later(false, f, ms, ...rest);
globalThis.setInterval = (f, ms, ...rest) => later(true, f, ms, ...rest);
globalThis.clearTimeout = globalThis.clearInterval = id => {
  if (due.has(id)) { os.clearTimeout(due.get(id)); done(id); }
};
globalThis.std = std; globalThis.os = os;
const how = %s, what = %s;
if (how == 'text') std.evalScript(what);
else if (how == 'input') std.evalScript(std.in.readAsString());
else if (how == 'module') await import(what);
else std.loadScript(what);
await new Promise(go => os.setTimeout(go, 0));
while (left) await new Promise(go => wake = go);
"""


class Command:
    """What to run: ``kind`` is python, qjs, module or call; ``path`` of a module, if it is none of ours."""

    __slots__ = ("argv", "kind", "path")

    def __init__(self, kind: str, path: str, argv: tuple[bytes, ...]) -> None:
        self.kind = kind
        self.path = path
        self.argv = argv


def resolve(argv: list[bytes], cwd: str) -> Command:
    """The meaning of a command line.

    Raises:
        OSError: there is no such program here (ENOENT), or it is none that can run here (ENOEXEC).
    """
    word = os.fsdecode(argv[0])
    folder, name = os.path.split(word)
    if folder in _FOLDERS:
        if name in ("python", "python3") or name.startswith("python3."):
            return Command("python", "", (b"python3", *argv[1:]))
        if name == "qjs":
            return Command("qjs", "", _qjs_arguments(argv))
        if name in APPLETS and not os.path.lexists(os.path.join(cwd, word) if folder else "/nowhere"):
            return Command("python", "", (b"python3", b"-I", b"-S", b"-c", APPLETS[name].encode(), *argv[1:]))
        if name == CALLER and len(argv) == 2:
            path = os.path.join(cwd, os.fsdecode(argv[1]))
            _check_module(path)
            return Command("call", path, tuple(argv))
    path = os.path.join(cwd, word)
    if not word.endswith(".wasm"):
        there = "/" in word and os.path.exists(path)
        raise OSError(
            errno.ENOEXEC if there else errno.ENOENT, "only python3, qjs and .wasm modules run here"
        )
    _check_module(path)
    return Command("module", path, tuple(argv))


def _check_module(path: str) -> None:
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EACCES, "a module is a file")


def _qjs_arguments(argv: list[bytes]) -> tuple[bytes, ...]:
    """Options of ``qjs`` that need no loop are its own; everything else runs in our module."""
    import json

    words = [os.fsdecode(word) for word in argv[1:]]
    how = ""
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word in ("-m", "--module"):
            how = "module"
        elif word in ("-e", "--eval") and words:
            text = words.pop(0)
            if how == "module":  # may have imports, which only a module of its own can
                return (b"qjs", b"-m", b"-e", text.encode(), *map(os.fsencode, words))
            return (
                b"qjs",
                b"-m",
                b"-e",
                (_QJS % ('"text"', json.dumps(text))).encode(),
                *map(os.fsencode, words),
            )
        elif word == "--":
            break
        elif word not in ("--std", "--script"):
            return tuple(argv)
    if not words or words[0] == "-":
        script = _QJS % ('"input"', '""')
    else:
        module = how == "module" or words[0].endswith(".mjs")
        script = _QJS % ('"module"' if module else '"file"', json.dumps(words[0]))
    return (b"qjs", b"-m", b"-e", script.encode(), *map(os.fsencode, words))


class Modules:
    """Compiled modules of a worker. What the driver gave is machine code that it has verified."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self._engines: dict[tuple[bool, bool], Engine] = {}
        self._loaded: dict[tuple[str, bool], int] = {}

    def engine(self, kind: str, fuel: bool) -> Engine:
        """The engine for a kind of command, with or without fuel. A call of a function can be interrupted and
        the module used again; a whole command is ended with its process."""
        interruptible = kind not in INTERPRETERS
        if (fuel, interruptible) not in self._engines:
            library = self.config["library"]
            self._engines[fuel, interruptible] = Engine(library, fuel=fuel, interruptible=interruptible)
        return self._engines[fuel, interruptible]

    def preload(self, kind: str, fuel: bool) -> int | None:
        """An interpreter's module, if it lies compiled; loaded once, before the fork, for all children."""
        entry = self.config["modules"].get(kind + ("+fuel" if fuel else ""))
        if entry is None:
            return None
        if (kind, fuel) not in self._loaded:
            self._loaded[kind, fuel] = self.engine(kind, fuel).load(entry)
        return self._loaded[kind, fuel]

    def module(self, command: Command, fuel: bool) -> int:
        """The module of a command: loaded, or compiled here and now."""
        ready = self.preload(command.kind, fuel)
        if ready is not None:
            return ready
        path = command.path or self.config["sources"].get(command.kind, "")
        if not path:
            raise EngineError(f"{command.kind} is not installed: pip install 'ringfence[wasm]'")
        with open(path, "rb") as file:
            code = file.read(_MOST_CODE)
        if command.path:
            import hashlib

            digest = hashlib.sha256(code).hexdigest() + ("+fuel" if fuel else "")
            entry = self.config["modules"].get(digest)
            if entry is not None:
                return self.engine(command.kind, fuel).load(entry)
        return self.engine(command.kind, fuel).compile(code)


def enter(streams: tuple[int, int, int], cgroups: list[int], max_open_files: int) -> None:
    """Become a workload process: in its cgroups, with its streams, and nothing of the worker's."""
    import resource

    for descriptor in cgroups:
        os.write(descriptor, b"0")
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(_WORKLOAD_OOM)
    os.setsid()
    for each in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(each, signal.SIG_DFL)
    # The streams may have numbers below 3 only if the worker had none of those: it always has.
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    _close_others()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_open_files, max_open_files))


def _close_others() -> None:
    """Everything but what Wasmtime maps the memories of loaded modules from."""
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2:
            with suppress(OSError):
                if not os.readlink(f"/proc/self/fd/{number}").startswith(_MAPPED):
                    os.close(number)


def run(modules: Modules, command: Command, env: dict[str, str], cwd: str) -> NoReturn:
    """In the child: run it to its end, and end with its status."""
    status = 125
    try:
        status = _run(modules, command, env, cwd)
    except EngineError as error:
        status = _failed(command, error)
    except OSError as error:
        _say(command, error.strerror or str(error))
    except BaseException as error:
        _say(command, f"{type(error).__name__}: {error}")
    finally:
        os._exit(status)


def limits_of(env: dict[str, str]) -> tuple[int | None, float | None]:
    """Fuel and deadline that the variables of a command ask for.

    Raises:
        OSError: EINVAL, one is no number.
    """
    try:
        fuel = int(env[FUEL]) if FUEL in env else None
        deadline = float(env[DEADLINE]) if DEADLINE in env else None
    except ValueError:
        raise OSError(errno.EINVAL, f"{FUEL} or {DEADLINE} is no number") from None
    if (fuel is not None and not 0 <= fuel < 2**63) or (deadline is not None and not 0 < deadline < 1e9):
        raise OSError(errno.EINVAL, f"{FUEL} or {DEADLINE} is out of range")
    return fuel, deadline


def _run(modules: Modules, command: Command, env: dict[str, str], cwd: str) -> int:
    config = modules.config
    fuel, deadline = limits_of(env)
    engine = modules.engine(command.kind, fuel is not None)
    module = modules.module(command, fuel is not None)
    folders = open_folders(config, cwd)
    if command.kind == "call":
        from ringfence.runtimes.wasm.calling import serve

        serve(engine, module, config, fuel, deadline, folders)
        return 0
    instance = Instance(engine, memory=config["memory"] or -1, fuel=fuel)
    instance.wasi([os.fsdecode(word) for word in command.argv], list(env.items()), folders)
    if deadline is not None:
        import _thread

        _thread.start_new_thread(_end, (command, deadline))
    instance.instantiate(module)
    if command.kind == "qjs":
        return _reactor(instance, command.argv)
    if instance.has("_initialize") and not instance.has("_start"):
        instance.call("_initialize")
        return 0
    instance.call("_start")
    return 0


def open_folders(config: dict[str, Any], cwd: str) -> list[tuple[str, str, bool]]:
    """The folders that the policy opens, and the working directory as ``.`` if it lies in one of them."""
    folders = [tuple(each) for each in config["folders"] if os.path.isdir(each[0])]
    real = os.path.realpath(cwd)
    best: tuple[str, str, bool] | None = None
    for host, _, writable in folders:
        inside = real == host or real.startswith(host.rstrip("/") + "/")
        if inside and (best is None or len(host) > len(best[1])):
            best = (real, host, writable)
    if best is not None:
        folders.append((best[0], ".", best[2]))
    return folders


def _reactor(instance: Instance, argv: tuple[bytes, ...]) -> int:
    """QuickJS is a reactor: its main function is an export that takes argc and argv."""
    instance.call("_initialize")

    def place(data: bytes) -> int:
        at = int(instance.call("malloc", len(data))[0])
        if not at:
            raise EngineError("no memory for the arguments")
        instance.write(at, data)
        return at

    words = [place(word + b"\0") for word in argv]
    table = place(b"".join(at.to_bytes(4, "little") for at in (*words, 0)))
    return 0 if instance.call("qjs_init_argv", len(words), table)[0] == 0 else 1


def _end(command: Command, seconds: float) -> None:
    import time

    time.sleep(seconds)
    _say(command, "its deadline has passed")
    os._exit(DEADLINE_STATUS)


def _failed(command: Command, error: EngineError) -> int:
    if error.exit is not None:
        return error.exit & 255
    if error.trap == OUT_OF_FUEL:
        _say(command, "its fuel is used up")
        return DEADLINE_STATUS
    _say(command, str(error).strip())
    if error.trap is not None:
        os.kill(os.getpid(), signal.SIGABRT)
    return 126


def _say(command: Command, text: str) -> None:
    name = os.fsdecode(command.argv[0])
    os.write(2, f"{name}: {text}\n".encode(errors="replace")[:4096])
    sys.stderr.flush()
