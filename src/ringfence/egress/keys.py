"""The key under which secrets and authorities lie encrypted: a file of its own, or what a command says."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import os
import time
from collections.abc import Sequence
from pathlib import Path

from ringfence.model.errors import RingfenceError

_REUSE = 300.0  # seconds that what a command gave is used; then it is asked again
_PATIENCE = 10.0


class SecretsUnavailable(RingfenceError):
    """Secrets can't be read now: no key, or no file. What needs one fails; it is never sent without."""

    code = "secrets_unavailable"


class MasterKey:
    """32 bytes: in ``secrets.key`` in the folder (made when first needed), or what a command prints (base64).

    The command is the place for a key management service: it decrypts and prints, and may refuse.
    """

    def __init__(self, folder: Path, command: Sequence[str] = ()) -> None:
        self._path = folder / "secrets.key"
        self._command = tuple(command)
        self._known: tuple[float, bytes] | None = None
        self._lock = asyncio.Lock()

    async def get(self) -> bytes:
        """The key.

        Raises:
            SecretsUnavailable: it can't be had.
        """
        if self._known is not None and (not self._command or time.monotonic() < self._known[0] + _REUSE):
            return self._known[1]
        if not self._command:
            return self.read()
        async with self._lock:
            self._known = (time.monotonic(), await self._asked())
        return self._known[1]

    def read(self) -> bytes:
        """The key in the file.

        Raises:
            SecretsUnavailable: it can't be read, or a command has it.
        """
        if self._command:
            raise SecretsUnavailable("the key comes from a command")
        try:
            try:
                key = self._path.read_bytes()
            except FileNotFoundError:
                key = self._make()
        except OSError as error:
            raise SecretsUnavailable(f"the key of the secrets can't be read: {error.strerror}") from None
        if len(key) != 32:
            raise SecretsUnavailable("the key of the secrets is damaged")
        self._known = (time.monotonic(), key)
        return key

    def _make(self) -> bytes:
        draft = self._path.with_name(f".secrets.key.{os.getpid()}.{os.urandom(4).hex()}")
        try:
            draft.write_bytes(os.urandom(32))
            give(draft)
            # A link fails if another process was faster: then its key is the key.
            with contextlib.suppress(FileExistsError):
                os.link(draft, self._path)
        finally:
            draft.unlink(missing_ok=True)
        return self._path.read_bytes()

    async def _asked(self) -> bytes:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
        except OSError as error:
            raise SecretsUnavailable(
                f"the command for the secrets' key can't be run: {error.strerror}"
            ) from None
        try:
            async with asyncio.timeout(_PATIENCE):
                output, _ = await process.communicate()
        except TimeoutError:
            raise SecretsUnavailable("the command for the secrets' key did not answer in time") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            raise SecretsUnavailable(
                f"the command for the secrets' key failed (exit code {process.returncode})"
            )
        try:
            key = base64.b64decode(output.strip(), validate=True)
        except ValueError:
            key = b""
        if len(key) != 32:
            raise SecretsUnavailable("the command for the secrets' key printed no 32 bytes in base64")
        return key


def give(path: Path) -> None:
    """Make a file private, and its folder's owner its owner: root writes what the proxy has to read."""
    path.chmod(0o600)
    if os.geteuid() == 0:
        owner = path.absolute().parent.stat()
        os.chown(path, owner.st_uid, owner.st_gid)


def derive(key: bytes, purpose: str) -> bytes:
    """A key for one purpose."""
    return hmac.new(key, b"ringfence-egress/" + purpose.encode(), hashlib.sha256).digest()


def seal(key: bytes, data: bytes, about: str) -> bytes:
    """Encrypt; what it is about is not hidden, but bound to it."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = os.urandom(12)
    return nonce + AESGCM(key).encrypt(nonce, data, about.encode())


def unseal(key: bytes, data: bytes, about: str) -> bytes:
    """Decrypt.

    Raises:
        SecretsUnavailable: another key, other data, or about something else.
    """
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(data[:12], data[12:], about.encode())
    except (InvalidTag, ValueError):
        raise SecretsUnavailable(f"{about} can't be decrypted: the key is another one") from None
