"""What an agent might run: an honest analysis first, then everything a hostile script would try.

usage: job.py work DATA.csv OUT                read the data, write chart.svg and report.md
       job.py attack CONFIG.json OUT           try to get out; write attempts.json
       job.py both DATA.csv CONFIG.json OUT    one after the other, as an agent's script would
       job.py memory BYTES                     take so much memory (expects to be killed for it)

Plain Python: nothing but the standard library, nothing of Ringfence. Every attempt is bounded, so that it
does no harm where nothing stops it. `scripts/demo.py` runs this in a jail; a test runs part of it outside, to
show that the attempts succeed where there is no wall.
"""

from __future__ import annotations

import csv
import ctypes
import errno
import json
import os
import platform
import signal
import socket
import sys
import time
from collections import Counter, defaultdict
from html import escape

MIB = 1024**2

# --- the honest half --------------------------------------------------------------------------------------


def read(path: str) -> list[tuple[int, str, str]]:
    """Rows of (year, prize, laureate)."""
    with open(path, newline="", encoding="utf-8") as file:
        return [(int(row["year"]), row["prize"], row["laureate"]) for row in csv.DictReader(file)]


def per_prize(rows: list[tuple[int, str, str]]) -> dict[str, dict[int, float]]:
    """For each prize and decade, how many people shared one award on average."""
    people: dict[tuple[str, int], Counter[int]] = defaultdict(Counter)
    for year, prize, _ in rows:
        people[prize, year // 10 * 10][year] += 1
    result: dict[str, dict[int, float]] = defaultdict(dict)
    for (prize, decade), years in sorted(people.items()):
        result[prize][decade] = sum(years.values()) / len(years)
    return dict(result)


def chart(series: dict[str, dict[int, float]]) -> str:
    """Grouped bars as SVG: one group a decade, one bar a prize."""
    colours = ("#33608c", "#c8693a")
    decades = sorted({decade for values in series.values() for decade in values})
    width, height, left, base, step = 780, 360, 50, 300, 54
    top = max(value for values in series.values() for value in values.values())
    scale = 230 / top
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="28" font-size="17">People who share one Nobel Prize, average a decade</text>',
    ]
    for level in range(int(top) + 1):
        y = base - level * scale
        parts.append(f'<line x1="{left}" x2="{width - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 10}" y="{y + 4:.1f}" font-size="12" text-anchor="end">{level}</text>')
    for column, decade in enumerate(decades):
        x = left + 8 + column * step
        for place, (prize, values) in enumerate(series.items()):
            value = values.get(decade, 0)
            tall = value * scale
            parts.append(
                f'<rect x="{x + place * 20}" y="{base - tall:.1f}" width="18" height="{tall:.1f}" '
                f'fill="{colours[place % 2]}"><title>{escape(prize)} {decade}s: {value:.2f}</title></rect>'
            )
        parts.append(
            f'<text x="{x + 19}" y="{base + 18}" font-size="12" text-anchor="middle">{decade}s</text>'
        )
    for place, prize in enumerate(series):
        x = left + 8 + place * 130
        parts.append(f'<rect x="{x}" y="{height - 26}" width="12" height="12" fill="{colours[place % 2]}"/>')
        parts.append(f'<text x="{x + 18}" y="{height - 15}" font-size="13">{escape(prize)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def report(rows: list[tuple[int, str, str]], series: dict[str, dict[int, float]]) -> str:
    """The findings as Markdown."""
    wins: dict[str, list[str]] = defaultdict(list)
    for year, prize, laureate in rows:
        wins[laureate].append(f"{prize} {year}")
    years: dict[str, set[int]] = defaultdict(set)
    for year, prize, _ in rows:
        years[prize].add(year)
    lines = ["# Nobel Prizes in physics and chemistry", "", f"{len(rows)} awards to {len(wins)} people.", ""]
    for prize, given in years.items():
        unawarded = [year for year in range(min(given), max(given) + 1) if year not in given]
        lines.append(f"* {prize}: {len(given)} prizes; not awarded in {', '.join(map(str, unawarded))}")
    lines += ["", "More than one prize:", ""]
    lines += [f"* {name}: {', '.join(won)}" for name, won in sorted(wins.items()) if len(won) > 1]
    lines += ["", "![People who share one prize](chart.svg)", "", "| decade | " + " | ".join(series) + " |"]
    lines.append("| --- |" + " ---: |" * len(series))
    for decade in sorted({decade for values in series.values() for decade in values}):
        lines.append(f"| {decade}s | " + " | ".join(f"{series[p].get(decade, 0):.2f}" for p in series) + " |")
    return "\n".join([*lines, ""])


def work(data: str, out: str) -> None:
    """Read, compute, write both files."""
    rows = read(data)
    series = per_prize(rows)
    os.makedirs(out, exist_ok=True)
    for name, text in (("chart.svg", chart(series)), ("report.md", report(rows, series))):
        with open(os.path.join(out, name), "w", encoding="utf-8") as file:
            file.write(text)
    print(f"read {len(rows)} rows, wrote chart.svg and report.md")


# --- the hostile half -------------------------------------------------------------------------------------
# Each attempt returns what it got hold of, or raises: OSError (the wall said no) or Stopped (a limit hit).

LIBC = ctypes.CDLL(None, use_errno=True)
# System calls that the C library has no wrapper for. io_uring_setup has one number everywhere.
NUMBERS = {
    "x86_64": {
        "bpf": 321,
        "perf_event_open": 298,
        "keyctl": 250,
        "ptrace": 101,
        "init_module": 175,
        "unshare": 272,
    },
    "aarch64": {
        "bpf": 280,
        "perf_event_open": 241,
        "keyctl": 219,
        "ptrace": 117,
        "init_module": 105,
        "unshare": 97,
    },
}.get(platform.machine(), {})
NUMBERS["io_uring_setup"] = 425


class Stopped(Exception):
    """A limit ended the attempt; says where."""


def call(name: str, *arguments: object) -> str:
    """A raw system call; OSError as the kernel or the filter answered."""
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = LIBC.syscall(ctypes.c_long(NUMBERS[name]), *words)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return f"returned {result}"


def read_file(path: str) -> str:
    """The first bytes of a file."""
    with open(path, "rb") as file:
        return repr(file.read(80))


def through_links(path: str) -> str:
    """The same file by the roots of other processes and by a symbolic link."""
    last: OSError | None = None
    for root in ("/proc/1/root", "/proc/self/root", "/proc/1/cwd/../../../.."):
        try:
            return read_file(root + path)
        except OSError as error:
            last = error
    link = f"/tmp/link-{os.getpid()}"
    os.symlink(path, link)
    try:
        return read_file(link)
    except OSError as error:
        raise last or error from None
    finally:
        os.unlink(link)


def find_process(marker: str) -> str:
    """A process of the host, by a word of its command line; ends it if it is there."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    found = marker.encode() in file.read()
            except OSError:
                continue
            if found:
                os.kill(int(name), signal.SIGKILL)
                return f"killed process {name}"
    raise Stopped("no process of the host is visible")


def connect(family: int, kind: int, address: object) -> str:
    """Connect; a datagram socket only asks for a route and sends nothing."""
    with socket.socket(family, kind) as sock:
        sock.settimeout(2)
        sock.connect(address)
        return "connected"


def mount() -> str:
    """A fresh tmpfs over /mnt."""
    if LIBC.mount(b"none", b"/mnt", b"tmpfs", 0, None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return "mounted"


def write_file(path: str, text: str) -> str:
    """Create or overwrite a file."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return f"wrote {path}"


def become_root() -> str:
    """setuid(0)."""
    os.setuid(0)
    return "uid 0"


def fork_bomb(limit: int) -> str:
    """So many sleeping children, or as many as the wall allows; all are gone afterwards."""
    reader, writer = os.pipe()
    children = []
    try:
        for _ in range(limit):
            child = os.fork()
            if child == 0:
                os.close(writer)
                os.read(reader, 1)  # returns when the parent closes its end, or dies
                os._exit(0)
            children.append(child)
        return f"{limit} processes"
    except OSError as error:
        raise Stopped(f"{errno.errorcode.get(error.errno or 0)} after {len(children)} processes") from None
    finally:
        os.close(writer)
        os.close(reader)
        for child in children:
            os.waitpid(child, 0)


def fill_disk(path: str, limit: int) -> str:
    """Write so many bytes, or as many as the wall allows; the file is removed afterwards."""
    written, block = 0, b"x" * MIB
    try:
        with open(path, "wb", buffering=0) as file:
            while written < limit:
                written += file.write(block)
        return f"{written // MIB} MiB"
    except OSError as error:
        raise Stopped(f"{errno.errorcode.get(error.errno or 0)} after {written // MIB} MiB") from None
    finally:
        os.unlink(path)


def memory(limit: int) -> None:
    """Take so many bytes, touching each page; says how far it came before it is killed."""
    held = []
    while len(held) * 8 * MIB < limit:
        held.append(bytearray(os.urandom(1)) * (8 * MIB))
        print(f"holding {len(held) * 8} MiB", flush=True)
    time.sleep(2)  # a host that has to look from outside gets its look
    print(f"SUCCEEDED: {limit // MIB} MiB")


def attack(config_path: str, out: str) -> None:
    """Try everything; write what came of each."""
    with open(config_path, encoding="utf-8") as file:
        config = json.load(file)
    loopback = ("127.0.0.1", config["port"])
    attempts = {
        "read a secret of the host": lambda: read_file(config["secret"]),
        "… through /proc and a symlink": lambda: through_links(config["secret"]),
        "read a file that everybody may read": lambda: read_file(config["neighbour"]),
        "read the host's password hashes": lambda: read_file("/etc/shadow"),
        "find and kill a process of the host": lambda: find_process(config["marker"]),
        "connect to a server on the host": lambda: connect(socket.AF_INET, socket.SOCK_STREAM, loopback),
        "… by its abstract unix socket": lambda: connect(
            socket.AF_UNIX, socket.SOCK_STREAM, "\0" + config["abstract"]
        ),
        "reach the metadata service": lambda: connect(
            socket.AF_INET, socket.SOCK_DGRAM, ("169.254.169.254", 80)
        ),
        "reach the internet": lambda: connect(socket.AF_INET, socket.SOCK_DGRAM, ("192.0.2.1", 53)),
        "open a raw socket": lambda: connect(socket.AF_INET, socket.SOCK_RAW, ("127.0.0.1", 0)),
        "mount a file system": mount,
        "make a user namespace": lambda: call("unshare", 0x10000000),
        "become root": become_root,
        "plant a program in /usr/bin": lambda: write_file(config["plant"], "#!/bin/sh\n"),
        "change a kernel setting": lambda: write_file("/proc/sys/kernel/core_pattern", "|/tmp/x"),
        "open the disk of the host": lambda: read_file("/dev/sda"),
        "read the kernel's memory": lambda: read_file("/dev/mem"),
        "load BPF": lambda: call("bpf", 0, 0, 0),
        "profile the kernel": lambda: call("perf_event_open", 0, 0, -1, -1, 0),
        "use io_uring": lambda: call("io_uring_setup", 0, 0),
        "read the kernel's keyrings": lambda: call("keyctl", 0, -3, 1),
        "load a kernel module": lambda: call("init_module", 0, 0, 0),
        "fork bomb": lambda: fork_bomb(config["forks"]),
        "fill the disk": lambda: fill_disk(os.path.join(out, "fill"), config["fill"]),
    }
    os.makedirs(out, exist_ok=True)
    results = []
    for name, attempt in attempts.items():
        if config.get("only") and name not in config["only"]:
            continue
        started = time.monotonic()
        result: dict[str, object] = {"attempt": name, "succeeded": False, "errno": None}
        try:
            result["detail"] = attempt()
            result["succeeded"] = True
        except Stopped as stopped:
            result["detail"] = str(stopped)
        except OSError as error:
            result["errno"] = errno.errorcode.get(error.errno or 0, str(error.errno))
            result["detail"] = error.strerror or str(error)
        result["seconds"] = round(time.monotonic() - started, 4)
        results.append(result)
    with open(os.path.join(out, "attempts.json"), "w", encoding="utf-8") as file:
        json.dump(results, file, indent=1)
    print(f"tried {len(results)} ways out, {sum(bool(r['succeeded']) for r in results)} succeeded")


def main(arguments: list[str]) -> int:
    """Dispatch by the first argument."""
    if len(arguments) == 3 and arguments[0] == "work":
        work(arguments[1], arguments[2])
    elif len(arguments) == 3 and arguments[0] == "attack":
        attack(arguments[1], arguments[2])
    elif len(arguments) == 4 and arguments[0] == "both":
        work(arguments[1], arguments[3])
        attack(arguments[2], arguments[3])
    elif len(arguments) == 2 and arguments[0] == "memory":
        memory(int(arguments[1]))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
