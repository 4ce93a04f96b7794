"""The end of an archive."""

from __future__ import annotations

import io
import tarfile

import pytest

from ringfence.images.tarstream import MOST_PADDING, TarReader
from ringfence.model.errors import InvalidRequest


class Endless:
    """As /dev/zero is."""

    def __init__(self) -> None:
        self.given = 0

    def read(self, size: int, /) -> bytes:
        self.given += size
        assert self.given < 4 * MOST_PADDING
        return bytes(size)


def test_what_follows_the_end_of_an_archive_is_little() -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("empty"))
    whole = stream.getvalue()
    reader = TarReader(io.BytesIO(whole + bytes(MOST_PADDING - len(whole))))
    assert [entry.name for entry in reader] == [b"empty"]
    reader.finish()
    assert reader.offset == MOST_PADDING
    reader = TarReader(io.BytesIO(whole + bytes(2 * MOST_PADDING)))
    assert len(list(reader)) == 1
    with pytest.raises(InvalidRequest, match="follow the end"):
        reader.finish()


def test_zeros_without_an_end_are_not_read_for_ever() -> None:
    reader = TarReader(Endless())
    assert list(reader) == []
    with pytest.raises(InvalidRequest, match="follow the end"):
        reader.finish()
