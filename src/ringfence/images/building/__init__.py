"""Building a template from a definition: what needs no sandbox.

Belongs here: reading the definition, working out its steps, the files of the context, layers as archives, the
records of what was built before. Does not: running a step (``ringfence.node.building``), printing.
"""
