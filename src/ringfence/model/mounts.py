"""Which host paths may be shown inside a sandbox, and which would hand it the host.

Two questions. Of the policy alone, without looking at the host: is the target a place where something
may be mounted (:func:`target_problem`)? And on the host, just before a start: does the source exist,
and is it dangerous (:func:`check_mounts`)? Both the name that was written and what it resolves to are
judged, so a symlink can't hide a folder, nor can a folder be reached under its other name.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator

from ringfence.model.errors import DangerousMount, InvalidRequest
from ringfence.model.policy import Mount

# Dangerous themselves, and everything below them.
_TREES = {
    "/dev": "holds the host's devices",
    "/proc": "shows and steers the host's processes",
    "/sys": "steers the host's kernel and devices",
    "/run": "holds the sockets of the host's services",
    "/var/run": "holds the sockets of the host's services",
    "/boot": "holds the host's kernel and boot loader",
    "/var/lib/docker": "holds all Docker containers and images",
    "/var/lib/containerd": "holds all containers of containerd",
    "/var/lib/containers": "holds all Podman containers and images",
    "/var/lib/kubelet": "holds the secrets of this machine's pods",
    "/var/lib/rancher": "holds the cluster's keys",
    "/var/lib/lxc": "holds other containers",
    "/var/lib/lxd": "holds other containers",
    "/var/lib/libvirt": "holds other virtual machines",
    "/var/spool/cron": "holds programs that the host runs by the clock",
    "/etc/shadow": "holds password hashes",
    "/etc/gshadow": "holds password hashes",
    "/etc/sudoers": "says who may become root",
    "/etc/sudoers.d": "says who may become root",
    "/etc/ssh": "holds the host's own ssh keys",
    "/etc/ssl/private": "holds private keys",
    "/etc/pki/tls/private": "holds private keys",
    "/etc/letsencrypt": "holds private keys",
    "/etc/kubernetes": "holds the cluster's keys",
    "/etc/rancher": "holds the cluster's keys",
    "/etc/docker": "steers the host's Docker",
    "/etc/wireguard": "holds private keys",
    "/etc/NetworkManager/system-connections": "holds network passwords",
    "/etc/krb5.keytab": "holds the host's Kerberos keys",
    "/tmp/.X11-unix": "holds the sockets of the host's screen",  # noqa: S108
}
# Dangerous to write to; reading them tells nothing that a sandbox may not know.
_PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/etc")
# Credentials wherever they lie: the last components of a path, the path itself or anything below.
_CREDENTIALS = {
    ".ssh": "ssh keys",
    ".aws": "AWS credentials",
    ".azure": "Azure credentials",
    ".config/gcloud": "Google Cloud credentials",
    ".oci": "Oracle Cloud credentials",
    ".config/doctl": "DigitalOcean credentials",
    ".config/rclone": "cloud storage credentials",
    ".kube": "Kubernetes credentials",
    ".gnupg": "GnuPG keys",
    ".password-store": "passwords",
    ".local/share/keyrings": "passwords",
    ".docker": "registry credentials and Docker sockets",
    ".config/containers/auth.json": "registry credentials",
    ".config/gh": "GitHub credentials",
    ".git-credentials": "git credentials",
    ".config/git/credentials": "git credentials",
    ".netrc": "passwords of many services",
    ".pgpass": "database passwords",
    ".my.cnf": "database passwords",
    ".npmrc": "npm credentials",
    ".yarnrc.yml": "npm credentials",
    ".pypirc": "PyPI credentials",
    ".config/pip": "PyPI credentials",
    ".cargo/credentials": "crates.io credentials",
    ".cargo/credentials.toml": "crates.io credentials",
    ".gem/credentials": "RubyGems credentials",
    ".m2/settings.xml": "Maven credentials",
    ".terraform.d": "Terraform credentials",
    ".vault-token": "Vault credentials",
    ".huggingface": "Hugging Face credentials",
    ".cache/huggingface/token": "Hugging Face credentials",
    ".mozilla": "browser sessions and passwords",
    ".config/google-chrome": "browser sessions and passwords",
    ".config/chromium": "browser sessions and passwords",
}
# A folder with one of these right inside is somebody's home or a copy of one. Shorter than the list above:
# .npmrc and the like lie in many projects and seldom hold a secret there.
_MARKERS = (
    ".ssh",
    ".aws",
    ".azure",
    ".config/gcloud",
    ".kube",
    ".gnupg",
    ".git-credentials",
    ".netrc",
    ".pypirc",
)
_KEY_FILES = ("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "id_ecdsa_sk", "id_ed25519_sk")
_SOCKETS = ("docker.sock", "containerd.sock", "podman.sock", "crio.sock", "buildkitd.sock")

# Places inside that the wall itself fills. Nothing is mounted on them, above them or below them.
_RESERVED = ("/proc", "/sys", "/dev", "/run", "/.ringfence", "/boot", "/usr", "/bin", "/sbin", "/lib",
             "/lib32", "/lib64", "/libx32", "/etc")  # fmt: skip


def below(path: str, folder: str) -> bool:
    """Whether ``path`` is ``folder`` or lies in it. Both absolute and normalised."""
    return path == folder or folder == "/" or path.startswith(folder + "/")


def path_problem(path: str) -> str | None:
    """Why ``path`` is not an absolute, normalised path (``None`` if it is one)."""
    if not path.startswith("/"):
        return "is not absolute"
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in path):
        return "has a control character"
    if len(os.fsencode(path)) > 4095:
        return "is longer than 4095 bytes"
    if ".." in path.split("/"):
        return "has '..' in it"
    if os.path.normpath(path) != path or path.startswith("//"):
        return f"is not in its shortest form, which is {os.path.normpath('/' + path.lstrip('/'))!r}"
    return None


def target_problem(target: str) -> str | None:
    """Why nothing may be mounted at ``target`` inside (``None`` if something may)."""
    problem = path_problem(target)
    if problem is not None:
        return problem
    if target == "/":
        return "would cover the whole root of the sandbox"
    for reserved in _RESERVED:
        if below(target, reserved):
            return f"lies in {reserved}, which the wall fills itself"
    return None


def parse_mount(text: str) -> Mount:
    """``SRC:DST``, ``SRC:DST:ro`` or ``SRC:DST:rw``; read-only unless ``rw``. A relative SRC is from here.

    Raises:
        InvalidRequest: not of that form, or nothing may be mounted at DST.
    """
    rest, mode = text, "ro"
    if text.endswith((":ro", ":rw")):
        rest, mode = text[:-3], text[-2:]
    source, colon, target = rest.rpartition(":")
    if not colon or not source or not target:
        raise InvalidRequest(f"{text!r} is not a mount", hint="write SRC:DST, SRC:DST:ro or SRC:DST:rw")
    problem = target_problem(target)
    if problem is not None:
        raise InvalidRequest(
            f"mount target {target!r} {problem}",
            hint="choose a folder of its own, as in ./data:/workspace/data",
        )
    return Mount(os.path.abspath(source), target, mode == "ro")


def check_mounts(
    mounts: Iterable[Mount], allow: Iterable[str] = (), *, state: str | None = None
) -> tuple[Mount, ...]:
    """Judge mounts on this host; returns them with each source resolved to the path that was judged.

    Callers mount what is returned: a symlink that is turned afterwards then changes nothing.

    Args:
        mounts: from the policy and the command line.
        allow: sources that ``--allow-dangerous-mount`` names, as written or resolved.
        state: Ringfence's state folder; by default the one that this user's node has.

    Raises:
        InvalidRequest: a source is missing or unreadable, a target is impossible or used twice.
        DangerousMount: a source would hand over the host, and ``allow`` doesn't name it.
    """
    names = {os.path.abspath(name) for name in allow}
    homes: dict[str, str] | None = None
    targets: set[str] = set()
    result = []
    for mount in mounts:
        problem = target_problem(mount.target)
        if problem is not None:
            raise InvalidRequest(
                f"mount target {mount.target!r} {problem}", hint="choose a folder of its own"
            )
        if mount.target in targets:
            raise InvalidRequest(
                f"two mounts have the target {mount.target}", hint="give each its own target"
            )
        targets.add(mount.target)
        written, real, mode = _examine(mount.source)
        if not {written, real} & names:
            if homes is None:
                homes = _homes()
            reason = _danger(written, real, mode, mount.read_only, homes, state or _state_root())
            if reason is not None:
                raise _refusal(mount.source, written, real, reason)
        # Asked last: that /root is refused matters more than that it can't be read anyway.
        if not os.access(real, os.R_OK | os.X_OK if stat.S_ISDIR(mode) else os.R_OK):
            raise InvalidRequest(
                f"mount source {mount.source!r} can't be read by this user",
                hint="check its permissions, or run as its owner",
            )
        result.append(Mount(real, mount.target, mount.read_only))
    return tuple(result)


def _refusal(source: str, written: str, real: str, reason: str) -> DangerousMount:
    via = f" (it is {real})" if real != written else ""
    return DangerousMount(
        f"mounting {source!r}{via} is refused: it {reason}",
        hint=f"mount a smaller folder, or, if the sandbox may have it, add --allow-dangerous-mount {source}",
        source=source,
        resolved=real,
        reason=reason,
    )


def _examine(source: str) -> tuple[str, str, int]:
    """The source as written, as resolved, and its mode; it exists."""
    problem = path_problem(source)
    if problem is not None and "shortest" not in problem and "'..'" not in problem:
        raise InvalidRequest(
            f"mount source {source!r} {problem}", hint="write the full path of a folder or file"
        )
    # Not os.path.abspath: it drops `link/..` without looking where the link leads. realpath looks.
    written = os.path.normpath(source)
    try:
        real = os.path.realpath(source, strict=True)
        mode = os.stat(real).st_mode
    except FileNotFoundError:
        raise InvalidRequest(
            f"mount source {source!r} does not exist", hint="check the spelling, or make the folder first"
        ) from None
    except OSError as problem_of_host:
        raise InvalidRequest(
            f"mount source {source!r} can't be reached: {problem_of_host.strerror}",
            hint="check the permissions of the folders on the way",
        ) from None
    return written, real, mode


def _danger(
    written: str, real: str, mode: int, read_only: bool, homes: dict[str, str], state: str
) -> str | None:
    """Why this source would hand over the host, in words that follow "it"."""
    if stat.S_ISSOCK(mode):
        return "is a socket: whoever holds it can command the service behind it"
    if stat.S_ISBLK(mode) or stat.S_ISCHR(mode):
        return "is a device of the host"
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        return "is neither a folder nor a file"
    for path in dict.fromkeys((written, real)):
        reason = _named_danger(path, read_only) or _home_danger(path, homes) or _state_danger(path, state)
        if reason is not None:
            return reason
    if stat.S_ISDIR(mode):
        return _held_danger(real) or _same_folder(real, homes, state)
    return None


def _named_danger(path: str, read_only: bool) -> str | None:
    if path == "/":
        return "is the whole host"
    for tree, why in _TREES.items():
        if below(path, tree):
            return why
        # Parents: /etc, /var and /tmp hold what is listed above.
        if below(tree, path):
            return f"holds {tree}, which {why}"
    if not read_only and any(below(path, tree) for tree in _PROGRAMS):
        return "would let the sandbox change programs or settings of the host; read-only is fine"
    for credential, what in _CREDENTIALS.items():
        if f"/{credential}/" in path + "/":
            return f"holds {what}"
    name = path.rsplit("/", 1)[1]
    if name in _KEY_FILES:
        return "is a private ssh key"
    if name in _SOCKETS:
        return "is the socket of a container engine: whoever holds it is root on the host"
    if path.startswith("/tmp/ssh-"):  # noqa: S108
        return "holds the socket of an ssh agent"
    return None


def _held_danger(folder: str) -> str | None:
    """Credentials right inside: a copy of somebody's home, or a folder such as ``.config``."""
    for marker in _MARKERS:
        if os.path.lexists(f"{folder}/{marker}"):
            return f"holds {marker} ({_CREDENTIALS[marker]})"
    for credential, what in _CREDENTIALS.items():
        parts = credential.split("/")
        for cut in range(1, len(parts)):
            rest = "/".join(parts[cut:])
            if folder.endswith("/" + "/".join(parts[:cut])) and os.path.lexists(f"{folder}/{rest}"):
                return f"holds {rest} ({what})"
    return None


