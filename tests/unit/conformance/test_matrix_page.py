"""scripts/matrix.py: the pages from a run, and the check that finds where they and the tables part."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ringfence.conformance.tables.capabilities import RUNTIMES

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a documentation of its own."""
    spec = importlib.util.spec_from_file_location("matrix_script", ROOT / "scripts" / "matrix.py")
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setattr("sys.path", __import__("sys").path[:])
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    (tmp_path / "docs").mkdir()
    for name, path in {
        "ROOT": "",
        "PAGE": "docs/matrix.md",
        "README": "README.md",
        "FIGURES": "docs/matrix.json",
    }.items():
        setattr(made, name, tmp_path / path)
    monkeypatch.setattr(made, "end_well", lambda: None)  # the signals of a session of tests are its own
    made.README.write_text(f"# before\n{made.BEGIN}{made.END}after\n")
    return made


def entry(name: str, **changes: Any) -> dict[str, Any]:
    """What a run has of one runtime."""
    return {
        "level": "L2", "boundary": "namespaces", "health": "healthy", "version": "1", "reason": "",
        "ran": True,
        "capabilities": json.loads(json.dumps(asdict(RUNTIMES[name]["root"]))), "passed": 9, "failed": 0,
        "areas": {"lifecycle": {"passed": 5}, "files": {"passed": 4, "skipped": 2}},
        "skipped": {"jail has no x": 2}, "xfailed": {}, "failures": [], "trouble": "", "unmeasured": [],
        "probe": {"mount": "held", "trace": "held"}, "cold": {"unit": "ms", "n": 3, "min": 4.0, "p50": 4.62},
        "memory": {"unit": "MB", "n": 3, "value": 0.41},
    } | changes  # fmt: skip


def run(**runtimes: dict[str, Any]) -> dict[str, Any]:
    machine = {"cpus": 2, "memory": 8 << 30, "kernel": "6.1", "python": "3.11.2", "root": True, "load": 0.1}
    return {"machine": machine, "kernel": "6.1", "root": True, "runtimes": runtimes}


def test_pages_hold_what_the_run_printed(matrix: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    gone = entry("gvisor", ran=False, reason="runsc is not installed")
    matrix.FIGURES.write_text(json.dumps(run(jail=entry("jail"), gvisor=gone)))
    assert matrix.main(["--write"]) == 0
    text = matrix.PAGE.read_text()
    (line,) = [each for each in text.splitlines() if each.startswith("| `jail` | L2")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[4:8] == ["4.6 ms", "0.4 MB", "9 of 11", "2 of 2"]
    assert "runsc is not installed" in text
    assert "| files | 4/6 |" in text
    assert "| `jail` | 2 | jail has no x |" in text
    readme = matrix.README.read_text()
    assert readme.startswith("# before\n")
    assert readme.endswith("after\n")
    assert line in readme
    for name in RUNTIMES:
        assert f"`{name}`" in readme
    assert matrix.main(["--check"]) == 0


def test_the_check_finds_an_edited_page_and_another_table(
    matrix: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix.FIGURES.write_text(json.dumps(run(jail=entry("jail"))))
    assert matrix.main(["--write"]) == 0
    matrix.PAGE.write_text(matrix.PAGE.read_text().replace("4.6 ms", "1.6 ms"))
    assert matrix.main(["--check"]) == 1
    assert "docs/matrix.md is not what" in capsys.readouterr().err
    other = entry("jail")
    other["capabilities"]["pause"] = not other["capabilities"]["pause"]
    matrix.FIGURES.write_text(json.dumps(run(jail=other)))
    assert matrix.main(["--write"]) == 1
    assert "other capabilities than the table: pause" in capsys.readouterr().err
    matrix.FIGURES.write_text(json.dumps(run(jail=entry("jail", failed=1, failures=["x"]))))
    assert matrix.main(["--write"]) == 1
    assert "the recorded run failed" in capsys.readouterr().err


def test_a_page_before_any_run_says_so(matrix: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["--write"]) == 0
    assert "Not measured yet" in matrix.PAGE.read_text()
    assert matrix.main(["--check"]) == 0
    assert matrix.main([]) == 2


def suites(name: str, passed: int) -> dict[str, Any]:
    """What ``ringfence conformance --json`` prints, shortened."""
    found = {
        "runtime": name, "level": "L2", "boundary": "namespaces", "health": "healthy", "version": "2",
        "reason": "", "ran": True, "expected": None, "ok": True, "seconds": 1.0,
        "capabilities": json.loads(json.dumps(asdict(RUNTIMES[name]["root"]))), "passed": passed,
        "failed": 0, "areas": {"files": {"passed": passed}}, "skipped": {}, "xfailed": {}, "failures": [],
        "trouble": "",
    }  # fmt: skip
    return {"ok": True, "version": "0", "root": True, "kernel": "6.2", "keyword": None, "runtimes": [found]}


def test_parts_of_a_run_leave_the_others_as_they_are(
    matrix: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix.FIGURES.write_text(json.dumps(run(jail=entry("jail"), runc=entry("runc"))))
    told = []
    for name, passed in (("jail", 11), ("podman", 7)):
        told += ["--suites", str(tmp_path / name)]
        (tmp_path / name).write_text(json.dumps(suites(name, passed)))
    assert matrix.main(["--run", "--parts", "suites", *told, "jail"]) == 0
    kept = json.loads(matrix.FIGURES.read_text())
    assert (kept["kernel"], kept["machine"]["kernel"]) == ("6.2", "6.1")
    jail = kept["runtimes"]["jail"]
    assert (jail["passed"], jail["version"], jail["cold"]["p50"]) == (11, "2", 4.62)
    assert jail["probe"] == {"mount": "held", "trace": "held"}
    assert kept["runtimes"]["runc"] == entry("runc")
    text = matrix.PAGE.read_text()
    (line,) = [each for each in text.splitlines() if each.startswith("| `podman` | L2")]
    assert [cell.strip() for cell in line.strip("|").split("|")][4:8] == ["–", "–", "7 of 7", "–"]
    assert "* `podman`: times and memory; `scripts/matrix.py --run --parts bench podman`." in text
    assert matrix.main(["--check"]) == 0


def test_a_part_that_nobody_knows_is_refused(matrix: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        matrix.main(["--run", "--parts", "suites,prose"])
    assert "prose: known are suites, probe, bench" in capsys.readouterr().err
