"""Hypothesis for busy machines: no deadlines, no complaint about slow data, nothing written to disk."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
settings.load_profile("busy")
