"""``ringfence job`` and ``ringfence volume`` against a service."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.serving import Serving, eventually

Ringfence = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture
def ringfence(service: Serving, tmp_path: Path) -> Ringfence:
    def run(*words: str, code: int = 0, **more: Any) -> subprocess.CompletedProcess[bytes]:
        env = os.environ | {
            "RINGFENCE_URL": service.url, "RINGFENCE_API_KEY": service.key, "RINGFENCE_HOME": str(tmp_path),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "ringfence", *words],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            timeout=120,
            **more,
        )
        assert done.returncode == code, (words, done)
        return done

    return run


def ended(ringfence: Ringfence, job: str) -> dict[str, Any] | None:
    """How it ended: its log may be read to the end before that is written down."""
    told = dict(json.loads(ringfence("job", "show", "--json", job).stdout))
    return None if told["state"] in ("queued", "running") else told


SMALL = ("--runtime", "jail", "--memory", "128M", "--disk", "16M")


def test_a_job_from_run_to_rm(ringfence: Ringfence, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("from here\n")
    job = ringfence(
        "job", "run", *SMALL, "--file", "in.txt:data/in", "--output", "out", "--env", "A=b",
        "--label", "cli=one",
        "--", "sh", "-c", "cat data/in; echo $A > out; echo err >&2",
    ).stdout.decode().strip()  # fmt: skip
    assert ringfence("job", "logs", "-f", job).stdout.splitlines() in (
        [b"from here", b"err"],
        [b"err", b"from here"],
    )
    assert ringfence("job", "logs", "--stream", "stderr", job).stdout == b"err\n"
    told = eventually(lambda: ended(ringfence, job), "it ends")
    assert told["state"] == "succeeded"
    ringfence("job", "run", *SMALL, "-f", "--", "true")
    assert job in ringfence("job", "ls", "--label", "cli=one").stdout.decode()
    assert b"succeeded" in ringfence("job", "show", job).stdout
    ringfence("job", "outputs", job, "--into", "got")
    assert (tmp_path / "got" / "out").read_text() == "b\n"
    assert b"exists" in ringfence("job", "outputs", job, "--into", "got", code=125).stderr
    ringfence("job", "rm", job)
    assert b"no job" in ringfence("job", "show", job, code=125).stderr.lower()


def test_follow_ends_with_the_commands_code(ringfence: Ringfence) -> None:
    done = ringfence("job", "run", *SMALL, "-f", "--", "sh", "-c", "echo out; exit 7", code=7)
    assert done.stdout == b"out\n" and b"exit code 7" in done.stderr


def test_cancel_and_retry(ringfence: Ringfence) -> None:
    job = ringfence("job", "run", *SMALL, "--", "sleep", "600").stdout.decode().strip()
    ringfence("job", "cancel", job)
    ringfence("job", "logs", "-f", job)
    assert json.loads(ringfence("job", "show", job, "--json").stdout)["state"] == "cancelled"
    assert b"again" in ringfence("job", "retry", job).stdout
    ringfence("job", "cancel", job)
    ringfence("job", "logs", "-f", job)


def test_bad_words(ringfence: Ringfence) -> None:
    for words, said in (
        (("job", "run"), b"no command"),
        (("job", "run", "--file", "none", "--", "true"), b"LOCAL:INSIDE"),
        (("job", "run", "--file", "none:x", "--", "true"), b"No such file"),
        (("job", "run", "--deadline", "soon", "--", "true"), b"duration"),
        (("job", "run", "--fetch", "http://example.test/=x", "--", "true"), b"egress"),
        (("job", "logs", "job-00000000000000000000"), b"job"),
        (("volume", "show", "none"), b"no volume"),
        (("volume", "create", "a/b"), b"name"),
    ):
        assert said in ringfence(*words, code=125).stderr, words


@pytest.mark.skipif(os.geteuid() != 0, reason="volumes need a node that runs as root")
def test_volumes(ringfence: Ringfence, tmp_path: Path) -> None:
    ringfence("volume", "create", "cli", "--quota", "16MiB")
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        entry = tarfile.TarInfo("f")
        entry.size = 3
        tar.addfile(entry, io.BytesIO(b"abc"))
    ringfence("volume", "import", "cli", input=data.getvalue())
    assert b"cli" in ringfence("volume", "ls").stdout
    job = (
        "job",
        "run",
        *SMALL,
        "-f",
        "--volume",
        "cli:/v:rw",
        "--",
        "sh",
        "-c",
        "cat /v/f; echo more > /v/g",
    )
    assert ringfence(*job).stdout == b"abc"
    ringfence("volume", "export", "cli", "-o", "out.tar")
    with tarfile.open(tmp_path / "out.tar") as tar:
        assert {name.removeprefix("./") for name in tar.getnames()} >= {"f", "g"}
    assert b"16" in ringfence("volume", "show", "cli").stdout
    ringfence("volume", "rm", "cli")
    assert b"there are no volumes" in ringfence("volume", "ls").stdout
