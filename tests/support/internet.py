"""A made-up internet: a network namespace with servers under public-looking addresses. Nothing leaves it.

Inside the namespace loopback has every address of the zone, the metadata service's and a private
range's among them, and the address of this machine's own resolver, so that whoever resolves names in there
asks ours. The egress process is started inside (:meth:`Internet.entered`): for it that is the world.

Session-scoped (``internet`` in ``conftest.py``), root only: the namespace has no name, and is gone with its
processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

API, PACKAGES, GIT, SHARED, WEB = (
    "93.184.216.10", "93.184.216.11", "93.184.216.12", "93.184.216.20", "93.184.216.30",
)  # fmt: skip
ATTACKER = "93.184.217.66"
METADATA = "169.254.169.254"
PRIVATE = "10.20.30.40"
API6 = "2606:2800:220:1::10"

ZONE: dict[str, dict[str, Any]] = {
    "api.example.test": {"A": [API], "AAAA": [API6]},
    "packages.example.test": {"A": [PACKAGES]},
    "git.example.test": {"A": [GIT]},
    "db.example.test": {"A": [API]},
    "keyed.example.test": {"A": [API]},
    "web.example.test": {"A": [WEB]},
    # Two customers of one content network: the same address, a certificate each.
    "front.example.test": {"A": [SHARED]},
    "inspected.example.test": {"A": [SHARED]},
    "hidden.example.test": {"A": [SHARED]},
    "evil.attacker.test": {"A": [ATTACKER]},
    "metadata.example.test": {"A": [METADATA]},
    "inner.example.test": {"A": [PRIVATE]},
    "loop.example.test": {"A": ["127.0.0.1"]},
    "mapped.example.test": {"AAAA": [f"::ffff:{PRIVATE}"]},
    # First what a check would see, then what a careless second look-up would connect to.
    "rebind.example.test": {"A": [[API], [METADATA]]},
    # Its certificates: of nobody we know, of another name, from the past.
    "selfsigned.example.test": {"A": [WEB]},
    "wrongname.example.test": {"A": [WEB]},
    "expired.example.test": {"A": [WEB]},
}
HOSTS = (API, PACKAGES, GIT, SHARED, WEB, ATTACKER, METADATA, PRIVATE, API6)
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class Internet:
    """See the module. ``folder`` is readable by everybody; ``ca`` is the PEM of the test authority."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rf-internet-", dir="/tmp"))
        self.folder.chmod(0o755)
        (self.folder / "www").mkdir()
        self.seen_file = self.folder / "seen.jsonl"
        self.seen_file.touch()
        self._servers: subprocess.Popen[bytes] | None = None
        self._namespace = -1
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        self.ca = _certificates(self.folder / "certificates")
        (self.folder / "ca.pem").write_bytes(self.ca)
        resolvers = _resolvers()
        self.relay = "rf-relay-" + secrets.token_hex(6)  # an abstract socket in the namespace
        (self.folder / "relay").write_text(self.relay)
        for name, content in (("zone", ZONE), ("hosts", HOSTS), ("resolvers", resolvers)):
            (self.folder / f"{name}.json").write_text(json.dumps(content))
        with open(self.folder / "errors.txt", "wb") as errors:
            self._servers = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", _setup(resolvers), sys.executable, str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        assert self._servers.stdout is not None
        if self._servers.stdout.readline().strip() != b"ready":
            raise AssertionError((self.folder / "errors.txt").read_text()[-2000:])
        self._namespace = os.open(f"/proc/{self._servers.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """This thread is in the namespace: what it starts now stays there."""
        ours = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(self._namespace)
            yield
        finally:
            _enter(ours)
            os.close(ours)

    def command(self, *argv: str) -> list[str]:
        """The command as it is run inside the namespace."""
        assert self._servers is not None
        return ["nsenter", f"--net=/proc/{self._servers.pid}/ns/net", "--", *argv]

    def seen(self, **what: object) -> list[dict[str, Any]]:
        """What the servers have heard, of this kind: ``seen(what="request", host="evil.attacker.test")``."""
        lines = [json.loads(line) for line in self.seen_file.read_text().splitlines()]
        return [line for line in lines if all(line.get(key) == value for key, value in what.items())]

    def mark(self) -> int:
        """How much was heard so far, for :meth:`since`."""
        return self.seen_file.stat().st_size

    def since(self, mark: int) -> list[dict[str, Any]]:
        """What was heard after that mark."""
        with open(self.seen_file) as file:
            file.seek(mark)
            return [json.loads(line) for line in file.read().splitlines()]

    def publish(self, host: str, path: str, content: bytes) -> None:
        """Let a host serve a file."""
        at = self.folder / "www" / host / path.strip("/")
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_bytes(content)

    def close(self) -> None:
        """End the servers; the namespace goes with them."""
        if self._namespace >= 0:
            os.close(self._namespace)
            self._namespace = -1
        if self._servers is not None:
            assert self._servers.stdin is not None and self._servers.stdout is not None
            self._servers.stdin.close()
            try:
                self._servers.wait(10)
            except subprocess.TimeoutExpired:
                self._servers.kill()
                self._servers.wait()
            self._servers.stdout.close()
            self._servers = None
        shutil.rmtree(self.folder, ignore_errors=True)


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _resolvers() -> list[str]:
    found = ["9.9.9.9"]
    with contextlib.suppress(OSError), open("/etc/resolv.conf") as file:
        for line in file:
            words = line.split()
            if len(words) > 1 and words[0] == "nameserver" and ":" not in words[1]:
                found.append(words[1])
    return list(dict.fromkeys(found))


def _setup(resolvers: list[str]) -> str:
    lines = ["set -e", "ip link set lo up"]
    lines.append("echo 0 2147483647 > /proc/sys/net/ipv4/ping_group_range")
    for address in (*HOSTS, *resolvers):
        if address.startswith("127."):
            continue
        size, more = ("128", " nodad") if ":" in address else ("32", "")
        lines.append(f"ip address add {address}/{size} dev lo{more}")
    servers = Path(__file__).with_name("internet_servers.py")
    lines.append(f'exec "$0" {servers} "$1"')
    return "\n".join(lines)


def _certificates(folder: Path) -> bytes:
    """Of every name of the zone; the authority's PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    folder.mkdir()
    now = datetime.now(UTC)

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
        return key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def authority(text: str) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.KeyUsage(
            digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False,
            key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False,
            decipher_only=False,
        )  # fmt: skip
        made = (
            x509.CertificateBuilder()
            .subject_name(name(text))
            .issuer_name(name(text))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=30))
            .not_valid_after(now + timedelta(days=30))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return key, made

    known, stranger = authority("Ringfence test authority"), authority("Nobody's authority")

    def leaf(
        host: str, signer: tuple[ec.EllipticCurvePrivateKey, x509.Certificate], said: str, last: datetime
    ) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = signer[1].public_key()
        assert isinstance(issuer, ec.EllipticCurvePublicKey)
        made = (
            x509.CertificateBuilder()
            .subject_name(name(said))
            .issuer_name(signer[1].subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=20))
            .not_valid_after(last)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(said)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False)
            .sign(signer[0], hashes.SHA256())
        )
        pem = key_pem(key) + made.public_bytes(serialization.Encoding.PEM)
        (folder / f"{host}.pem").write_bytes(pem)

    good = now + timedelta(days=20)
    for host in (*ZONE, "default"):
        signer = stranger if host.startswith("selfsigned") else known
        said = "other.example.test" if host.startswith("wrongname") else host
        leaf(host, signer, said, now - timedelta(days=1) if host.startswith("expired") else good)
    return known[1].public_bytes(serialization.Encoding.PEM)


def eventually_seen(internet: Internet, seconds: float = 30, **what: object) -> list[dict[str, Any]]:
    """Wait until something of this kind was heard."""
    deadline = time.monotonic() + seconds
    while not (found := internet.seen(**what)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found
