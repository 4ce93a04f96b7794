"""The few calls of Wasmtime that the worker makes: their layouts, values and traps."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import pytest
import wasmtime

from ringfence.runtimes.wasm import engine, packages
from ringfence.runtimes.wasm.engine import Engine, EngineError, Instance
from support.modules import FUNCTIONS, PLAIN, wasm


@pytest.fixture(scope="module")
def made() -> Engine:
    path = packages.library()
    assert path is not None
    return Engine(path)


def instance(made: Engine, text: str = PLAIN, **limits: int) -> Instance:
    one = Instance(made, **limits)
    one.instantiate(made.compile(wasm(text)))
    return one


def test_the_layouts_are_those_of_the_package() -> None:
    of = wasmtime._bindings
    assert ctypes.sizeof(of.wasmtime_val_t) == engine.VALUE_SIZE
    assert of.wasmtime_val_t.of.offset == of.wasmtime_extern_t.of.offset == 8
    assert ctypes.sizeof(of.wasmtime_extern_t) <= engine.EXTERN_SIZE
    assert ctypes.sizeof(of.wasmtime_instance_t) == 16
    assert wasmtime.TrapCode.INTERRUPT.value == engine.INTERRUPT
    assert wasmtime.TrapCode.OUT_OF_FUEL.value == engine.OUT_OF_FUEL
    for name in engine._CALLS:
        assert hasattr(of.dll, name), name


def test_values_of_every_number_type(made: Engine) -> None:
    one = instance(made)
    assert one.call("add", 2**31 - 1, 1) == [-(2**31)]
    assert one.call("add", 2**32 - 1, 2) == [1]  # unsigned is fine too
    assert one.call("wide", -(2**63)) == [-(2**63)]
    pair = one.call("pair", 0.1, 0.5)
    assert pair == [0.1, 0.5]
    assert math.isnan(one.call("pair", math.nan, 1)[0])
    assert one.call("nothing") == []
    one.close()


@pytest.mark.parametrize(
    "words", [("add", 1), ("add", 1.0, 2), ("add", True, 2), ("add", 2**32, 2), ("pair", "x", 1.0),
              ("pair", 1.0, 1e300), ("none",), ("memory",)]
)  # fmt: skip
def test_what_does_not_fit_is_refused(made: Engine, words: tuple[str, int]) -> None:
    one = instance(made)
    with pytest.raises(EngineError) as caught:
        one.call(*words)
    assert caught.value.trap is None
    one.close()


def test_traps(made: Engine) -> None:
    one = instance(made)
    with pytest.raises(EngineError, match="unreachable"):
        one.call("bad")
    with pytest.raises(EngineError, match="stack"):
        one.call("deep")
    one.close()


def test_an_import_that_is_not_given(made: Engine) -> None:
    with pytest.raises(EngineError, match="twice"):
        instance(made, FUNCTIONS)


def test_a_host_function_and_its_failure(made: Engine) -> None:
    module = made.compile(wasm(FUNCTIONS))
    ((where, name, kind),) = made.imports(module)
    assert (where, name) == ("env", "twice")
    assert "add" in made.exports(module)
    one = Instance(made)
    one.define(where, name, kind, lambda x: [2 * x] if x < 100 else [])
    one.instantiate(module)
    assert one.call("host", 21) == [42]
    with pytest.raises(EngineError, match=r"env\.twice"):
        one.call("host", 200)
    one.close()


def test_memory_is_limited(made: Engine) -> None:
    one = instance(made, memory=1 << 20)
    assert one.call("grow", 4) == [1]
    assert one.call("grow", 100) == [-1]
    for at, size in ((-1, 4), (0, 1 << 30), (1 << 40, 1)):
        with pytest.raises(EngineError):
            one.read(at, size)
    one.write(0, b"abc")
    assert one.read(0, 3) == b"abc"
    one.close()


@pytest.mark.parametrize("code", [b"", b"\0asm", b"garbage", b"\0asm\1\0\0\0\xff\xff\xff"])
def test_what_is_no_module(made: Engine, code: bytes) -> None:
    with pytest.raises(EngineError):
        made.compile(code)


def test_interrupt() -> None:
    for interruptible, trap in ((True, engine.INTERRUPT), (False, engine.OUT_OF_FUEL)):
        both = Engine(str(packages.library()), fuel=True, interruptible=interruptible)
        one = Instance(both, fuel=50_000_000)
        one.instantiate(both.compile(wasm(PLAIN)))
        both.increment_epoch()
        with pytest.raises(EngineError) as caught:
            one.call("spin")
        assert caught.value.trap == trap
        one.close()


def test_a_module_runs_in_the_engine_that_it_was_compiled_for(made: Engine, tmp_path: Path) -> None:
    plain = Engine(str(packages.library()), interruptible=False)
    kept = tmp_path / "plain.cwasm"
    kept.write_bytes(plain.serialize(plain.compile(wasm(PLAIN))))
    assert plain.load(str(kept))
    with pytest.raises(EngineError):
        made.load(str(kept))


def test_fuel(made: Engine) -> None:
    fuelled = Engine(str(packages.library()), fuel=True)
    one = Instance(fuelled, fuel=10_000)
    one.instantiate(fuelled.compile(wasm(PLAIN)))
    with pytest.raises(EngineError) as caught:
        one.call("spin")
    assert caught.value.trap == engine.OUT_OF_FUEL
    one.refuel(10_000)
    assert one.call("add", 1, 2) == [3]
    one.close()
