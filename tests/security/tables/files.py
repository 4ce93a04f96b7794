"""Attacks on files: the host's, another sandbox's, the system's, and the layers of its own root."""

from __future__ import annotations

from security.attacks import Attack, Control, NoControl, row

PLAIN = Control()
_DECOY = ("{decoy}", "{marker}")
_KERNEL_RIGHT = "needs a right over the whole machine, which no namespace of a normal user gives"
_SYSCTLS = (
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/modprobe",
    "/proc/sys/vm/drop_caches",
    "/proc/sys/fs/binfmt_misc/register",
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/sys/kernel/domainname",
    "/proc/sysrq-trigger",
    "/proc/irq/default_smp_affinity",
)
_SYS = (
    "/sys/kernel/uevent_helper",
    "/sys/power/state",
    "/sys/kernel/mm/ksm/run",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/kernel/profiling",
)
_MASKED = (
    "/proc/kcore",
    "/proc/keys",
    "/proc/key-users",
    "/proc/timer_list",
    "/proc/sched_debug",
    "/proc/kmsg",
    "/proc/kpagecount",
    "/proc/acpi/wakeup",
    "/proc/scsi/scsi",
    "/proc/latency_stats",
)

FILES = [
    Attack(
        "own-program-runs",
        "execute_written.py",
        (),
        row("succeeded"),
        PLAIN,
        fake="succeeded",
        note="no attack but their frame: what the workload writes it can run, so denials mean something",
    ),
    Attack(
        "read-passwd", "same_file.py", ("/etc/passwd", "{passwd}"), row("different"), PLAIN, fake="succeeded"
    ),
    Attack(
        "read-shadow",
        "read_file.py",
        ("/etc/shadow", ":"),
        row("invisible"),
        Control(root_only="only root may read the host's shadow file"),
    ),
    Attack(
        "read-ssh-key",
        "read_file.py",
        ("{ssh_key}", "{marker}"),
        row("invisible"),
        PLAIN,
        fake="succeeded",
    ),
    Attack("read-host-file", "read_file.py", _DECOY, row("invisible"), PLAIN, fake="succeeded"),
    Attack("write-host-file", "write_file.py", ("{writable}",), row("invisible"), PLAIN, fake="succeeded"),
    Attack(
        "other-roots",
        "other_roots.py",
        _DECOY,
        row("denied:EACCES+invisible"),
        PLAIN,
        fake="succeeded",
    ),
    Attack(
        "open-descriptors",
        "open_descriptors.py",
        _DECOY,
        row("nothing-open"),
        Control(descriptor="{folder}"),
    ),
    Attack("host-environment", "environments.py", ("{env_marker}",), row("invisible"), PLAIN),
    Attack(
        "write-usr",
        "write_system.py",
        ("/usr/bin/env", "/usr/lib", "/usr/bin"),
        row("denied:EACCES+denied:EISDIR+denied:EROFS"),
        Control(root_only="a normal user can't write to the host's /usr"),
    ),
    Attack(
        "proc-sys",
        "kernel_files.py",
        ("w", *_SYSCTLS),
        row("denied:EACCES+invisible"),
        Control(root_only=_KERNEL_RIGHT),
    ),
    Attack(
        "sys-files",
        "kernel_files.py",
        ("w", *_SYS),
        row("invisible"),
        Control(root_only=_KERNEL_RIGHT),
    ),
    Attack(
        "masked-proc",
        "kernel_files.py",
        ("r", *_MASKED),
        row("denied:EACCES+empty+invisible", bubblewrap="denied:EACCES+invisible"),
        PLAIN,
    ),
    Attack(
        "ringfence-folder-read",
        "ringfence_folder.py",
        ("read",),
        row("denied:EACCES", jail_user="succeeded", bubblewrap_user="empty"),
        NoControl("the folder exists behind our own wall only"),
        note="a normal user's sandbox has one uid: it can read its own upper layer, nothing else",
    ),
    Attack(
        "ringfence-folder-write",
        "ringfence_folder.py",
        ("write",),
        row("denied:EACCES", jail_user="denied:EROFS", bubblewrap_user="denied:EROFS"),
        NoControl("the folder exists behind our own wall only"),
    ),
    Attack(
        "overlay-marks",
        "overlay_marks.py",
        ("/tmp",),
        row("succeeded"),
        Control(args=("{folder}",)),
        note="plain bytes: root's overlay reads trusted.* only, a user's escapes them, bubblewrap has none; "
        "test_outputs.py shows that neither the merged view nor the list of changes believes them",
    ),
    Attack(
        "overlay-whiteout",
        "nodes.c",
        ("whiteout", "/tmp/rf-white"),
        row("denied:EPERM"),
        Control(args=("whiteout", "{folder}/white")),
    ),
    Attack(
        "set-user-id",
        "set_user_id.py",
        ("/mnt/decoys/print_uid",),
        row("unchanged"),
        Control(args=("{suid}",), unprivileged=True),
        mounts=(("{suid_folder}", "/mnt/decoys"),),
    ),
    Attack(
        "set-user-id-made-inside",
        "suid_here.py",
        ("/usr/bin/id",),
        row("denied:EINVAL", jail_root="denied:EPERM", jail_user_ids="denied:EPERM"),
        NoControl("set-user-id is the control: a set-user-ID program gains where nothing stops it"),
    ),
    Attack(
        "agent-program",
        "agent_program.py",
        (),
        row("denied:EACCES"),
        NoControl("the kernel itself refuses to write a program that runs; here it can't even be opened"),
    ),
]
