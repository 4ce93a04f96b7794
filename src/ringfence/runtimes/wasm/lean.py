"""The few things of the standard library that a worker needs, from where they are made.

``json``, ``typing``, ``re``, ``enum``, ``collections``, ``functools``, ``contextlib``, ``signal`` and
``socket`` take longer to import, together, than all the rest of a worker: every sandbox would wait for that.
So neither the worker nor what it imports at its top may import one of them; a test looks.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections import deque
    from contextlib import suppress
    from socket import socket
else:
    import _signal as signal
    import _socket
    from _collections import deque

    class socket(_socket.socket):
        """As the one of that name, as far as it is needed here."""

        __slots__ = ()

        def accept(self):
            """See there."""
            descriptor, address = self._accept()
            return socket(fileno=descriptor), address

    class suppress:
        """As the one of that name."""

        __slots__ = ("kinds",)

        def __init__(self, *kinds):
            self.kinds = kinds

        def __enter__(self):
            return None

        def __exit__(self, kind, error, trace):
            return kind is not None and issubclass(kind, self.kinds)


__all__ = ["deque", "signal", "socket", "suppress"]
