"""Fixtures for every kind of test; pytest puts this folder on the path, hence ``support``."""

from __future__ import annotations

from support.leaks import no_leaks

__all__ = ["no_leaks"]
