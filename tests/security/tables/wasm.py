"""Attacks from inside WebAssembly: Python and JavaScript in their interpreters, and modules of their own.

There is no instruction for a system call, so the programs of the other tables can't run here. Outcomes are
written as theirs; ``no-such-call``: the interpreter has no such thing, as nothing could be it.
A module says that it succeeded by ending with 0; one that Wasmtime does not take ends with 126.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from security.attacks import Attack, Control, NoControl

MIB = 1 << 20
SMALL = {"memory": 96 * MIB, "disk": 16 * MIB, "max_open_files": 64, "output": MIB}


@dataclass(frozen=True, slots=True)
class Granted:
    """The same payload in WebAssembly, with what it lacked: folders, limits, arguments, or another module."""

    args: tuple[str, ...] | None = None
    mounts: tuple[tuple[str, str], ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    module: str | bytes = ""
    outcome: str = "succeeded"


@dataclass(frozen=True, slots=True)
class WasmAttack:
    """As :class:`Attack`. ``payload``: a file of ``payloads``, or ``module``: text or bytes of a module.

    ``ends``: the sandbox is over after it, as a limit has it; otherwise it must go on to serve. ``counted``:
    only a cgroup counts what it takes exactly enough; without one a watchdog may end it sooner.
    """

    name: str
    payload: str
    args: tuple[str, ...]
    expect: str
    control: Control | Granted | NoControl
    module: str | bytes = ""
    limits: Mapping[str, float] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    judge: str = ""
    ends: bool = False
    counted: bool = False
    note: str = ""

    @property
    def shares(self) -> bool:
        """Whether it may be one of many in a sandbox: it needs nothing of its own, and leaves nothing."""
        own = self.limits or self.ends or self.counted
        return not own and self.payload not in ("wasm_files.py", "wasm_files.js", "write_file.py")

    def as_attack(self) -> Attack:
        """For a control as a plain child of the test."""
        return Attack(self.name, self.payload, self.args, {}, NoControl(""))


PLAIN = Control()
_DECOY = ("{decoy}", "{marker}")
_SHOWN = Granted(args=("/shown/secret", "{marker}"), mounts=(("{folder}/..", "/shown"),))
_IN_MEMORY = Control(
    namespaces=("mount",),
    before="mount -t tmpfs -o size=192m,nr_inodes=50000 none {folder} && cd {folder} || exit 9",
)
_NO_CALL = "no-such-call"
_FUEL, _DEADLINE = "RINGFENCE_WASM_FUEL", "RINGFENCE_WASM_DEADLINE"


def _python(name: str, kind: str, *args: str, expect: str = _NO_CALL, **more: object) -> WasmAttack:
    return WasmAttack(name, "wasm_calls.py", (kind, *args), expect, **({"control": PLAIN} | more))  # type: ignore[arg-type]


def _bomb(kind: str, count: int, expect: str, control: Control | Granted, **more: object) -> WasmAttack:
    name = f"bomb-{kind}"
    return WasmAttack(name, "wasm_bombs.py", (kind, str(count)), expect, control, limits=SMALL, **more)  # type: ignore[arg-type]


def _module(name: str, text: str | bytes, expect: str, fine: str | bytes, **more: object) -> WasmAttack:
    """``fine``: the same module with an innocent size, depth or import."""
    control = Granted(module=fine)
    return WasmAttack(name, "", (), expect, control, module=text, **more)  # type: ignore[arg-type]


_START = '(func (export "_start")'
_EXIT = '(import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))'
_FINE = f"(module {_START}))"


def _grow(pages: int, step: int = 16) -> str:
    """Grows its memory by steps and writes to every page; exits with 9 where it gets no more."""
    return f"""(module {_EXIT} (memory (export "memory") 1) {_START} (local $n i32)
      (loop $again
        (if (i32.eq (memory.grow (i32.const {step})) (i32.const -1)) (then (call $exit (i32.const 9))))
        (local.set $n (i32.add (local.get $n) (i32.const {step})))
        (memory.fill (i32.mul (i32.sub (memory.size) (i32.const {step})) (i32.const 65536)) (i32.const 1)
          (i32.const {65536 * step}))
        (br_if $again (i32.lt_u (local.get $n) (i32.const {pages}))))))"""


def _spin(rounds: int) -> str:
    """A loop; 0 is for ever."""
    until = "(br $again)" if not rounds else (
        "(local.set $n (i32.add (local.get $n) (i32.const 1)))"
        f"(br_if $again (i32.lt_u (local.get $n) (i32.const {rounds})))"
    )  # fmt: skip
    return f'(module (memory (export "memory") 1) {_START} (local $n i32) (loop $again {until})))'


def _deep(depth: int) -> str:
    return f"""(module (func $f (param i32) (result i32)
      (if (result i32) (i32.eqz (local.get 0)) (then (i32.const 0))
        (else (i32.add (i32.const 1) (call $f (i32.sub (local.get 0) (i32.const 1)))))))
      {_START} (drop (call $f (i32.const {depth})))))"""


def _table(elements: int, *, grow: bool = False) -> str:
    if not grow:
        return f"(module (table {elements} funcref) {_START}))"
    return f"""(module {_EXIT} (table $t 1 funcref) {_START}
      (if (i32.eq (table.grow $t (ref.null func) (i32.const {elements})) (i32.const -1))
        (then (call $exit (i32.const 9))))))"""


def _trap(body: str) -> str:
    return f"(module (memory 1) (type $t (func)) (table 1 funcref) {_START} {body}))"


def _locals(count: int) -> str:
    return f"(module {_START} " + "(local i64)" * count + "))"


def _section(number: int, body: bytes) -> bytes:
    return bytes([number]) + _leb(len(body)) + body


def _leb(value: int) -> bytes:
    """An unsigned LEB128 number, in five bytes."""
    return bytes((value >> shift) & 0x7F | (0x80 if shift < 28 else 0) for shift in range(0, 35, 7))


def _functions(count: int, body: bytes) -> bytes:
    """A module of ``count`` functions with that body, the first of them exported as ``_start``."""
    code = b"\0" + body + b"\x0b"
    return (
        b"\0asm\1\0\0\0"
        + _section(1, bytes.fromhex("01600000"))
        + _section(3, _leb(count) + bytes(count))
        + _section(7, b"\1\6_start\0\0")
        + _section(10, _leb(count) + (_leb(len(code)) + code) * count)
    )


def _many_functions(count: int) -> bytes:
    """Cheap to write down, dear to compile: every function divides a hundred times."""
    return _functions(count, bytes.fromhex("410141016d1a") * 100)


_COMPONENT = b"\0asm\x0d\0\1\0"

WASM_ATTACKS = [
    # files
    WasmAttack("read-host-file", "read_file.py", _DECOY, "invisible", PLAIN),
    WasmAttack("read-ssh-key", "read_file.py", ("{ssh_key}", "{marker}"), "invisible", PLAIN),
    WasmAttack("read-passwd", "read_file.py", ("/etc/passwd", "root:"), "invisible", PLAIN),
    WasmAttack("read-own-wall", "read_file.py", ("/proc/self/status", "Name:"), "invisible", PLAIN),
    WasmAttack("write-host-file", "write_file.py", ("{writable}",), "invisible", PLAIN),
    WasmAttack("climb", "wasm_files.py", _DECOY, "denied:EBADF+denied:EPERM+invisible", PLAIN),
    WasmAttack("climb-quickjs", "wasm_files.js", _DECOY, "invisible", _SHOWN),
    WasmAttack("shown-read-only", "write_file.py", ("/shown/writable",), "denied:EPERM",
               Control(args=("{writable}",))),
    _python("list-root", "list", "/proc", expect="invisible"),
    _python("list-host-folder", "list", "{folder}", expect="invisible"),
    _python("make-in-host-folder", "make-there", "{folder}", expect="invisible"),
    _python("hard-link-out", "hard-link-out", "{writable}", expect="invisible",
            control=NoControl("the kernel protects hard links to files of others; climb tries it too")),
    _python("truncate", "truncate", "{writable}", expect="invisible"),
    WasmAttack("environment", "wasm_environment.py", ("{env_marker}",), "invisible", PLAIN),
    WasmAttack("environment-quickjs", "wasm_calls.js", ("--kind", "environment", "{env_marker}"), "invisible",
               Granted(env={"RINGFENCE_TEST_GIVEN": "{env_marker}"})),
    # calls
    *[
        _python(f"call-{kind}", kind)
        for kind in ("fork", "exec", "spawn", "system", "thread", "ctypes", "executable-memory", "fifo",
                     "resolve")
    ],
    _python("call-subprocess", "subprocess", expect="denied:ENOTSUP"),
    _python("call-listen", "listen", expect="denied:ENOTSUP"),
    _python("call-setuid", "setuid", control=Control(root_only="only root may take another user id")),
    _python("call-kill", "kill", "{victim}", judge="victim"),
    *[_python(f"call-{kind}", kind, "{" + kind + "}") for kind in ("unix", "abstract")],
    *[_python(f"call-{kind}", kind, "{" + kind + "}", expect="denied:ENOTSUP") for kind in ("tcp", "tcp6")],
    *[
        WasmAttack(f"quickjs-{kind}", "wasm_calls.js", ("--kind", kind, "0"), _NO_CALL,
                   NoControl("there is no QuickJS outside of WebAssembly here; call-* has the controls"))
        for kind in ("exec", "popen", "worker", "kill")
    ],
    # bombs
    _bomb("memory", 256, "contained:out_of_memory",
          Control(limits={"as": 1024 * MIB}, cgroup={"memory": 600 * MIB}), counted=True),
    _bomb("disk", 128, "contained:ENOSPC", _IN_MEMORY),
    _bomb("files", 20_000, "contained:ENOSPC", _IN_MEMORY),
    _bomb("folders", 20_000, "contained:ENOSPC", _IN_MEMORY),
    _bomb("descriptors", 1000, "contained:EIO", Control(limits={"nofile": 1100}),
          note="Wasmtime has no other word for EMFILE"),
    _bomb("output", 10, "contained:output_limit", Granted(args=("output", "0")), ends=True),
    _bomb("errors", 10, "contained:output_limit", Granted(args=("errors", "0")), ends=True),
    WasmAttack("runaway-loop", "wasm_bombs.py", ("spin", "1000000"), "contained:deadline",
               Granted(args=("spin", "1"), limits={"timeout": 90.0}), limits={"timeout": 5.0}, ends=True),
    WasmAttack("runaway-loop-cpu-time", "wasm_bombs.py", ("spin", "1000000"), "contained:cpu_time",
               Granted(args=("spin", "0"), limits={"cpu_time": 60.0}), limits={"cpu_time": 1.0}, ends=True),
    WasmAttack("runaway-quickjs", "wasm_calls.js", ("--kind", "spin", "1000000"), "contained:deadline",
               Granted(args=("--kind", "spin", "1"), limits={"timeout": 90.0}), limits={"timeout": 5.0},
               ends=True),
    WasmAttack("memory-quickjs", "wasm_calls.js", ("--kind", "memory", "256"), "contained:out_of_memory",
               Granted(args=("--kind", "memory", "4")), limits=SMALL, counted=True),
    WasmAttack("stack-quickjs", "wasm_calls.js", ("--kind", "deep", "10000000"), "killed:SIGABRT",
               Granted(args=("--kind", "deep", "10"))),
    # modules
    _module("memory-grow", _grow(30_000), "contained:out_of_memory", _grow(64), limits=SMALL, counted=True),
    _module("memory-grow-at-once", _grow(60_000, 60_000), "exit:9", _grow(64, 64), limits=SMALL),
    _module("memory-declared", f"(module (memory 65536) {_START}))", "exit:126",
            f"(module (memory 1) {_START}))", limits=SMALL),
    _module("table-declared", _table(100_000_000), "exit:126", _table(10)),
    _module("table-grow", _table(100_000_000, grow=True), "exit:126", _table(10, grow=True)),
    _module("stack", _deep(10_000_000), "killed:SIGABRT", _deep(100)),
    _module("trap-unreachable", _trap("unreachable"), "killed:SIGABRT", _trap("nop")),
    _module("trap-division", _trap("(drop (i32.div_s (i32.const 1) (i32.const 0)))"), "killed:SIGABRT",
            _trap("(drop (i32.div_s (i32.const 1) (i32.const 1)))")),
    _module("trap-out-of-bounds", _trap("(drop (i32.load (i32.const 65536)))"), "killed:SIGABRT",
            _trap("(drop (i32.load (i32.const 65532)))")),
    _module("trap-far-out-of-bounds", _trap("(drop (i64.load offset=4294967295 (i32.const -1)))"),
            "killed:SIGABRT", _trap("(drop (i64.load (i32.const 0)))")),
    _module("trap-no-function", _trap("(call_indirect (type $t) (i32.const 0))"), "killed:SIGABRT",
            _trap("nop")),
    _module("trap-wrong-index", _trap("(call_indirect (type $t) (i32.const 7))"), "killed:SIGABRT",
            _trap("nop")),
    _module("loop-fuel", _spin(0), "exit:124", _spin(1000), env={_FUEL: "1000000"}),
    WasmAttack("loop-deadline", "", (), "exit:124", Granted(module=_spin(1000), env={_DEADLINE: "60"}),
               module=_spin(0), env={_DEADLINE: "0.3"}),
    _module("loop-in-start", '(module (func $f (loop br 0)) (start $f) (func (export "_start")))', "exit:124",
            _FINE, env={_FUEL: "1000000"}),
    _module("import-of-the-host", f'(module (import "env" "system" (func (param i32))) {_START}))',
            "exit:126", _FINE),
    _module("import-not-of-wasi", f'(module (import "wasi_snapshot_preview1" "ptrace" (func)) {_START}))',
            "exit:126", _FINE),
    _module("import-of-memory", f'(module (import "env" "memory" (memory 1)) {_START}))', "exit:126", _FINE),
    _module("import-of-threads",
            f'(module (import "wasi" "thread-spawn" (func (param i32) (result i32))) {_START}))',
            "exit:126", _FINE),
    _module("garbage", b"\0asm\1\0\0\0" + bytes(range(256)) * 40, "exit:126", _FINE),
    _module("empty", b"", "exit:126", _FINE),
    _module("machine-code", b"\x7fELF" + bytes(4096), "exit:126", _FINE),
    _module("text", b"(module)", "exit:126", _FINE),
    _module("wrong-version", b"\0asm\2\0\0\0", "exit:126", _FINE),
    _module("huge-section-said", b"\0asm\1\0\0\0\1\xff\xff\xff\xff\x0f", "exit:126", _FINE),
    _module("huge-count-said", b"\0asm\1\0\0\0\1\5\xff\xff\xff\xff\x0f", "exit:126", _FINE),
    _module("component", _COMPONENT, "exit:126", _FINE),
    _module("huge-component", _COMPONENT + bytes(64 * MIB), "exit:126", _FINE, limits={"disk": 100 * MIB}),
    WasmAttack("compile-bomb", "", (), "contained:cpu_time",
               Granted(module=_many_functions(10), limits={"cpu_time": 60.0}), module=_many_functions(15_000),
               limits={"cpu_time": 0.5}, ends=True),
    _module("many-locals", _locals(60_000), "exit:126", _locals(100)),
]  # fmt: skip
ATTACKS = {attack.name: attack for attack in WASM_ATTACKS}
assert len(ATTACKS) == len(WASM_ATTACKS)
