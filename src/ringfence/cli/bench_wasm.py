"""The part of ``ringfence bench`` that only WebAssembly has: calls of an exported function."""

from __future__ import annotations

import time

from ringfence.cli.timing import Samples
from ringfence.node.service import Node
from ringfence.wasm import Module

# (module (func (export "add") (param i32 i32) (result i32) local.get 0 local.get 1 i32.add))
ADD = bytes.fromhex("0061736d0100000001070160027f7f017f030201000707010361646400000a09010700200020016a0b")


async def calls(node: Node, count: int, warm: int) -> Samples:
    """``count`` calls of a plain function of a module that is open, after ``warm`` that don't count.

    Raises:
        RingfenceError: the module could not be opened, or a call failed.
        RuntimeError: the function can't add.
    """
    samples = Samples("wasm: call of an exported function")
    async with await Module.open(ADD, node=node) as module:
        for turn in range(-warm, count):
            started = time.perf_counter()
            value = await module.call("add", turn, 1)
            if turn >= 0:
                samples.add(started)
            if value != turn + 1:
                raise RuntimeError(f"{turn} + 1 came to {value}")
    return samples
