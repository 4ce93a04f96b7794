"""docs/openapi.json from the table of routes; ``--check``: fail if the file says something else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))


def main(arguments: list[str]) -> int:
    from ringfence.api.app import tables
    from ringfence.api.openapi import describe
    from ringfence.api.routing import Dispatcher

    routes = Dispatcher(table.table for table in tables()).routes
    text = json.dumps(describe(routes), indent=1, ensure_ascii=False) + "\n"
    path = ROOT / "docs" / "openapi.json"
    if "--check" not in arguments:
        path.write_text(text)
        return 0
    if not path.exists() or path.read_text() != text:
        print(f"{path.relative_to(ROOT)} is not what the routes say: run scripts/openapi.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
