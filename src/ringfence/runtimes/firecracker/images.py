"""The guest's kernel in the form that Firecracker boots: the uncompressed ELF inside Debian's ``vmlinuz``.

A bzImage (Documentation/arch/x86/boot.rst of Linux) has after its real-mode sectors a payload, at
``payload_offset``: the compressed kernel, with its uncompressed size in the last four bytes.
"""

from __future__ import annotations

import bz2
import contextlib
import lzma
import os
import shutil
import struct
import subprocess
import tempfile
import zlib

from ringfence.model.errors import HostLimit, RuntimeUnavailable
from ringfence.runtimes.vm.kernel import Kernel

MOST = 512 << 20  # bytes of an uncompressed kernel
_MAGIC, _VERSION = 0x53726448, 0x0208  # "HdrS"; the payload's place is told since this version
_ELF = b"\x7fELF\x02\x01"
_PROGRAMS = {
    b"\x28\xb5\x2f\xfd": ("zstd", ("zstd", "-dc")),
    b"\x02\x21\x4c\x18": ("lz4", ("lz4", "-dc")),
    b"\x89LZO": ("lzop", ("lzop", "-dc")),
}


def vmlinux(kernel: Kernel, store: str) -> str:
    """The kernel's ELF in a VM store; made there if it is not.

    Raises:
        RuntimeUnavailable: the kernel is none that can be taken apart here.
        HostLimit: the disk is full.
    """
    target = os.path.join(store, f"vmlinux-{kernel.digest[:32]}")
    if os.path.exists(target):
        return target
    try:
        with open(kernel.image, "rb") as file:
            content = uncompressed(file.read(MOST))
        descriptor, work = tempfile.mkstemp(prefix=".vmlinux-", dir=store)
        try:
            with open(descriptor, "wb") as made:
                made.write(content)
            os.chmod(work, 0o444)
            os.rename(work, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(work)
            raise
    except ValueError as error:
        raise RuntimeUnavailable(
            f"the guest kernel {kernel.image} can't be used by Firecracker: {error}",
            hint="name a folder with another kernel in RINGFENCE_KERNEL",
        ) from error
    except OSError as error:
        raise HostLimit(
            f"the guest kernel can't be made ready: {error.filename}: {error.strerror}",
            hint="is the disk of the state root full?",
        ) from error
    return target


def uncompressed(image: bytes) -> bytes:
    """The ELF in a bzImage; an ELF is its own.

    Raises:
        ValueError: it is neither, or damaged, or its compression is not known.
    """
    if image.startswith(_ELF):
        return image
    if len(image) < 0x260 or struct.unpack_from("<I", image, 0x202)[0] != _MAGIC:
        raise ValueError("it is no bzImage")
    if struct.unpack_from("<H", image, 0x206)[0] < _VERSION:
        raise ValueError("its boot protocol is too old to tell where the kernel is")
    sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    begin = (sectors + 1) * 512 + offset
    payload = image[begin : begin + length]
    if length < 16 or len(payload) != length:
        raise ValueError("it is cut off")
    size = struct.unpack("<I", payload[-4:])[0]
    if not 0 < size <= MOST:
        raise ValueError(f"it says that it has {size} bytes uncompressed")
    content = _decompressed(payload, size)
    if len(content) != size or not content.startswith(_ELF):
        raise ValueError("what is in it is not the kernel that it says")
    return content


def _decompressed(payload: bytes, size: int) -> bytes:
    try:
        if payload.startswith(b"\x1f\x8b"):
            return zlib.decompressobj(31).decompress(payload, size + 1)
        if payload.startswith(b"\xfd7zXZ\0"):
            return lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(payload, size + 1)
        if payload.startswith(b"\x5d\0\0"):
            return lzma.LZMADecompressor(lzma.FORMAT_ALONE).decompress(payload, size + 1)
        if payload.startswith(b"BZh"):
            return bz2.BZ2Decompressor().decompress(payload, size + 1)
    except (lzma.LZMAError, zlib.error, OSError) as error:
        raise ValueError(f"it is damaged: {error}") from None
    for magic, (package, command) in _PROGRAMS.items():
        if payload.startswith(magic):
            return _by_program(payload, package, command)
    raise ValueError("its compression is not known")


def _by_program(payload: bytes, package: str, command: tuple[str, ...]) -> bytes:
    program = shutil.which(command[0])
    if program is None:
        raise ValueError(f"its compression needs {package} (apt-get install {package})")
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as made:
        given.write(payload[:-4])
        given.seek(0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # Its exit status says little: what follows the kernel may be padding. The size is compared.
            subprocess.run(
                [program, *command[1:]], stdin=given, stdout=made, stderr=subprocess.DEVNULL, timeout=120
            )
        made.seek(0)
        return made.read(MOST + 1)
