"""The part of Wasmtime's C API that is needed, by ctypes: the package's own bindings take longer to import
(60 ms) than everything else that a worker does until it answers.

The layouts are those of ``wasmtime.h`` 50 (requirements pin the major version; a test compares them).
"""

from __future__ import annotations

import ctypes
import os
import struct
from ctypes import POINTER, byref, c_bool, c_char_p, c_int, c_int64, c_size_t, c_ubyte, c_uint64, c_void_p

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

Number = int | float
KINDS = {0: "i32", 1: "i64", 2: "f32", 3: "f64"}
VALUE_SIZE = 32  # sizeof(wasmtime_val_t); the union is at 8
EXTERN_SIZE = 64  # at least sizeof(wasmtime_extern_t); the union is at 8
_FUNC, _MEMORY = 0, 3
_FORMATS = {0: "<i", 1: "<q", 2: "<f", 3: "<d"}
INTERRUPT, OUT_OF_FUEL = 10, 11  # wasmtime_trap_code_t
_MOST_FUEL = 2**62
_MOST_TABLE = 1 << 20  # elements


class EngineError(Exception):
    """Wasmtime refused something; ``trap`` is the code of a trap, ``exit`` the status of proc_exit."""

    def __init__(self, text: str, *, trap: int | None = None, exit: int | None = None) -> None:
        super().__init__(text)
        self.trap = trap
        self.exit = exit


class _Bytes(ctypes.Structure):
    _fields_ = (("size", c_size_t), ("data", c_void_p))

    def take(self) -> bytes:
        return ctypes.string_at(self.data, self.size) if self.size else b""


class _Pointers(ctypes.Structure):
    _fields_ = (("size", c_size_t), ("data", POINTER(c_void_p)))

    def take(self) -> list[int]:
        return [self.data[at] or 0 for at in range(self.size)]


_CALLBACK = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_size_t)
_P, _S, _N = c_void_p, c_size_t, c_int64
_CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "wasm_config_new": (_P, ()),
    "wasmtime_config_epoch_interruption_set": (None, (_P, c_bool)),
    "wasmtime_config_consume_fuel_set": (None, (_P, c_bool)),
    "wasmtime_config_wasm_threads_set": (None, (_P, c_bool)),
    "wasm_engine_new_with_config": (_P, (_P,)),
    "wasmtime_engine_increment_epoch": (None, (_P,)),
    "wasmtime_module_new": (_P, (_P, c_char_p, _S, POINTER(_P))),
    "wasmtime_module_serialize": (_P, (_P, POINTER(_Bytes))),
    "wasmtime_module_deserialize_file": (_P, (_P, c_char_p, POINTER(_P))),
    "wasmtime_module_imports": (None, (_P, POINTER(_Pointers))),
    "wasmtime_module_exports": (None, (_P, POINTER(_Pointers))),
    "wasm_importtype_module": (POINTER(_Bytes), (_P,)),
    "wasm_importtype_name": (POINTER(_Bytes), (_P,)),
    "wasm_importtype_type": (_P, (_P,)),
    "wasm_exporttype_name": (POINTER(_Bytes), (_P,)),
    "wasm_externtype_as_functype_const": (_P, (_P,)),
    "wasm_functype_params": (POINTER(_Pointers), (_P,)),
    "wasm_functype_results": (POINTER(_Pointers), (_P,)),
    "wasm_valtype_kind": (c_ubyte, (_P,)),
    "wasm_byte_vec_delete": (None, (POINTER(_Bytes),)),
    "wasmtime_store_new": (_P, (_P, _P, _P)),
    "wasmtime_store_delete": (None, (_P,)),
    "wasmtime_store_context": (_P, (_P,)),
    "wasmtime_store_limiter": (None, (_P, _N, _N, _N, _N, _N)),
    "wasmtime_context_set_epoch_deadline": (None, (_P, c_uint64)),
    "wasmtime_context_set_fuel": (_P, (_P, c_uint64)),
    "wasmtime_context_set_wasi": (_P, (_P, _P)),
    "wasmtime_linker_new": (_P, (_P,)),
    "wasmtime_linker_define_wasi": (_P, (_P,)),
    "wasmtime_linker_define_func": (_P, (_P, c_char_p, _S, c_char_p, _S, _P, _CALLBACK, _P, _P)),
    "wasmtime_linker_instantiate": (_P, (_P, _P, _P, _P, POINTER(_P))),
    "wasmtime_instance_export_get": (c_bool, (_P, _P, c_char_p, _S, _P)),
    "wasmtime_func_type": (_P, (_P, _P)),
    "wasm_functype_delete": (None, (_P,)),
    "wasmtime_func_call": (_P, (_P, _P, _P, _S, _P, _S, POINTER(_P))),
    "wasmtime_memory_data": (_P, (_P, _P)),
    "wasmtime_memory_data_size": (_S, (_P, _P)),
    "wasmtime_error_message": (None, (_P, POINTER(_Bytes))),
    "wasmtime_error_exit_status": (c_bool, (_P, POINTER(c_int))),
    "wasmtime_error_delete": (None, (_P,)),
    "wasm_trap_message": (None, (_P, POINTER(_Bytes))),
    "wasm_trap_delete": (None, (_P,)),
    "wasmtime_trap_code": (c_bool, (_P, POINTER(c_ubyte))),
    "wasmtime_trap_new": (_P, (c_char_p, _S)),
    "wasi_config_new": (_P, ()),
    "wasi_config_set_argv": (c_bool, (_P, _S, POINTER(c_char_p))),
    "wasi_config_set_env": (c_bool, (_P, _S, POINTER(c_char_p), POINTER(c_char_p))),
    "wasi_config_inherit_stdin": (None, (_P,)),
    "wasi_config_inherit_stdout": (None, (_P,)),
    "wasi_config_inherit_stderr": (None, (_P,)),
    "wasi_config_preopen_dir": (c_bool, (_P, c_char_p, c_char_p, c_bool)),
}


