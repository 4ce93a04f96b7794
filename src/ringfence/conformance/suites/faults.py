"""Faults: what a node sees of a driver that misbehaves. Only the fake can be told to."""

from __future__ import annotations

from ringfence.conformance.harness import RuntimeSuite


class FaultSuite(RuntimeSuite):
    """Scripted faults."""
