"""System calls whose arguments decide, with the rule in words and the reason."""

from __future__ import annotations

from ringfence.runtimes.seccomp.decisions import (
    ALLOW,
    EINVAL,
    EPERM,
    EPROTONOSUPPORT,
    Decision,
    Masked,
    Switch,
    only,
)


class Guard:
    """One call whose arguments decide. ``rule`` says in words what ``decision`` does."""

    __slots__ = ("call", "decision", "reason", "rule")

    def __init__(self, call: str, rule: str, reason: str, decision: Decision) -> None:
        self.call = call
        self.rule = rule
        self.reason = reason
        self.decision = decision


# <linux/sched.h>: NEWNS NEWCGROUP NEWUTS NEWIPC NEWUSER NEWPID NEWNET. NEWTIME shares its bit with the
# exit signal of clone and is known to clone3 and unshare only.
_CLONE_NEW = 0x7E020000

_STREAM, _DGRAM, _RAW, _SEQPACKET = 1, 2, 3, 5
_TYPE_MASK = 0xF  # the rest of the type argument is SOCK_CLOEXEC and SOCK_NONBLOCK
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16

# SOCK_STREAM takes TCP only and SOCK_DGRAM UDP only. The errno for other protocols is the kernel's own for
# "not built in": Go tries MPTCP first and falls back on it.
_STREAM_PROTOCOL = only(2, (0, 6), ALLOW, EPROTONOSUPPORT)
_DGRAM_PROTOCOL = only(2, (0, 17), ALLOW, EPROTONOSUPPORT)
_INTERNET = Switch(
    1, [(_STREAM, _STREAM, _STREAM_PROTOCOL), (_DGRAM, _DGRAM, _DGRAM_PROTOCOL)], EPERM, _TYPE_MASK
)
_LOCAL = only(1, (_STREAM, _DGRAM, _SEQPACKET), ALLOW, EPERM, _TYPE_MASK)
# libaudit (in useradd, su, sshd, cron) takes this errno for a kernel without auditing, and gives up at EPERM.
_AUDIT = 9
_ROUTE = only(
    1, (_DGRAM, _RAW), Switch(2, [(0, 0, ALLOW), (_AUDIT, _AUDIT, EPROTONOSUPPORT)], EPERM), EPERM, _TYPE_MASK
)

# <linux/prctl.h>. Options that are about the process itself and need no privilege. Left out: SET_MM (35),
# task perf events (31, 32), MPX (43, 44), IO_FLUSHER (57, 58), SCHED_CORE (62) and memory merging (67, 68),
# through which pages shared with other sandboxes could be noticed.
_PRCTL = [
    (1, 30),  # PDEATHSIG .. GET_TIMERSLACK: dumpable, name, seccomp, capabilities, securebits
    (33, 34),  # MCE_KILL
    (36, 42),  # CHILD_SUBREAPER, NO_NEW_PRIVS, GET_TID_ADDRESS, THP_DISABLE
    (45, 47),  # FP_MODE, CAP_AMBIENT
    (50, 56),  # vector length, speculation control, pointer keys, tagged addresses
    (59, 61),  # SYSCALL_USER_DISPATCH, pointer keys
    (63, 66),  # vector length, MDWE
    (74, 76),  # shadow stack
    (0x41555856, 0x41555856),  # GET_AUXV
    (0x53564D41, 0x53564D41),  # SET_VMA: names for memory, malloc uses it
    (0x59616D61, 0x59616D61),  # SET_PTRACER: crash handlers call it; ptrace itself stays denied
]

GUARDS = [
    Guard(
        "clone",
        "allowed without any CLONE_NEW* flag, else EPERM",
        "Threads and processes, but no new namespaces.",
        Masked(0, _CLONE_NEW, 0, ALLOW, EPERM),
    ),
    Guard(
        "socket",
        "AF_UNIX (stream, datagram, seqpacket); AF_INET and AF_INET6 (TCP and UDP; other protocols "
        "EPROTONOSUPPORT); AF_NETLINK for routes only (audit EPROTONOSUPPORT); every other family or "
        "type EPERM",
        "Raw and packet sockets forge and read traffic; vsock reaches the hypervisor; AF_ALG, bluetooth, "
        "CAN, TIPC and the like are rarely used kernel code with a long record of holes. Netlink routes "
        "are read by getifaddrs (Node, Go, Java, `ip addr`); changing them needs a capability that nobody "
        "inside has.",
        Switch(
            0,
            [
                (_UNIX, _UNIX, _LOCAL),
                (_INET, _INET, _INTERNET),
                (_INET6, _INET6, _INTERNET),
                (_NETLINK, _NETLINK, _ROUTE),
            ],
            EPERM,
        ),
    ),
    Guard(
        "socketpair",
        "AF_UNIX only, else EPERM",
        "The only family that Linux makes pairs of, but for TIPC.",
        only(0, (_UNIX,), ALLOW, EPERM),
    ),
    Guard(
        "ioctl",
        "everything but TIOCSTI, TIOCLINUX and TIOCSETD (EPERM)",
        "TIOCSTI types into the terminal that started the sandbox, TIOCLINUX into the console, TIOCSETD "
        "loads line disciplines. Other requests are the business of the open file.",
        only(1, (0x5412, 0x541C, 0x5423), EPERM, ALLOW),
    ),
    Guard(
        "prctl",
        "a list of options about the process itself, others EINVAL",
        "EINVAL is what a kernel without the option answers.",
        Switch(0, [(first, last, ALLOW) for first, last in _PRCTL], EINVAL),
    ),
    Guard(
        "personality",
        "0, PER_LINUX32, ADDR_NO_RANDOMIZE and the query 0xffffffff, else EPERM",
        "Sanitizers and setarch use these, on themselves. Others switch on old kernel behaviour that makes "
        "attacks easier (executable data, mapping at address zero).",
        only(0, (0, 0x8, 0x40000, 0xFFFFFFFF), ALLOW, EPERM),
    ),
    Guard(
        "mknod",
        "regular files, FIFOs and sockets; device nodes EPERM",
        "A device node is a door to the host; the kernel refuses it too, but not the 0:0 node that overlay "
        "file systems read as a deletion.",
        only(1, (0, 0x1000, 0x8000, 0xC000), ALLOW, EPERM, 0xF000),
    ),
    Guard("mknodat", "as mknod", "As mknod.", only(2, (0, 0x1000, 0x8000, 0xC000), ALLOW, EPERM, 0xF000)),
]
