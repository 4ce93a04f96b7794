"""What Firecracker's published API description (src/firecracker/swagger/firecracker.yaml, version 1.17.0-dev,
as of 2026) says of the requests that Ringfence makes: names, types and limits of their fields, nothing else.

``True`` in place of a list of values stands for any. Standard library only: the scripted server loads it.
"""

from __future__ import annotations

import re
from typing import Any

STRING, BOOLEAN = {"type": "string"}, {"type": "boolean"}
INTEGER = {"type": "integer"}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": values}


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


TOKEN_BUCKET = _object(("refill_time", "size"), one_time_burst=INTEGER, refill_time=INTEGER, size=INTEGER)
RATE_LIMITER = _object(bandwidth=TOKEN_BUCKET, ops=TOKEN_BUCKET)

DEFINITIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("PUT", r"/actions"): _object(
        ("action_type",), action_type=_one_of("FlushMetrics", "InstanceStart", "SendCtrlAltDel")
    ),
    ("PUT", r"/boot-source"): _object(
        ("kernel_image_path",), boot_args=STRING, initrd_path=STRING, kernel_image_path=STRING
    ),
    ("PUT", r"/drives/(?P<drive_id>\w+)"): _object(
        ("drive_id", "is_root_device"),
        drive_id=STRING,
        partuuid=STRING,
        is_root_device=BOOLEAN,
        cache_type=_one_of("Unsafe", "Writeback"),
        is_read_only=BOOLEAN,
        path_on_host=STRING,
        rate_limiter=RATE_LIMITER,
        io_engine=_one_of("Sync", "Async"),
        socket=STRING,
    ),
    ("PUT", r"/entropy"): _object(rate_limiter=RATE_LIMITER),
    ("PUT", r"/logger"): _object(
        level=_one_of("Error", "Warning", "Info", "Debug", "Trace", "Off"),
        log_path=STRING,
        show_level=BOOLEAN,
        show_log_origin=BOOLEAN,
        module=STRING,
    ),
    ("PUT", r"/machine-config"): _object(
        ("mem_size_mib", "vcpu_count"),
        cpu_template=_one_of("C3", "T2", "T2S", "T2CL", "T2A", "V1N1", "None"),
        smt=BOOLEAN,
        mem_size_mib=INTEGER,
        track_dirty_pages=BOOLEAN,
        vcpu_count={"type": "integer", "minimum": 1, "maximum": 32},
        huge_pages=_one_of("None", "Transparent", "2M"),
    ),
    ("PUT", r"/snapshot/create"): _object(
        ("mem_file_path", "snapshot_path"),
        mem_file_path=STRING,
        snapshot_path=STRING,
        snapshot_type=_one_of("Full", "Diff"),
    ),
    ("PUT", r"/snapshot/load"): _object(
        ("snapshot_path",),
        track_dirty_pages=BOOLEAN,
        mem_file_path=STRING,
        mem_backend=_object(
            ("backend_type", "backend_path"), backend_type=_one_of("File", "Uffd"), backend_path=STRING
        ),
        snapshot_path=STRING,
        resume_vm=BOOLEAN,
        clock_realtime=BOOLEAN,
    ),
    ("PATCH", r"/vm"): _object(("state",), state=_one_of("Paused", "Resumed")),
    ("PUT", r"/vsock"): _object(
        ("guest_cid", "uds_path"),
        guest_cid={"type": "integer", "minimum": 3},
        uds_path=STRING,
        vsock_id=STRING,
    ),
}
_TYPES = {"string": str, "boolean": bool, "integer": int, "object": dict}


def problem(method: str, path: str, body: Any) -> str:
    """What is wrong with a request, as a sentence; empty if it is as described."""
    for (wanted, pattern), definition in DEFINITIONS.items():
        match = re.fullmatch(pattern, path)
        if wanted == method and match:
            named = {key: value for key, value in match.groupdict().items() if body.get(key) != value}
            return f"{named} differ in path and body" if named else _check(definition, body, path)
    return f"there is no {method} {path}"


def _check(definition: dict[str, Any], value: Any, where: str) -> str:
    kind = _TYPES[definition["type"]]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return f"{where} is no {definition['type']}"
    if "enum" in definition and value not in definition["enum"]:
        return f"{where} is none of {definition['enum']}"
    if (
        not definition.get("minimum", value) <= value <= definition.get("maximum", value)
        if kind is int
        else False
    ):
        return f"{where} is out of range"
    if kind is dict:
        for key in definition["required"]:
            if key not in value:
                return f"{where} lacks {key}"
        for key, part in value.items():
            if key not in definition["properties"]:
                return f"{where} has an unknown field {key}"
            if found := _check(definition["properties"][key], part, f"{where}.{key}"):
                return found
    return ""
