from __future__ import annotations

from faults_world import crashes

__all__ = ["crashes"]
