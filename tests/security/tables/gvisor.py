"""Where a wall of gVisor answers otherwise than the jail: its own kernel answers, not the host's.

Each outcome with a note where it is not plainly a denial. What *succeeded* or was *reached* here is gVisor's
own: nothing of the host is behind it.
"""

from __future__ import annotations

_OWN = "gVisor's own kernel answers, which has nothing of the host behind it"
_NO_SUCH = "gVisor's kernel has no such call"

GVISOR: dict[str, tuple[str, str]] = {
    # files
    "write-usr": ("denied:EACCES+denied:EPERM", ""),
    "masked-proc": ("invisible", ""),
    "ringfence-folder-write": ("denied:EACCES", ""),
    "set-user-id-made-inside": ("denied:EPERM", ""),
    "overlay-marks": ("denied:ENOTSUP", ""),
    # processes
    "become-another": ("denied:EPERM", ""),
    "host-pidfd_getfd": ("denied:ENOSYS", _NO_SUCH),
    "host-pidfd_signal": ("denied:ENOSYS", _NO_SUCH),
    "agent-pidfd_getfd": ("denied:ENOSYS", _NO_SUCH),
    "agent-pidfd_signal": ("denied:ENOSYS", _NO_SUCH),
    "agent-environ": ("no-effect", "shows the base environment of commands, which holds no secret"),
    "agent-maps": ("no-effect", "shows addresses in the agent; its memory can't be opened"),
    "agent-fd": ("no-effect", "shows numbers of descriptors; none can be opened"),
    "agent-setns": ("denied:EPERM", ""),
    "agent-nice": ("no-effect", "gVisor lets a priority be set, and heeds none"),
    "namespace-clone3": ("succeeded", f"a user namespace of gVisor's: {_OWN}"),
    "namespace-setns": ("denied:EPERM", ""),
    "namespace-setns-pidfd": ("denied:ENOSYS", _NO_SUCH),
    "namespace-parent": ("denied:ENOTTY", ""),
    "time-namespace-offsets": ("invisible", ""),
    "terminal-typing": ("denied:ENOTTY", ""),
    "terminal-typing-high": ("denied:ENOTTY", ""),
    "terminal-typing-pty": ("denied:ENOTTY", ""),
    "console": ("reached", _OWN),
    "agent-socket": ("denied:EACCES+invisible", ""),
    # bombs
    "inode-bomb-shm": (
        "contained:out_of_memory",
        "gVisor's tmpfs counts no inodes: the memory limit ends the wall",
    ),
    # kernel
    "mount-mount_setattr": ("denied:ENOSYS", _NO_SUCH),
    "call-personality": ("reached", _OWN),
    "call-process_madvise": ("denied:ENOSYS", _NO_SUCH),
    "devices": (
        "succeeded",
        f"/dev/fuse and /dev/net/tun: {_OWN}, and neither can be used without its rights",
    ),
    "filter-int80": ("denied:ENOSYS", _NO_SUCH),
    "filter-int80-getpid": ("denied:ENOSYS", _NO_SUCH),
    # networks
    "metadata-address": ("denied:EHOSTUNREACH", ""),
    "any-route": ("denied:EHOSTUNREACH", ""),
    "socket-netfilter": ("denied:EPROTONOSUPPORT", ""),
    "socket-xfrm": ("denied:EPROTONOSUPPORT", ""),
    "socket-audit": ("denied:EPROTONOSUPPORT", ""),
    "socket-uevent": ("succeeded", f"hears of no device: {_OWN}"),
    "socket-vsock": ("denied:EAFNOSUPPORT", ""),
    "socket-alg": ("denied:EAFNOSUPPORT", ""),
    "socket-key": ("denied:EAFNOSUPPORT", ""),
    "socket-xdp": ("denied:EAFNOSUPPORT", ""),
}
