"""``python -m ringfence`` is the ``ringfence`` command."""

from __future__ import annotations

from ringfence.cli.main import entry

if __name__ == "__main__":
    entry()