class _Library:
    """The shared library with its calls typed on first use."""

    def __init__(self, path: str) -> None:
        self._dll = ctypes.CDLL(path)

    def __getattr__(self, name: str) -> Any:
        result, arguments = _CALLS[name]
        call = getattr(self._dll, name)
        call.restype, call.argtypes = result, arguments
        setattr(self, name, call)
        return call


class Engine:
    """One configuration of Wasmtime; a module runs in the one only that it was compiled for.

    ``interruptible`` modules look for an interrupt at each loop and call, which costs a sixth of their speed.
    """

    def __init__(self, library: str, *, fuel: bool = False, interruptible: bool = True) -> None:
        self.lib = lib = _Library(library)
        self.fuel = fuel
        config = lib.wasm_config_new()
        lib.wasmtime_config_epoch_interruption_set(config, interruptible)
        lib.wasmtime_config_consume_fuel_set(config, fuel)
        lib.wasmtime_config_wasm_threads_set(config, False)
        self.pointer = lib.wasm_engine_new_with_config(config)

    def increment_epoch(self) -> None:
        """Interrupt what runs past its epoch deadline, if it is interruptible. Any thread."""
        self.lib.wasmtime_engine_increment_epoch(self.pointer)

    def compile(self, code: bytes) -> int:
        """A module from WebAssembly bytes.

        Raises:
            EngineError: it is none.
        """
        module = c_void_p()
        self.check(self.lib.wasmtime_module_new(self.pointer, code, len(code), byref(module)))
        return module.value or 0

    def serialize(self, module: int) -> bytes:
        """The compiled form."""
        made = _Bytes()
        self.check(self.lib.wasmtime_module_serialize(module, byref(made)))
        data = made.take()
        self.lib.wasm_byte_vec_delete(byref(made))
        return data

    def load(self, path: str) -> int:
        """A module from its compiled form, which is *trusted*: it is machine code.

        Raises:
            EngineError: another version made it, or for another processor.
        """
        module = c_void_p()
        call = self.lib.wasmtime_module_deserialize_file
        self.check(call(self.pointer, os.fsencode(path), byref(module)))
        return module.value or 0

    def imports(self, module: int) -> list[tuple[str, str, int]]:
        """(module, name, function type or 0) of what the module asks for."""
        found = _Pointers()
        self.lib.wasmtime_module_imports(module, byref(found))
        result = []
        for each in found.take():
            kind = self.lib.wasm_externtype_as_functype_const(self.lib.wasm_importtype_type(each))
            names = [
                call(each).contents.take().decode(errors="replace")
                for call in (self.lib.wasm_importtype_module, self.lib.wasm_importtype_name)
            ]
            result.append((names[0], names[1], int(kind or 0)))
        return result

    def exports(self, module: int) -> list[str]:
        """Names of what the module offers."""
        found = _Pointers()
        self.lib.wasmtime_module_exports(module, byref(found))
        names = (self.lib.wasm_exporttype_name(each).contents.take() for each in found.take())
        return [name.decode(errors="replace") for name in names]

    def signature(self, kind: int) -> tuple[list[int], list[int]]:
        """Value kinds of the parameters and results of a function type."""
        return (
            [self.lib.wasm_valtype_kind(p) for p in self.lib.wasm_functype_params(kind).contents.take()],
            [self.lib.wasm_valtype_kind(p) for p in self.lib.wasm_functype_results(kind).contents.take()],
        )

    def check(self, error: int | None, trap: int | None = None) -> None:
        """Raise what a call returned."""
        lib, text = self.lib, _Bytes()
        if error:
            status = c_int()
            exited = lib.wasmtime_error_exit_status(error, byref(status))
            lib.wasmtime_error_message(error, byref(text))
            message = text.take().decode(errors="replace")
            lib.wasm_byte_vec_delete(byref(text))
            lib.wasmtime_error_delete(error)
            raise EngineError(message, exit=status.value if exited else None)
        if trap:
            code = c_ubyte()
            known = lib.wasmtime_trap_code(trap, byref(code))
            lib.wasm_trap_message(trap, byref(text))
            message = text.take().decode(errors="replace").rstrip("\0")
            lib.wasm_byte_vec_delete(byref(text))
            lib.wasm_trap_delete(trap)
            raise EngineError(message, trap=code.value if known else 255)


