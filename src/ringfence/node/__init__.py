"""The node service: the part that touches the operating system, and the only part that may need root.

Belongs here: the state root and its journals, root file systems, cgroups, host user ids, disks, the
limits and deadlines that hold a sandbox, the causes of its end, file changes, and what is left of dead
owners. Does not belong here: how a wall is built (``ringfence.runtimes``), the link protocol
(``ringfence.guest``), policy files, who owns a sandbox beyond writing it down, printing.

``service.Node`` is the way in; ``sandboxes.NodeSandbox`` is what it hands out.
"""
