"""Runtimes: the contract, the guarding wrapper, and one module a technology.

Belongs here: starting, stopping, measuring and re-adopting walls. Does not belong here: what users do
inside (that is spoken over links, ``ringfence.guest``), where a sandbox runs, who owns it, and the
preparation of root file systems and cgroups (``ringfence.node`` hands them over ready made).
"""