class Instance:
    """A store with one instance of a module. Everything it holds goes with :meth:`close`."""

    def __init__(self, engine: Engine, *, memory: int = -1, fuel: int | None = None) -> None:
        self.engine = engine
        lib = engine.lib
        self.store = lib.wasmtime_store_new(engine.pointer, None, None)
        self.context = lib.wasmtime_store_context(self.store)
        lib.wasmtime_store_limiter(self.store, memory, _MOST_TABLE, 8, 16, 4)
        self.refuel(fuel)
        self.linker = lib.wasmtime_linker_new(engine.pointer)
        self._instance = (c_ubyte * 16)()
        self._kept: list[Any] = []  # callbacks must live as long as the linker

    def refuel(self, fuel: int | None) -> None:
        """Begin anew to count fuel, and to heed :meth:`Engine.increment_epoch`."""
        lib = self.engine.lib
        lib.wasmtime_context_set_epoch_deadline(self.context, 1)
        if self.engine.fuel:
            amount = _MOST_FUEL if fuel is None else fuel
            self.engine.check(lib.wasmtime_context_set_fuel(self.context, amount))

    def close(self) -> None:
        """Free the store."""
        self.engine.lib.wasmtime_store_delete(self.store)

    def wasi(
        self,
        argv: Sequence[str | bytes],
        env: Sequence[tuple[str, str]],
        folders: Sequence[tuple[str, str, bool]],
        *,
        streams: bool = True,
    ) -> None:
        """Give it WASI: arguments, variables, (host folder, its name inside, writable) and our streams."""
        lib = self.engine.lib
        config = lib.wasi_config_new()
        words = [os.fsencode(word) for word in argv]
        names = [os.fsencode(name) for name, _ in env]
        values = [os.fsencode(value) for _, value in env]
        if not (
            lib.wasi_config_set_argv(config, len(words), (c_char_p * len(words))(*words))
            and lib.wasi_config_set_env(
                config, len(names), (c_char_p * len(names))(*names), (c_char_p * len(values))(*values)
            )
        ):
            raise EngineError("an argument or a variable is not UTF-8")
        if streams:
            lib.wasi_config_inherit_stdin(config)
            lib.wasi_config_inherit_stdout(config)
            lib.wasi_config_inherit_stderr(config)
        for host, inside, writable in folders:
            if not lib.wasi_config_preopen_dir(config, os.fsencode(host), os.fsencode(inside), writable):
                raise EngineError(f"the folder {inside} can't be opened")
        self.engine.check(lib.wasmtime_context_set_wasi(self.context, config))
        self.engine.check(lib.wasmtime_linker_define_wasi(self.linker))

    def define(self, module: str, name: str, kind: int, function: Callable[..., Sequence[Number]]) -> None:
        """A host function. What it raises becomes a trap."""
        lib, (takes, gives) = self.engine.lib, self.engine.signature(kind)
        if any(each not in KINDS for each in (*takes, *gives)):
            raise EngineError(f"{module}.{name} has a type that host functions can't have")

        def called(
            _env: Any, _caller: Any, arguments: int, count: int, results: int, wanted: int
        ) -> int | None:
            try:
                found = function(*(_value(arguments + VALUE_SIZE * at) for at in range(count)))
                for at in range(wanted):
                    ctypes.memmove(results + VALUE_SIZE * at, _packed(gives[at], found[at]), VALUE_SIZE)
            except BaseException as error:
                text = f"{module}.{name}: {error}".encode()[:512]
                return int(lib.wasmtime_trap_new(text, len(text)))
            return None

        callback = _CALLBACK(called)
        self._kept.append(callback)
        first, second = module.encode(), name.encode()
        self.engine.check(
            lib.wasmtime_linker_define_func(
                self.linker, first, len(first), second, len(second), kind, callback, None, None
            )
        )

    def instantiate(self, module: int) -> None:
        """Link and start.

        Raises:
            EngineError: an import is missing, or the start function trapped.
        """
        trap = c_void_p()
        error = self.engine.lib.wasmtime_linker_instantiate(
            self.linker, self.context, module, self._instance, byref(trap)
        )
        self.engine.check(error, trap.value)

    def _export(self, name: str, kind: int) -> Any:
        item, text = (c_ubyte * EXTERN_SIZE)(), name.encode()
        lib = self.engine.lib
        found = lib.wasmtime_instance_export_get(self.context, self._instance, text, len(text), item)
        if not found or item[0] != kind:
            return None
        return (c_ubyte * (EXTERN_SIZE - 8)).from_buffer(item, 8)

    def has(self, name: str) -> bool:
        """Whether there is an exported function of this name."""
        return self._export(name, _FUNC) is not None

    def call(self, name: str, *arguments: Number) -> list[Number]:
        """Call an exported function.

        Raises:
            EngineError: it trapped or exited, or there is none, or the arguments don't fit its type.
        """
        function = self._export(name, _FUNC)
        if function is None:
            raise EngineError(f"there is no exported function {name!r}")
        lib = self.engine.lib
        kind = lib.wasmtime_func_type(self.context, function)
        takes, gives = self.engine.signature(kind)
        lib.wasm_functype_delete(kind)
        if len(takes) != len(arguments):
            raise EngineError(f"{name} takes {len(takes)} arguments, not {len(arguments)}")
        given = (c_ubyte * max(1, VALUE_SIZE * len(takes)))(*b"".join(map(_packed, takes, arguments)))
        results = (c_ubyte * max(1, VALUE_SIZE * len(gives)))()
        trap = c_void_p()
        error = lib.wasmtime_func_call(
            self.context, function, given, len(takes), results, len(gives), byref(trap)
        )
        self.engine.check(error, trap.value)
        start = ctypes.addressof(results)
        return [_value(start + VALUE_SIZE * at) for at in range(len(gives))]

    def write(self, at: int, data: bytes) -> None:
        """Put bytes into the exported memory."""
        ctypes.memmove(self._memory(at, len(data)), data, len(data))

    def read(self, at: int, size: int) -> bytes:
        """Bytes of the exported memory."""
        return ctypes.string_at(self._memory(at, size), size)

    def _memory(self, at: int, size: int) -> int:
        memory = self._export("memory", _MEMORY)
        if memory is None:
            raise EngineError("there is no exported memory")
        whole = self.engine.lib.wasmtime_memory_data_size(self.context, memory)
        if at < 0 or size < 0 or at + size > whole:
            raise EngineError("outside of the memory")
        return int(self.engine.lib.wasmtime_memory_data(self.context, memory)) + at


def _value(at: int) -> Number:
    raw = ctypes.string_at(at, VALUE_SIZE)
    form = _FORMATS.get(raw[0])
    if form is None:
        raise EngineError("a value that is no number")
    number: Number = struct.unpack_from(form, raw, 8)[0]
    return number


def _packed(kind: int, value: Number) -> bytes:
    form = _FORMATS.get(kind)
    if form is None:
        raise EngineError("the function takes or gives a value that is no number")
    if kind < 2:
        if isinstance(value, bool) or not isinstance(value, int):
            raise EngineError(f"{value!r} is no {KINDS[kind]}")
        bits = 32 if kind == 0 else 64
        if not -(2 ** (bits - 1)) <= value < 2**bits:
            raise EngineError(f"{value} does not fit in {KINDS[kind]}")
        value = value - 2**bits if value >= 2 ** (bits - 1) else value
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise EngineError(f"{value!r} is no {KINDS[kind]}")
    try:
        body = struct.pack(form, value)
    except (struct.error, OverflowError) as error:
        raise EngineError(f"{value} does not fit in {KINDS[kind]}") from error
    return (bytes([kind]) + bytes(7) + body).ljust(VALUE_SIZE, b"\0")
