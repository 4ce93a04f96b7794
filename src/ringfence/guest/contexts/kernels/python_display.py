"""What objects look like: the second half of the Python kernel, compiled when it is first needed."""
# mypy: ignore-errors

import base64
import json

MOST_TEXT = 4 * 1024 * 1024  # characters of one representation
MOST_ROWS = 1000  # of a data frame, as data
MOST_POINTS = 10000  # of a chart, as data
MIMES = (
    ("html", "text/html", "_repr_html_"),
    ("markdown", "text/markdown", "_repr_markdown_"),
    ("svg", "image/svg+xml", "_repr_svg_"),
    ("png", "image/png", "_repr_png_"),
    ("jpeg", "image/jpeg", "_repr_jpeg_"),
    ("pdf", "application/pdf", "_repr_pdf_"),
    ("latex", "text/latex", "_repr_latex_"),
    ("json", "application/json", "_repr_json_"),
    ("javascript", "application/javascript", "_repr_javascript_"),
)
BINARY = ("png", "jpeg", "pdf")


def plain(value, depth=0):
    """The nearest that JSON can say."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return value if -(2**53) <= value <= 2**53 else str(value)
    if isinstance(value, float):
        return value if value == value and value not in (float("inf"), float("-inf")) else None
    if depth > 20:
        return repr(value)[:1000]
    if isinstance(value, dict):
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item, depth + 1) for item in value]
    try:
        if (value != value) is True:  # not a time, as not a number
            return None
    except Exception:
        pass
    for name in ("isoformat", "tolist", "item"):
        method = getattr(value, name, None)
        if callable(method) and not isinstance(value, type):
            try:
                return plain(method(), depth + 1)
            except Exception:
                continue
    return str(value)[:1000]


def represent(value):
    """All representations that an object offers, by the result's field names."""
    shown = {}
    bundle = None
    if not isinstance(value, type):
        bundle = _try(value, "_repr_mimebundle_")
    if isinstance(bundle, tuple):
        bundle = bundle[0] if bundle else None
    bundle = bundle if isinstance(bundle, dict) else {}
    extra = {}
    for mime, item in bundle.items():
        if mime not in {known for _, known, _ in MIMES} and mime != "text/plain":
            extra[str(mime)] = plain(item)
    for name, mime, method in MIMES:
        item = bundle.get(mime)
        if item is None and not isinstance(value, type):
            item = _try(value, method)
        if isinstance(item, tuple):  # (data, metadata)
            item = item[0] if item else None
        if item is None:
            continue
        if isinstance(item, (bytes, bytearray)):
            item = base64.b64encode(item).decode() if name in BINARY else item.decode("utf-8", "replace")
        if name == "json":
            item = plain(item)
        elif not isinstance(item, str):
            continue
        shown[name] = item
    if extra:
        shown["extra"] = extra
    text = bundle.get("text/plain")
    shown["text"] = text if isinstance(text, str) else repr(value)
    for special in (_frame, _figure):
        try:
            shown.update(special(value))
        except Exception:
            continue
    if isinstance(value, (dict, list)) and "json" not in shown:
        try:
            text = json.dumps(value, allow_nan=False)
            if len(text) <= MOST_TEXT:
                shown["json"] = json.loads(text)
        except Exception:
            pass
    return {name: _cut(item) for name, item in shown.items()}


def _cut(item):
    if isinstance(item, str) and len(item) > MOST_TEXT:
        return item[:MOST_TEXT] + "\u2026 (%d characters more)" % (len(item) - MOST_TEXT)
    return item


def _try(value, name):
    """What a method of the display protocol returns; ``None`` if there is none, or it fails."""
    try:
        method = getattr(value, name, None)
        # Objects that answer to every name are no witnesses.
        if method is None or not callable(method) or hasattr(value, "_ringfence_no_such_method_"):
            return None
        return method()
    except Exception:
        return None


def _frame(value):
    """Rows of a data frame as columns."""
    kind = type(value)
    if kind.__module__.split(".")[0] == "pandas" and kind.__name__ in ("DataFrame", "Series"):
        frame = value if kind.__name__ == "DataFrame" else value.to_frame()
        head = frame.head(MOST_ROWS)
        data = {
            str(name): [plain(item) for item in head.iloc[:, at].tolist()]
            for at, name in enumerate(head.columns)
        }
        return {"data": data, "rows": len(frame)}
    if kind.__module__.split(".")[0] == "polars" and kind.__name__ == "DataFrame":
        head = value.head(MOST_ROWS)
        return {"data": plain(head.to_dict(as_series=False)), "rows": len(value)}
    return {}


def _figure(value):
    """A Matplotlib figure as PNG, and what its axes show as data."""
    kind = type(value)
    if not (
        kind.__module__.startswith("matplotlib.") and hasattr(value, "savefig") and hasattr(value, "axes")
    ):
        return {}
    import io

    image = io.BytesIO()
    value.savefig(image, format="png", bbox_inches="tight")
    shown = {"png": base64.b64encode(image.getvalue()).decode()}
    try:
        charts = [chart for chart in (_chart(axes) for axes in value.axes) if chart is not None]
    except Exception:
        charts = []
    if len(charts) == 1:
        shown["chart"] = charts[0]
    elif charts:
        title = value._suptitle.get_text() if getattr(value, "_suptitle", None) is not None else None
        shown["chart"] = {"type": "superchart", "title": title, "elements": charts}
    return shown


