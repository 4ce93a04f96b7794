"""Write ``docs/seccomp.md`` from the table: run this module and keep what it prints."""

from __future__ import annotations

import errno
import textwrap
from collections.abc import Iterable

from ringfence.runtimes.seccomp import bpf, guards, table
from ringfence.runtimes.seccomp.decisions import ALLOW

_HEAD = """# The system call filter

<!-- Written by ringfence.runtimes.seccomp.document; a test compares. Change the table instead. -->

Every wall that shares the host's kernel runs its workload, and the guest agent too, behind this filter. No
preset and no option switches it off. It is an allow list:

* A call that is listed as allowed reaches the kernel.
* A call that is known and has no business in a sandbox answers `EPERM`, or `ENOSYS` where callers are known
  to fall back on that answer only.
* A call that the table doesn't know, because it is newer, answers `ENOSYS`: libraries then use the older
  call.
* A call through another architecture's entry (i386's `int 0x80` on x86-64, 32-bit arm on aarch64) kills the
  process with `SIGSYS`: the same number means another call there, and 32-bit entries are a part of the
  kernel that hardly anybody tests. x32 calls (numbers from 0x40000000 up) answer `ENOSYS`, as on a kernel
  without x32.

Nothing else is killed: programs that probe for a feature get an answer and go on.

Arguments that the kernel takes as `int` are compared in their lower 32 bits, because the kernel drops the
rest: a filter that looked at all 64 could be passed by setting a bit that the kernel never sees. Memory
behind pointers is never looked at (it could change after the look), which is why `clone3` is refused as a
whole.

The same table is written out for OCI runtimes (`export.to_oci`) and for nsjail (`export.to_kafel`).

## What doesn't work inside, and what to do

| program | why | instead |
| --- | --- | --- |
| gdb, strace, LeakSanitizer | they need `ptrace` | debug outside; `ASAN_OPTIONS=detect_leaks=0` |
| perf, bpftrace | they look into the host's kernel | `python -X importtime`, `cProfile`, `node --prof` |
| containers, Chromium's own sandbox | they need new namespaces | the wall is there: `--no-sandbox` |
| 32-bit x86 programs | their entry to the kernel is closed | 64-bit builds |
| ping, tcpdump | raw sockets | TCP and UDP tools |
| mount, FUSE | mounts are fixed at the start | the policy's `filesystem.mounts` |
| programs that insist on io_uring | it goes round this filter | nearly all fall back to epoll by themselves |
"""


def _wrap(text: str) -> str:
    return textwrap.fill(text, 116, break_long_words=False, break_on_hyphens=False)


def _section(title: str, groups: Iterable[table.Group]) -> str:
    text = f"\n## {title}\n"
    for group in groups:
        answer = "" if group.action == ALLOW else f" ({errno.errorcode[group.action & 0xFFFF]})"
        calls = ", ".join(f"`{name}`" for name in group.calls.split())
        name = group.name[0].upper() + group.name[1:]
        text += f"\n### {name}{answer}\n\n{_wrap(group.reason)}\n\n{_wrap(calls)}\n"
    return text


def page() -> str:
    """The whole page as Markdown."""
    text = _HEAD
    text += _section("Allowed", table.ALLOWED)
    text += "\n## Allowed by their arguments\n"
    for guard in guards.GUARDS:
        rule = guard.rule[0].upper() + guard.rule[1:] + "."
        text += f"\n### `{guard.call}`\n\n{_wrap(rule)}\n\n{_wrap(guard.reason)}\n"
    text += _section("Denied", table.DENIED)
    text += _section("Absent", table.ABSENT)
    text += "\n## Size\n\n"
    for arch in sorted(bpf.AUDIT_ARCH, reverse=True):
        length = len(bpf.compile(table.rules(arch), arch, table.DEFAULT)) // 8
        text += f"* {arch}: {len(table.numbers(arch))} calls known, {length} instructions\n"
    return text


if __name__ == "__main__":
    print(page(), end="")
