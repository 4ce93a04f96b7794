"""Attacks by quantity. Every target is small, so that a bomb which works harms nobody."""

from __future__ import annotations

from security.attacks import Attack, Control, row

MIB = 1024**2
# What sandboxes under a bomb get; every target is well above it, and every control's bound above the target.
SMALL = {
    "memory": 64 * MIB,
    "disk": 32 * MIB,
    "max_processes": 64,
    "max_open_files": 256,
    "output": MIB,
}
_MEMORY = Control(limits={"as": 1024 * MIB}, cgroup={"memory": 600 * MIB})
_UNSEEN = "without a cgroup a watchdog looks at resident memory; memory files that nobody maps are not in it"
_NO_INODE_LIMIT = "bubblewrap gives its tmpfs no inode limit, and without a cgroup nothing else bounds them"

BOMBS = [
    Attack(
        "fork-bomb",
        "fork_bomb.c",
        ("300",),
        row("contained:EAGAIN"),
        Control(limits={"nproc": 2000}, cgroup={"pids": 600}),
        limits=SMALL,
    ),
    *[
        Attack(
            f"memory-bomb-{kind}",
            "memory_bomb.c",
            (kind, "256"),
            row("contained:out_of_memory"),
            _MEMORY,
            limits=SMALL,
            deviations={"user": _UNSEEN} if kind == "memfd" else {},
        )
        for kind in ("anonymous", "shared", "memfd", "sysv")
    ],
    Attack(
        "memory-bomb-shm",
        "memory_bomb.c",
        ("shm", "256"),
        row("contained:ENOSPC"),
        _MEMORY,
        limits=SMALL,
    ),
    Attack(
        "memory-bomb-sockets",
        "memory_bomb.c",
        ("sockets", "128"),
        row("contained:EMFILE"),
        Control(limits={"nofile": 8192, "as": 1024 * MIB}, cgroup={"memory": 600 * MIB}),
        limits=SMALL,
    ),
    Attack(
        "disk-bomb",
        "disk_bomb.c",
        ("/workspace", "128"),
        row("contained:ENOSPC"),
        Control(
            namespaces=("mount",),
            args=("{folder}/disk", "128"),
            before="mkdir -p {folder}/disk && mount -t tmpfs -o size=192m none {folder}/disk",
        ),
        limits=SMALL,
    ),
    Attack(
        "disk-bomb-tmp",
        "disk_bomb.c",
        ("/tmp", "128"),
        row("contained:ENOSPC"),
        Control(
            namespaces=("mount",),
            args=("{folder}/disk", "128"),
            before="mkdir -p {folder}/disk && mount -t tmpfs -o size=192m none {folder}/disk",
        ),
        limits=SMALL,
    ),
    Attack(
        "inode-bomb",
        "inode_bomb.c",
        ("/workspace", "150000"),
        row("contained:ENOSPC", bubblewrap="contained:out_of_memory", podman="contained:out_of_memory"),
        Control(
            namespaces=("mount",),
            args=("{folder}/disk", "150000"),
            before="mkdir -p {folder}/disk && mount -t tmpfs -o nr_inodes=200000 none {folder}/disk",
        ),
        limits=SMALL,
        deviations={"bubblewrap/user": _NO_INODE_LIMIT},
    ),
    Attack(
        "inode-bomb-shm",
        "inode_bomb.c",
        ("/dev/shm", "150000"),
        row("contained:ENOSPC", bubblewrap="contained:out_of_memory", podman="contained:out_of_memory"),
        Control(
            namespaces=("mount",),
            args=("{folder}/disk", "150000"),
            before="mkdir -p {folder}/disk && mount -t tmpfs -o nr_inodes=200000 none {folder}/disk",
        ),
        limits=SMALL,
        deviations={"bubblewrap/user": _NO_INODE_LIMIT},
    ),
    Attack(
        "fd-bomb",
        "fd_bomb.c",
        ("2000",),
        row("contained:EMFILE"),
        Control(limits={"nofile": 3000}),
        limits=SMALL,
    ),
    Attack(
        "output-flood",
        "flood.c",
        ("stdout", "10"),
        row("contained:output_limit"),
        Control(),
        limits=SMALL,
    ),
    Attack(
        "output-flood-stderr",
        "flood.c",
        ("stderr", "10"),
        row("contained:output_limit"),
        Control(),
        limits=SMALL,
    ),
]
