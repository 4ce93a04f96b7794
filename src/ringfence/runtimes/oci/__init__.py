"""What the OCI runtimes (runc, crun, runsc) have in common.

Belongs here: the bundle's ``config.json`` made from a :class:`StartSpec`, and running such a program behind
our launcher. Does not belong here: anything that only one of them knows.
"""
