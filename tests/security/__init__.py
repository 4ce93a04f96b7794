"""Attacks on every wall, the committed outcomes, and the positive controls."""
