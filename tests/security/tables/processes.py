"""Attacks on processes: the host's, the agent, names and rights of its own."""

from __future__ import annotations

from security.attacks import Attack, Control, NoControl, row

PLAIN = Control()
_USERNS = Control(namespaces=("user",))

_HOST = {
    # A host pid means nothing inside; calls that the filter denies don't even look.
    "attach": ("denied:EPERM", ""),
    "seize": ("denied:EPERM", ""),
    "readv": ("denied:EPERM", ""),
    "writev": ("denied:EPERM", ""),
    "pidfd_getfd": ("denied:ESRCH", ""),
    "kcmp": ("denied:EPERM", ""),
    "mem": ("invisible", ""),
    "environ": ("invisible", ""),
    "maps": ("invisible", ""),
    "root": ("invisible", ""),
    "cwd": ("invisible", ""),
    "fd": ("invisible", ""),
    "oom": ("invisible", ""),
    "setns": ("invisible", ""),
    "kill": ("denied:ESRCH", "victim"),
    "group": ("denied:ESRCH", "victim"),
    "pidfd_signal": ("denied:ESRCH", "victim"),
    "prlimit": ("denied:ESRCH", ""),
    "nice": ("denied:ESRCH", ""),
}
# Where the map has one uid only (bubblewrap; a normal user without subordinate ids), the agent is the
# workload's own. By design nobody trusts it; what such a workload does to it hurts its own sandbox alone.
_ONE_UID = {"bubblewrap": "no-effect", "jail_user": "no-effect", "jail_user_ids": "denied:EPERM"}
_AGENT: dict[str, tuple[str, dict[str, str]]] = {
    "attach": ("denied:EPERM", {}),
    "seize": ("denied:EPERM", {}),
    "readv": ("denied:EPERM", {}),
    "writev": ("denied:EPERM", {}),
    "pidfd_getfd": ("denied:EPERM", {}),
    "mem": ("denied:EACCES", {}),
    "environ": ("denied:EACCES", {}),
    "maps": ("denied:EACCES", {}),
    "exe": ("denied:EACCES", {}),
    "root": ("denied:EACCES", {}),
    "cwd": ("denied:EACCES", {}),
    "fd": ("denied:EACCES", {}),
    "oom": ("denied:EACCES", {}),
    "setns": ("denied:EACCES", {}),
    "kill": ("denied:EPERM", _ONE_UID),
    "term": ("denied:EPERM", _ONE_UID),
    "pidfd_signal": ("denied:EPERM", _ONE_UID),
    "prlimit": ("denied:EPERM", _ONE_UID),
    "nice": ("denied:EPERM", _ONE_UID),
}
_NAMESPACES = {
    "unshare": ("denied:EPERM", PLAIN),
    "unshare-mnt": ("denied:EPERM", _USERNS),
    "unshare-net": ("denied:EPERM", _USERNS),
    "unshare-pid": ("denied:EPERM", _USERNS),
    "unshare-cgroup": ("denied:EPERM", _USERNS),
    "unshare-time": ("denied:EPERM", _USERNS),
    "clone": ("denied:EPERM", PLAIN),
    "clone-high": ("denied:EPERM", PLAIN),
    "clone3": ("denied:ENOSYS", PLAIN),
    "setns": ("denied:EACCES", NoControl("the kernel lets nobody enter a user namespace that it is in")),
    "setns-pidfd": ("denied:EPERM", Control(namespaces=("user", "uts"))),
    "parent": ("denied:EPERM", NoControl("the kernel shows nobody the parent of the first user namespace")),
}

PROCESSES = [
    *[
        Attack(
            f"host-{kind}",
            "trace.c",
            (kind, "{victim}", "{address}"),
            row(outcome),
            Control(root_only="only root may enter another process's namespaces" if kind == "setns" else ""),
            judge=judge,
        )
        for kind, (outcome, judge) in _HOST.items()
    ],
    *[
        Attack(
            f"agent-{kind}",
            "trace.c",
            (kind, "1", "{address}"),
            row(outcome, **others),
            NoControl("host-* runs the same payload where nothing protects the other process"),
            judge="agent",
        )
        for kind, (outcome, others) in _AGENT.items()
    ],
    *[
        Attack(f"namespace-{kind}", "userns.c", (kind,), row(outcome), control)
        for kind, (outcome, control) in _NAMESPACES.items()
    ],
    Attack("host-processes", "processes.py", ("{victim}",), row("invisible"), PLAIN),
    Attack(
        "kill-all",
        "kill_all.c",
        ("{pid_namespace}",),
        row("no-effect"),
        Control(namespaces=("mount", "pid"), before="mount -t proc none /proc", outcome="sent"),
        judge="agent victim",
        note="reaches every process of its own sandbox, which is the workload's right",
    ),
    Attack(
        "chroot",
        "chroot.c",
        ("/tmp/rf-root", "{decoy}", "{marker}"),
        row("denied:EPERM"),
        Control(namespaces=("mount",), args=("{folder}/root", "{decoy}", "{marker}")),
    ),
    Attack(
        "become-another",
        "become.py",
        (),
        row("denied:EINVAL+denied:EPERM", jail_root="denied:EPERM", jail_user_ids="denied:EPERM"),
        Control(namespaces=("user",)),
    ),
    Attack("capabilities", "capabilities.py", (), row("none"), _USERNS),
    Attack("core-dump", "core_dump.c", (), row("no-dump"), PLAIN),
    Attack("hostname", "clocks.c", ("hostname",), row("denied:EPERM"), Control(namespaces=("uts",))),
    Attack("domainname", "clocks.c", ("domainname",), row("denied:EPERM"), Control(namespaces=("uts",))),
    Attack(
        "set-clock",
        "clocks.c",
        ("settime-invalid",),
        row("denied:EPERM"),
        Control(root_only="only the machine's root may set the clock"),
    ),
    Attack(
        "adjust-clock",
        "clocks.c",
        ("tick",),
        row("denied:EPERM"),
        Control(root_only="only the machine's root may set the clock"),
    ),
    Attack(
        "time-namespace-offsets",
        "clocks.c",
        ("timens-offsets",),
        row("denied:EPERM"),
        Control(namespaces=("user",)),
    ),
    Attack("terminal-typing", "tiocsti.c", ("tiocsti",), row("denied:EPERM"), PLAIN),
    Attack("terminal-typing-high", "tiocsti.c", ("tiocsti-high",), row("denied:EPERM"), PLAIN),
    Attack("terminal-typing-pty", "tiocsti.c", ("tiocsti",), row("denied:EPERM"), PLAIN, pty=True),
    Attack("console", "tiocsti.c", ("tioclinux",), row("denied:EPERM"), Control(outcome="reached")),
    Attack(
        "agent-socket",
        "agent_socket.py",
        ("{state}/guest.sock", "/.ringfence/guest.sock", "guest.sock", "/run/guest.sock"),
        row("invisible", jail_root="denied:EACCES+invisible", bubblewrap_root="denied:EACCES+invisible"),
        Control(args=("{unix}",)),
    ),
]
