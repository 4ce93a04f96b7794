from __future__ import annotations

from control_world import control, world

__all__ = ["control", "world"]
