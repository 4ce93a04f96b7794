"""Where this folder's tests find what they share."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent / "agent"), str(HERE.parents[1] / "golden" / "mux")]
