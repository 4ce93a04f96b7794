"""The AppArmor profile of a wall: its text, loading it, and proving that it can be entered.

The profile forbids what no wall's workload needs whatever else fails: mounts, raw and packet sockets, kernel
interfaces below ``/proc`` and ``/sys``, tracing of anything outside, capabilities that the agent doesn't
hold. Files are left to the mount namespace and Landlock, so it fits every image. Its name is made from its
text: another text is another profile, and walls that live on keep theirs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
from functools import lru_cache

from ringfence.model.errors import HostLimit
from ringfence.runtimes.contract import StartSpec
from ringfence.runtimes.launching.guestargs import AGENT_CAPABILITIES
from ringfence.runtimes.measuring import capability_names

SECURITYFS = "sys/kernel/security/apparmor"
ATTRIBUTE = "/proc/self/attr/apparmor/exec"  # takes "exec NAME": the profile at the next exec
MARKS = "run/ringfence"  # what was loaded and entered since the machine started
_SETPCAP = 1 << 8
_TIMEOUT = 20.0  # seconds of one call of apparmor_parser

_TEXT = """\
#include <tunables/global>

profile {name} flags=(attach_disconnected,mediate_deleted) {{
  file,
  unix,
  network unix,
  network inet stream,
  network inet dgram,
  network inet6 stream,
  network inet6 dgram,
  network netlink raw,
{capabilities}
  signal (receive),
  signal (send) peer={name},
  ptrace (trace, read, tracedby, readby) peer={name},
  ptrace (readby, tracedby) peer=unconfined,

  deny mount,
  deny remount,
  deny umount,
  deny pivot_root,
  deny network inet raw,
  deny network inet6 raw,
  deny network packet,
  deny @{{PROC}}/sys/** wklx,
  deny @{{PROC}}/sysrq-trigger rwklx,
  deny @{{PROC}}/kcore rwklx,
  deny @{{PROC}}/kallsyms rwklx,
  deny @{{PROC}}/kmsg rwklx,
  deny @{{PROC}}/keys rwklx,
  deny @{{PROC}}/timer_list rwklx,
  deny @{{PROC}}/sched_debug rwklx,
  deny /sys/** wklx,
  deny /sys/firmware/** rwklx,
  deny /sys/kernel/security/** rwklx,
  deny /dev/mem rwklx,
  deny /dev/kmem rwklx,
  deny /dev/port rwklx,
}}
"""


def profile(spec: StartSpec) -> tuple[str, str]:
    """(name, text) of the profile that a wall of this spec gets."""
    return _profile(AGENT_CAPABILITIES | spec.identity.capabilities | _SETPCAP)


@lru_cache(maxsize=8)
def _profile(capabilities: int) -> tuple[str, str]:
    names = [name.removeprefix("CAP_").lower() for name in capability_names(capabilities)]
    lines = "".join(f"  capability {name},\n" for name in names)
    draft = _TEXT.format(name="ringfence", capabilities=lines)
    name = "ringfence-" + hashlib.sha256(draft.encode()).hexdigest()[:12]
    return name, _TEXT.format(name=name, capabilities=lines)


def lacking(*, root: str = "/", privileged: bool) -> tuple[str, str]:
    """(why no profile can be loaded here, remedy); empty if one can."""
    if not os.path.isdir(os.path.join(root, SECURITYFS)):
        return "its files are not mounted", "mount -t securityfs securityfs /sys/kernel/security"
    if not privileged:
        return "only root can load a profile", "run the node as root"
    if parser() is None:
        return "apparmor_parser is not installed", "apt-get install apparmor"
    return "", ""


def parser() -> str | None:
    """The program that compiles and loads profiles."""
    return shutil.which("apparmor_parser") or shutil.which("apparmor_parser", path="/usr/sbin:/sbin")


def ready(spec: StartSpec, *, root: str = "/") -> str:
    """The name of the wall's profile, loaded and proved by entering it once since the machine started.

    Raises:
        HostLimit: it can't be loaded, or can't be entered; the message is the parser's or the kernel's.
    """
    name, text = profile(spec)
    mark = os.path.join(root, MARKS, name)
    if os.path.exists(mark) and loaded(name, root=root):
        return name
    load(text)
    prove(name)
    with contextlib.suppress(OSError):  # without it, it is proved again the next time
        os.makedirs(os.path.dirname(mark), mode=0o755, exist_ok=True)
        with open(mark, "w", encoding="ascii"):
            pass
    return name


def loaded(name: str, *, root: str = "/") -> bool:
    """Whether the kernel has a profile of this name (its folder there ends in a number)."""
    try:
        found = os.listdir(os.path.join(root, SECURITYFS, "policy/profiles"))
    except OSError:
        return False
    return any(each.rpartition(".")[0] == name for each in found)


def load(text: str) -> None:
    """Compile and load a profile; one of the same name is replaced.

    Raises:
        HostLimit: it was refused.
    """
    program = parser()
    if program is None:
        raise HostLimit("apparmor_parser is not installed", hint="apt-get install apparmor")
    _call([program, "--replace", "--quiet"], text, "the AppArmor profile can't be loaded")


def unload(text: str) -> None:
    """Take a profile out of the kernel; processes in it become unconfined, so only when none is.

    Raises:
        HostLimit: it was refused.
    """
    _call([parser() or "apparmor_parser", "--remove", "--quiet"], text, "the profile can't be removed")


def prove(name: str) -> None:
    """Enter the profile in a process of its own and ask the kernel where it is.

    Raises:
        HostLimit: it can't be entered.
    """
    script = f'printf "exec %s" "$0" > {ATTRIBUTE} && exec cat /proc/self/attr/apparmor/current'
    said = _call(["/bin/sh", "-c", script, name], "", f"the AppArmor profile {name} can't be entered")
    if said.split(" ")[0].strip("\0\n") != name:
        raise HostLimit(
            f"the AppArmor profile {name} can't be entered: the kernel says {said.strip()[:80]!r}",
            hint="see `aa-status` and the kernel's log",
        )


def _call(argv: list[str], text: str, failure: str) -> str:
    try:
        done = subprocess.run(
            argv, input=text, capture_output=True, text=True, timeout=_TIMEOUT, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostLimit(f"{failure}: {error}", hint="see `aa-status`") from error
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise HostLimit(
            f"{failure}: {words[-1][:200] if words else done.returncode}",
            hint="see `aa-status` and the kernel's log",
        )
    return done.stdout


def engine_options(name: str) -> list[str]:
    """What an engine on this machine is told (``HostConfig.SecurityOpt``, ``--security-opt``)."""
    return [f"apparmor={name}"] if name else []
