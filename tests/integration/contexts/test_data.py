"""Data frames and charts, with the real pandas and Matplotlib of the tests' own environment shown inside."""

from __future__ import annotations

import base64
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ringfence.guest.contexts import Contexts, Result
from ringfence.model.policy import MIB, Filesystem, Mount
from ringfence.node.service import Node
from support.leaks import Leaks
from support.nodes import ask

INSIDE = "/workspace/packages"


@pytest.fixture
async def contexts(no_leaks: Leaks, template: Path) -> AsyncIterator[Contexts]:
    packages = Path(sysconfig.get_path("purelib"))
    if not (packages / "pandas").is_dir() or not (packages / "matplotlib").is_dir():
        pytest.skip("pandas and Matplotlib are not in the tests' environment")
    system = subprocess.run(
        ["/usr/bin/python3", "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True
    )
    if system.stdout.split() != [str(part) for part in sys.version_info[:2]]:
        pytest.skip("the host's /usr/bin/python3 is of another version than the tests' packages")
    subprocess.run(["cp", "-al", str(template), f"{no_leaks.home}/templates"], check=True)
    node = await Node.open()
    try:
        files = Filesystem(mounts=(Mount(str(packages), INSIDE),))
        sandbox = await node.create(ask(memory=1024 * MIB, timeout=600, files=files))
        async with await sandbox.new_link() as link:
            contexts = Contexts(link)
            await contexts.create(id="d", env={"PYTHONPATH": INSIDE, "MPLCONFIGDIR": "/tmp/mpl"})
            yield contexts
    finally:
        await node.close()


async def run(contexts: Contexts, code: str) -> tuple[Result, ...]:
    ran = await contexts.run("d", code, timeout=120)
    assert ran.error is None, ran.error
    return ran.results


async def test_a_data_frame_is_text_html_and_columns(contexts: Contexts) -> None:
    code = (
        "import pandas as pd\ntimes = pd.to_datetime(['2026-01-02', None])\n"
        "f = pd.DataFrame({'n': [1, 2], 'x': [0.5, float('nan')], 't': times})\n"
        "f"
    )
    (frame,) = await run(contexts, code)
    assert frame.main and "<table" in (frame.html or "") and "0.5" in (frame.text or "")
    assert (
        frame.data == {"n": [1, 2], "x": [0.5, None], "t": ["2026-01-02T00:00:00", None]} and frame.rows == 2
    )
    (series,) = await run(contexts, "f['n']")
    assert series.data == {"n": [1, 2]}
    (long,) = await run(contexts, "pd.DataFrame({'n': range(5000)})")
    assert long.rows == 5000 and long.data is not None and len(long.data["n"]) == 1000
    (double,) = await run(contexts, "pd.DataFrame([[1, 2]], columns=['a', 'a'])")
    assert double.rows == 1


async def test_charts_are_png_and_data(contexts: Contexts) -> None:
    code = (
        "import matplotlib.pyplot as plt\n"
        "plt.plot([1, 2, 3], [4, 5, 6], label='up')\nplt.title('T'); plt.xlabel('time (s)')\n"
        "plt.show()\nprint(len(plt.get_fignums()))"
    )
    ran = await contexts.run("d", code, timeout=120)
    assert ran.stdout == "0\n" and ran.stderr == "", ran
    (line,) = ran.results
    assert base64.b64decode(line.png or "").startswith(b"\x89PNG")
    assert line.chart is not None and line.chart["type"] == "line"
    assert (line.chart["title"], line.chart["x_label"], line.chart["x_unit"]) == ("T", "time (s)", "s")
    assert line.chart["elements"] == [{"label": "up", "points": [[1, 4], [2, 5], [3, 6]]}]

    (bars,) = await run(contexts, "plt.bar(['a', 'b'], [3, 7], label='g');")
    assert bars.chart is not None and bars.chart["type"] == "bar"
    assert bars.chart["elements"] == [
        {"label": "a", "group": "g", "value": 3},
        {"label": "b", "group": "g", "value": 7},
    ]
    (dots,) = await run(contexts, "fig, ax = plt.subplots()\nax.scatter([1, 2], [3, 4], label='s')\nfig")
    assert dots.main and dots.chart is not None and dots.chart["type"] == "scatter"
    assert dots.chart["elements"] == [{"label": "s", "points": [[1.0, 3.0], [2.0, 4.0]]}]
    (pie,) = await run(contexts, "plt.pie([1, 3], labels=['q', 'r']);")
    assert pie.chart is not None and pie.chart["type"] == "pie"
    assert [(e["label"], round(e["angle"])) for e in pie.chart["elements"]] == [("q", 90), ("r", 270)]
    (box,) = await run(contexts, "plt.boxplot([[1, 2, 3, 4, 100], [1, 1, 1]]);")
    assert box.chart is not None and box.chart["type"] == "box_and_whisker", box.chart
    first = box.chart["elements"][0]
    assert (first["first_quartile"], first["median"], first["third_quartile"]) == (2, 3, 4)
    assert (first["min"], first["max"], first["outliers"]) == (1, 4, [100])
    (both,) = await run(contexts, "f, (a, b) = plt.subplots(1, 2)\na.plot([1, 2]); b.bar([1], [2]);")
    assert both.chart is not None and both.chart["type"] == "superchart"
    assert [chart["type"] for chart in both.chart["elements"]] == ["line", "bar"]
    (times,) = await run(
        contexts,
        "import datetime as dt\nplt.plot([dt.datetime(2026, 1, d) for d in (1, 2)], [1, 2]);",
    )
    assert times.chart is not None and times.chart["elements"][0]["points"][0] == ["2026-01-01T00:00:00", 1]
    (picture,) = await run(contexts, "plt.imshow([[1, 2], [3, 4]]);")
    assert picture.png and picture.chart is not None and picture.chart["type"] == "unknown"


async def test_a_chart_that_lies_costs_nothing_but_itself(contexts: Contexts) -> None:
    code = (
        "import matplotlib.figure\n"
        "class Evil(matplotlib.figure.Figure):\n"
        "    def savefig(self, *a, **k): raise ValueError('no')\n"
        "    def __repr__(self): return 'evil'\n"
        "Evil.__module__ = 'matplotlib.figure'\nEvil()"
    )
    (result,) = await run(contexts, code)
    assert (result.text, result.png, result.chart) == ("evil", None, None)
