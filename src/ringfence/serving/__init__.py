"""Puts the parts of a service together: store, placement, control, egress, API; starts and ends their
processes.

Belongs here: configuration, process supervision, dropping privileges, first-start keys. Does not belong here:
anything that one of the parts can decide by itself.
"""