def _same_folder(real: str, homes: dict[str, str], state: str) -> str | None:
    """Another name for a dangerous place: bind mounts lead there without a symlink to resolve."""
    here = os.stat(real)
    places = ["/", "/etc", "/var", "/var/lib", "/tmp", *_TREES, *homes, state]  # noqa: S108
    for place in places:
        try:
            found = os.stat(place)
        except OSError:
            continue
        if os.path.samestat(here, found):
            return f"is {place} under another name"
    return None


def _home_danger(path: str, homes: dict[str, str]) -> str | None:
    for home, user in homes.items():
        if path == home:
            return f"is the home folder of {user}, with credentials and settings in it (sub-folders are fine)"
        if below(home, path):
            return f"holds the home folder of {user} ({home})"
    # Users of a directory service are not enumerated, but their homes lie here too.
    if path == "/home" or path.rpartition("/")[0] == "/home":
        return "is a home folder, with all credentials and settings in it (sub-folders are fine)"
    return None


def _state_danger(path: str, state: str) -> str | None:
    for folder in dict.fromkeys((os.path.normpath(state), os.path.realpath(state))):
        if below(path, folder):
            return "is part of Ringfence's own state, with the files of all sandboxes"
        if below(folder, path):
            return f"holds Ringfence's own state ({folder}), with the files of all sandboxes"
    return None


def _homes() -> dict[str, str]:
    """Home folders of people (and root) with their user names, each also under its resolved name."""
    import pwd

    found: dict[str, str] = {"/root": "root"}
    for user in pwd.getpwall():
        # Services (uid 1 to 999, nobody) have homes such as /usr/sbin, /bin or /nonexistent.
        if user.pw_uid == 0 or (user.pw_uid >= 1000 and user.pw_uid != 65534) or below(user.pw_dir, "/home"):
            found.update(dict.fromkeys(_spellings(user.pw_dir), user.pw_name))
    if "HOME" in os.environ:
        for home in _spellings(os.environ["HOME"]):
            found.setdefault(home, "this user")
    return found


def _spellings(folder: str) -> Iterator[str]:
    if folder.startswith("/") and os.path.normpath(folder) != "/":
        yield os.path.normpath(folder)
        real = os.path.realpath(folder)
        if real != "/":
            yield real


def _state_root() -> str:
    """Where this user's node keeps its state."""
    chosen = os.environ.get("RINGFENCE_HOME")
    if chosen:
        return os.path.abspath(chosen)
    if os.geteuid() == 0:
        return "/var/lib/ringfence"
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(base, "ringfence")
