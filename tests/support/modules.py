"""WebAssembly modules of the tests, made from text by the wasmtime package."""

from __future__ import annotations

import functools

FUNCTIONS = """(module
 (import "env" "twice" (func $twice (param i32) (result i32)))
 (memory (export "memory") 1)
 (global $n (mut i32) (i32.const 0))
 (func (export "add") (param i32 i32) (result i32) local.get 0 local.get 1 i32.add)
 (func (export "wide") (param i64) (result i64) local.get 0)
 (func (export "pair") (param f64 f32) (result f64 f32) local.get 0 local.get 1)
 (func (export "nothing"))
 (func (export "host") (param i32) (result i32) local.get 0 call $twice)
 (func (export "count") (result i32) global.get $n i32.const 1 i32.add global.set $n global.get $n)
 (func (export "spin") (loop br 0))
 (func $deep (export "deep") call $deep)
 (func (export "grow") (param i32) (result i32) local.get 0 memory.grow)
 (func (export "bad") unreachable))"""
PLAIN = FUNCTIONS.replace('(import "env" "twice" (func $twice (param i32) (result i32)))', "").replace(
    "call $twice", "nop"
)
# A command: writes to stdout what WASI lets it.
HELLO = """(module
 (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
 (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
 (memory (export "memory") 1)
 (data (i32.const 8) "hello\\n")
 (func (export "_start")
  (i32.store (i32.const 0) (i32.const 8)) (i32.store (i32.const 4) (i32.const 6))
  (drop (call $write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 20)))
  (call $exit (i32.const 7))))"""
SPIN = '(module (memory (export "memory") 1) (func (export "_start") (loop br 0)))'
START_SPINS = '(module (func $f (loop br 0)) (start $f) (func (export "_start")))'


@functools.cache
def wasm(text: str) -> bytes:
    """The module as bytes."""
    import wasmtime

    return bytes(wasmtime.wat2wasm(text))