def _unit(label):
    """The unit in ``speed (m/s)``."""
    start, end = label.rfind("("), label.rfind(")")
    return label[start + 1 : end] if 0 <= start < end else None


def _axis(axes, name):
    axis = getattr(axes, name + "axis")
    label = getattr(axes, "get_%slabel" % name)() or None
    return {
        name + "_label": label,
        name + "_unit": _unit(label) if label else None,
        name + "_ticks": plain(list(getattr(axes, "get_%sticks" % name)())),
        name + "_tick_labels": [tick.get_text() for tick in getattr(axes, "get_%sticklabels" % name)()],
        name + "_scale": "datetime"
        if "dates" in type(axis.get_converter()).__module__
        else axis.get_scale()
        if hasattr(axis, "get_converter")
        else axis.get_scale(),
    }


def _points(pairs):
    return [[plain(a), plain(b)] for a, b in list(pairs)[:MOST_POINTS]]


def _chart(axes):
    """One pair of axes: line, scatter, bar, pie or box_and_whisker, else unknown."""
    chart = {"type": "unknown", "title": axes.get_title() or None, "elements": []}
    wedges = [patch for patch in axes.patches if type(patch).__name__ == "Wedge"]
    if wedges:
        texts = [text.get_text() for text in axes.texts]
        step = max(1, len(texts) // len(wedges))
        chart["type"] = "pie"
        for at, wedge in enumerate(wedges):
            label = wedge.get_label()
            if not label or label.startswith("_"):
                label = texts[at * step] if at * step < len(texts) else ""
            angle = abs(wedge.theta2 - wedge.theta1)
            chart["elements"].append({"label": label, "angle": plain(angle), "radius": plain(wedge.r)})
        return chart
    for name in ("x", "y"):
        chart.update(_axis(axes, name))
    if _boxes(axes, chart) or _bars(axes, chart):
        return chart
    for at, line in enumerate(axes.lines):
        label = line.get_label()
        label = "Line %d" % at if label.startswith("_") else label
        points = _points(zip(line.get_xdata(), line.get_ydata()))
        chart["elements"].append({"label": label, "points": points})
    if chart["elements"]:
        chart["type"] = "line"
        return chart
    for at, dots in enumerate(axes.collections):
        if type(dots).__name__ != "PathCollection":
            continue
        label = dots.get_label()
        label = "Dataset %d" % at if label.startswith("_") else label
        chart["elements"].append({"label": label, "points": _points(dots.get_offsets().tolist())})
    if chart["elements"]:
        chart["type"] = "scatter"
        return chart
    return chart if axes.has_data() else None


def _bars(axes, chart):
    for container in axes.containers:
        if type(container).__name__ != "BarContainer":
            continue
        group = container.get_label()
        group = "" if group.startswith("_") else group
        upright = getattr(container, "orientation", "vertical") != "horizontal"
        ticks = {
            round(float(at), 6): text
            for at, text in zip(
                chart["x_ticks" if upright else "y_ticks"],
                chart["x_tick_labels" if upright else "y_tick_labels"],
            )
        }
        for bar in list(container.patches)[:MOST_POINTS]:
            middle = bar.get_x() + bar.get_width() / 2 if upright else bar.get_y() + bar.get_height() / 2
            label = ticks.get(round(float(middle), 6)) or str(plain(middle))
            value = bar.get_height() if upright else bar.get_width()
            chart["elements"].append({"label": label, "group": group, "value": plain(value)})
    if chart["elements"]:
        chart["type"] = "bar"
    return bool(chart["elements"])


def _boxes(axes, chart):
    """A box plot is five lines (or a patch and four) a box: box, two whiskers, two caps, median, fliers."""
    patches = [patch for patch in axes.patches if type(patch).__name__ == "PathPatch"]
    lines = list(axes.lines)
    closed = [line for line in lines if len(line.get_xdata()) == 5]
    boxes = [patch.get_path().vertices.tolist()[:5] for patch in patches] or [
        list(zip(line.get_xdata(), line.get_ydata())) for line in closed
    ]
    medians = [line for line in lines if len(line.get_xdata()) == 2]
    if not boxes or len(medians) < 5 * len(boxes):
        return False
    labels = chart["x_tick_labels"]
    for at, box in enumerate(boxes):
        xs, ys = [float(x) for x, _ in box], [float(y) for _, y in box]
        left, right, low, high = min(xs), max(xs), min(ys), max(ys)
        middle = (left + right) / 2
        ends, median, outliers = [low, high], None, []
        for line in lines:
            lx, ly = [float(v) for v in line.get_xdata()], [float(v) for v in line.get_ydata()]
            if (
                not lx
                or abs(sum(lx) / len(lx) - middle) > (right - left) / 2
                or (len(lx) == 5 and line in closed)
            ):
                continue
            marker = line.get_marker() not in (None, "None", "", " ")
            if marker:
                outliers += ly
            elif len(lx) == 2 and lx[0] == lx[1]:
                ends += ly
            elif len(lx) == 2 and abs(lx[0] - left) < 1e-9 and ly[0] == ly[1] and low <= ly[0] <= high:
                median = ly[0]
        chart["elements"].append(
            {
                "label": labels[at] if at < len(labels) else str(at + 1),
                "min": plain(min(ends)),
                "first_quartile": plain(low),
                "median": plain(median),
                "third_quartile": plain(high),
                "max": plain(max(ends)),
                "outliers": plain(outliers[:MOST_POINTS]),
            }
        )
    chart["type"] = "box_and_whisker"
    return True
