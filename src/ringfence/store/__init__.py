"""The state store: the truth of who owns what, and of every deadline.

Belongs here: the contract, its SQLite and PostgreSQL implementations, named SQL, migrations. Does not belong
here: what a row of a kind means (``ringfence.control``), what exists on a machine (the node's journal).
"""
