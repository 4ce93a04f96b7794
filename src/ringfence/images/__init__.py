"""Templates: immutable root file systems by digest, made of layers that are shared and never copied.

Belongs here: the store of layers and templates, the sources they come from, unpacking hostile archives,
looking into a template without mounting it, garbage collection. Does not: mounting (the drivers'), what a
sandbox needs on top of a template (``ringfence.node.fittings``), printing.
"""
