"""The authority of one sandbox: it signs what inspected connections show inside, and nobody else trusts it.

Its key never leaves the proxy. It lies encrypted beside the log, so that a restarted proxy goes on with the
authority that the sandbox trusts already.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import ssl
import tempfile
from pathlib import Path
from typing import Any

from ringfence.egress.keys import MasterKey, derive, give, seal, unseal
from ringfence.egress.names import Host

_LIFE = datetime.timedelta(days=90)
_MOST_LEAVES = 512
_SANDBOX = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


class Authority:
    """A certificate authority, and TLS server contexts for the names it signed."""

    def __init__(self, key: Any, certificate: Any) -> None:
        self._key = key
        self._certificate = certificate
        self._leaf_key: Any = None
        self._contexts: dict[str, ssl.SSLContext] = {}

    @classmethod
    def make(cls, sandbox: str) -> Authority:
        """A new one."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Ringfence egress {sandbox}"[:64])])
        now = datetime.datetime.now(datetime.UTC)
        public = key.public_key()
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + _LIFE)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(key, certificate)

    @classmethod
    def load(cls, pem: bytes) -> Authority:
        """From :meth:`dump`."""
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        return cls(load_pem_private_key(pem, None), x509.load_pem_x509_certificate(pem))

    def dump(self) -> bytes:
        """Key and certificate, PEM."""
        return _private(self._key) + self.certificate

    @property
    def certificate(self) -> bytes:
        """What the sandbox has to trust, PEM."""
        from cryptography.hazmat.primitives.serialization import Encoding

        pem: bytes = self._certificate.public_bytes(Encoding.PEM)
        return pem

    def context(self, host: Host) -> ssl.SSLContext:
        """A server's TLS context with a certificate for a host."""
        found = self._contexts.get(str(host))
        if found is None:
            if len(self._contexts) >= _MOST_LEAVES:
                del self._contexts[next(iter(self._contexts))]
            found = self._contexts[str(host)] = self._context(self.leaf(host))
        return found

    def leaf(self, host: Host) -> bytes:
        """Key and certificate for a host, and ours, PEM."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import Encoding
        from cryptography.x509.oid import ExtendedKeyUsageOID

        if self._leaf_key is None:  # one key for all leaves: making one costs more than a signature
            self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        san: x509.GeneralName = x509.DNSName(host.name) if host.name else x509.IPAddress(host.address)  # type: ignore[arg-type]
        public = self._leaf_key.public_key()
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self._certificate.subject)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(min(now + datetime.timedelta(days=30), self._certificate.not_valid_after_utc))
            .add_extension(x509.SubjectAlternativeName([san]), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        return _private(self._leaf_key) + certificate.public_bytes(Encoding.PEM) + self.certificate

    @staticmethod
    def _context(pem: bytes) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2", "http/1.1"])
        # The ssl module reads files only: this one is in memory, and gone when it was read.
        with tempfile.TemporaryFile() if not hasattr(os, "memfd_create") else _memory() as file:
            file.write(pem)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return context


def _memory() -> Any:
    return os.fdopen(os.memfd_create("leaf", os.MFD_CLOEXEC), "wb")


def _private(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    pem: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem


def _usage(*, signs: bool) -> Any:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


class Authorities:
    """The authorities of all sandboxes, in memory when used, encrypted on disk."""

    def __init__(self, folder: Path, key: MasterKey) -> None:
        self._folder = folder / "authorities"
        self._key = key
        self._loaded: dict[str, Authority] = {}
        self._lock = asyncio.Lock()

    async def of(self, sandbox: str) -> Authority:
        """A sandbox's authority, made when it is first asked for.

        Raises:
            SecretsUnavailable: its key can't be read.
        """
        found = self._loaded.get(sandbox)
        if found is not None:
            return found
        key = derive(await self._key.get(), "authority")
        async with self._lock:
            if sandbox not in self._loaded:
                self._loaded[sandbox] = self._open(sandbox, key)
            return self._loaded[sandbox]

    def _open(self, sandbox: str, key: bytes) -> Authority:
        path = self._path(sandbox)
        about = f"the authority of {sandbox}"
        try:
            return Authority.load(unseal(key, path.read_bytes(), about))
        except FileNotFoundError:
            pass
        made = Authority.make(sandbox)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        draft = path.with_suffix(".new")
        draft.write_bytes(seal(key, made.dump(), about))
        give(draft)
        os.replace(draft, path)
        return made

    def forget(self, sandbox: str) -> None:
        """The sandbox is no more. Idempotent."""
        self._loaded.pop(sandbox, None)
        self._path(sandbox).unlink(missing_ok=True)

    def _path(self, sandbox: str) -> Path:
        name = sandbox if set(sandbox) <= _SANDBOX and len(sandbox) <= 100 and sandbox[:1] != "." else ""
        return self._folder / (name or sandbox.encode().hex()[:120])
