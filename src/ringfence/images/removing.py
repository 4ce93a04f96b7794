"""Removing unpacked trees, whatever their modes say."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

_MOST_TRIES = 10  # while others remove the same


def remove_tree(path: Path | str) -> None:
    """Remove a folder and everything in it; it may be gone already. Never follows a link.

    Raises:
        OSError: something can't be removed.
    """

    def again(function: Any, name: str, error: Any) -> None:
        if isinstance(error[1], FileNotFoundError):
            return  # somebody else removes it too
        # A folder without rights of its owner: as a normal user it can't be emptied as it is.
        for folder in (os.path.dirname(name), name):
            if os.path.isdir(folder) and not os.path.islink(folder):
                os.chmod(folder, 0o700)
        if os.path.isdir(name) and not os.path.islink(name):
            shutil.rmtree(name)
        else:
            function(name)

    for _ in range(_MOST_TRIES):
        if not os.path.lexists(path):
            return
        try:
            shutil.rmtree(path, onerror=again)
        except FileNotFoundError:
            continue
        return
