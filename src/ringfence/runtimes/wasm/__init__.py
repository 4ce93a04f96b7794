"""``wasm``: WebAssembly in Wasmtime, in worker processes. Level 1, boundary ``instruction``.

Belongs here: the driver, the cache of compiled modules, the worker (a small Python process that speaks the
guest link protocol's side of the agent) and the few calls of Wasmtime's C API that it needs. Does not belong
here: anything a user calls; that is ``ringfence.wasm``.

``engine``, ``worker``, ``serving``, ``commands``, ``files``, ``archives`` and ``calling`` run in the worker,
inside the wall: they import neither asyncio nor anything heavy, since every sandbox pays for it.
"""
