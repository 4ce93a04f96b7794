"""Attacks on the kernel's wide surface: mounts, cgroups, devices, keyrings, odd calls."""

from __future__ import annotations

from security.attacks import Attack, Control, NoControl, row

PLAIN = Control()
_PLACE = "/tmp/rf-mount"
_AT_USR = "mount --bind /usr /usr"
_AT_PLACE = "mkdir -p {folder}/mount && mount -t tmpfs none {folder}/mount"
_MOUNTS = {
    # kind: what the control needs to be there first
    "tmpfs": "",
    "proc": "",
    "sysfs": "",
    "bind": "",
    "remount": _AT_USR,
    "propagation": "",
    "overlay": _AT_PLACE,
    "umount": "",
    "fsopen": "",
    "open_tree": "",
    "move_mount": _AT_PLACE,
    "mount_setattr": _AT_USR,
    "pivot_root": _AT_PLACE,
}
_FIRST_CAPABILITY = "the kernel asks a normal user for a capability before it looks further"
_OPTIONAL = {
    "init_module",
    "finit_module",
    "delete_module",
    "kexec_load",
    "kexec_file_load",
    "iopl",
    "ioperm",
}
_CALLS = {
    # name: errno inside, and whether a plain normal user gets through to the kernel's code
    "io_uring_setup": ("EPERM", True),
    "io_uring_enter": ("EPERM", True),
    "io_uring_register": ("EPERM", True),
    "bpf": ("EPERM", False),
    "perf_event_open": ("EPERM", True),
    "userfaultfd": ("EPERM", True),
    "init_module": ("EPERM", False),
    "finit_module": ("EPERM", False),
    "delete_module": ("EPERM", False),
    "kexec_load": ("EPERM", False),
    "kexec_file_load": ("EPERM", False),
    "reboot": ("EPERM", False),
    "swapon": ("EPERM", False),
    "swapoff": ("EPERM", False),
    "acct": ("EPERM", False),
    "syslog": ("EPERM", False),
    "open_by_handle_at": ("EPERM", False),
    "name_to_handle_at": ("EPERM", True),
    "quotactl": ("EPERM", True),
    "iopl": ("EPERM", False),
    "ioperm": ("EPERM", False),
    "fanotify_init": ("EPERM", False),
    "settimeofday": ("EPERM", True),
    "personality": ("EPERM", True),
    "process_madvise": ("EPERM", True),
    "memfd_secret": ("ENOSYS", True),
    "lsm_set_self_attr": ("ENOSYS", True),
    "modify_ldt": ("EPERM", True),
}

KERNEL = [
    *[
        Attack(
            f"mount-{kind}",
            "mount.c",
            (kind, _PLACE),
            row("denied:EPERM"),
            Control(
                namespaces=("mount", "uts", "ipc", "net", "pid"), before=before, args=(kind, "{folder}/mount")
            ),
        )
        for kind, before in _MOUNTS.items()
    ],
    *[
        Attack(
            f"call-{name}",
            "syscalls.c",
            (name,),
            row(f"denied:{error}"),
            Control(
                outcome="reached",
                root_only="" if anyone else _FIRST_CAPABILITY,
                absent="denied:ENOSYS" if name in _OPTIONAL else "",
            ),
        )
        for name, (error, anyone) in _CALLS.items()
    ],
    Attack(
        "release-agent",
        "release_agent.c",
        ("plain", "/tmp/rf-cgroup"),
        row("denied:EPERM"),
        Control(
            namespaces=("mount",),
            args=("plain", "{folder}/cgroup"),
            root_only="only the machine's root may mount a v1 hierarchy",
        ),
    ),
    Attack(
        "release-agent-userns",
        "release_agent.c",
        ("userns", "/tmp/rf-cgroup"),
        row("denied:EPERM"),
        NoControl("kernels since 5.17 refuse it themselves; release-agent shows that the payload works"),
    ),
    Attack(
        "cgroup-escape",
        "cgroup_escape.py",
        (),
        row("invisible"),
        Control(root_only="no cgroup is delegated to normal users here"),
    ),
    Attack(
        "device-null",
        "nodes.c",
        ("null", "/tmp/rf-null"),
        row("denied:EPERM"),
        Control(args=("null", "{folder}/null"), root_only="only root may make device nodes"),
    ),
    Attack(
        "device-memory",
        "nodes.c",
        ("mem", "/tmp/rf-mem"),
        row("denied:EPERM"),
        NoControl(
            "opening physical memory is no thing to do on a live machine; device-null is the same call"
        ),
    ),
    Attack(
        "device-disk",
        "nodes.c",
        ("disk", "/tmp/rf-disk"),
        row("denied:EPERM"),
        NoControl("opening the machine's disk is no thing to do; device-null is the same call"),
    ),
    Attack(
        "devices",
        "devices.py",
        (),
        row("invisible"),
        Control(root_only="normal users may open none of these nodes on most hosts"),
    ),
    *[
        Attack(f"keyring-{kind}", "keyring.c", (kind,), row("denied:EPERM"), PLAIN)
        for kind in ("add_key", "request_key", "join", "session")
    ],
    Attack("filter-int80", "bypass.c", ("int80",), row("killed:SIGSYS"), PLAIN),
    Attack("filter-int80-getpid", "bypass.c", ("int80-getpid",), row("killed:SIGSYS"), PLAIN),
    Attack(
        "filter-x32",
        "bypass.c",
        ("x32",),
        row("denied:ENOSYS"),
        NoControl("this kernel, like every distribution's, is built without the x32 calls"),
    ),
    Attack("filter-high-number", "bypass.c", ("high-number",), row("denied:EPERM"), PLAIN),
    Attack("filter-on-filter", "bypass.c", ("second-filter",), row("denied:EPERM"), PLAIN),
]
