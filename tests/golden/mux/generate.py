"""Write the mux's transcripts anew: ``python tests/golden/mux/generate.py``. No end of the mux is asked.

Each line has ``from`` (``host`` or ``guest``), ``frame`` (hex, with ``{name:size}`` as in the transcripts of
links) and ``note``; or ``caller`` (a number) and ``does`` (``dials``, ``says``, ``hears``, ``ends``,
``is closed``) with ``bytes``: what a program at the socket does, for a replay against ``ringfence-link``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.append(str(FOLDER))

import muxing  # noqa: E402

NONCES = {"nonce": bytes(range(64, 80)), "second": bytes(range(80, 96))}
# A link's HELLO and PING, and the agent's answers: the first lines of ../link/ping.jsonl.
HELLO = (FOLDER.parent / "link" / "ping.jsonl").read_text().splitlines()
ASKED, ANSWERED = (json.loads(line)["frame"] for line in HELLO[:2])
PING, PONG = (json.loads(line)["frame"] for line in HELLO[2:4])

Line = dict[str, object]


def said(side: str, note: str, data: bytes | str) -> Line:
    """One frame; a nonce in it becomes a placeholder."""
    text = data.hex() if isinstance(data, bytes) else data
    for name, nonce in NONCES.items():
        text = text.replace(nonce.hex(), f"{{{name}:16}}")
    return {"from": side, "note": note, "frame": text}


def record(side: str, kind: int, nonce: str) -> Line:
    """RESET or READY."""
    return said(side, muxing.NAMES[kind], muxing.record(kind, NONCES[nonce]))


def carried(side: str, link: int, inner: str, note: str) -> Line:
    """DATA with what a link's transcript has, placeholders and all."""
    size = 0
    for index, part in enumerate(inner.replace("}", "{").split("{")):
        size += int(part.partition(":")[2]) if index % 2 else len(part) // 2
    head = muxing.frame(muxing.DATA, link, size=size)[: -len(muxing.SEAL)]
    return said(side, f"DATA {note}", head.hex() + inner + muxing.SEAL.hex())


def plain(side: str, kind: int, link: int, payload: bytes = b"", note: str = "") -> Line:
    """Any other frame."""
    return said(side, note or muxing.NAMES[kind], muxing.frame(kind, link, payload))


def call(number: int, does: str, data: str = "") -> Line:
    """What a caller does."""
    return {"caller": number, "does": does, "bytes": data}


def beginning(nonce: str = "nonce") -> list[Line]:
    """Both records."""
    return [record("host", muxing.RESET, nonce), record("guest", muxing.READY, nonce)]


def greeted(caller: int, link: int) -> list[Line]:
    """A link that has said HELLO."""
    return [
        call(caller, "dials"),
        plain("host", muxing.OPEN, link),
        call(caller, "says", ASKED),
        carried("host", link, ASKED, "HELLO of a link"),
        carried("guest", link, ANSWERED, "its answer"),
        call(caller, "hears", ANSWERED),
    ]


def pinged(caller: int, link: int) -> list[Line]:
    """PING and PONG on a link."""
    return [
        call(caller, "says", PING),
        carried("host", link, PING, "PING of a link"),
        carried("guest", link, PONG, "PONG"),
        call(caller, "hears", PONG),
    ]


def closed(caller: int, link: int) -> list[Line]:
    """A link that its caller ends."""
    return [call(caller, "ends"), plain("host", muxing.CLOSE, link), plain("guest", muxing.CLOSE, link)]


SCENES: dict[str, list[Line]] = {
    "links": [
        *beginning(),
        *greeted(1, 1),
        *greeted(2, 2),
        *pinged(1, 1),
        *pinged(2, 2),
        *closed(1, 1),
        *pinged(2, 2),
        *greeted(3, 3),
        *pinged(3, 3),
        *closed(2, 2),
        *closed(3, 3),
    ],
    "closed_by_the_guest": [
        *beginning(),
        call(1, "dials"),
        plain("host", muxing.OPEN, 1),
        call(1, "says", "00" * 12),
        carried("host", 1, "00" * 12, "no frame of a link"),
        plain("guest", muxing.CLOSE, 1, note="CLOSE: the agent has ended the link"),
        call(1, "is closed"),
        plain("host", muxing.CLOSE, 1),
        *greeted(2, 2),
    ],
    "anew": [
        *beginning(),
        *greeted(1, 1),
        said("host", "65,536 zero bytes: another host process has begun", "{pad:65536}"),
        record("host", muxing.RESET, "second"),
        record("guest", muxing.READY, "second"),
        *greeted(2, 1),
        *pinged(2, 1),
    ],
}


def main() -> None:
    """Write them all."""
    for name, lines in SCENES.items():
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
