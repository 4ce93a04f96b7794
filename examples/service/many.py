"""Twenty pieces of work at once, each in a sandbox of its own, with a deadline and a limit on memory.

python examples/service/many.py
"""

from __future__ import annotations

import asyncio

from ringfence import AsyncSandbox

WORK = [f"print(sum(n * n for n in range({size})))" for size in range(1_000, 21_000, 1_000)]


async def one(gate: asyncio.Semaphore, code: str) -> str:
    """One piece of work: what it printed."""
    async with gate, AsyncSandbox.create(memory="128MiB", timeout="5m") as sandbox:
        result = await sandbox.run(["python3", "-c", code], timeout=120)
        return result.check().stdout.strip()


async def main() -> None:
    """All of them, five at once."""
    gate = asyncio.Semaphore(5)
    results = await asyncio.gather(*(one(gate, code) for code in WORK))
    print(len(results), "results:", results[0], "…", results[-1])


if __name__ == "__main__":
    asyncio.run(main())
