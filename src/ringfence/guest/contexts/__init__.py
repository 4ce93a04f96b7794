"""Code contexts: stateful interpreters in a sandbox, spoken to over a link to its agent.

``Contexts(link)`` makes, lists and ends them; a call yields typed events. A context is a process of the
sandbox with an id of its own, so it outlives links and host processes, and what it says is kept in its ring:
another host process goes on by offset. The programs that run inside are the files of
:mod:`ringfence.guest.contexts.kernels`. All that comes from them is hostile.
"""

from __future__ import annotations

from ringfence.guest.contexts.calls import Call
from ringfence.guest.contexts.contexts import Context, Contexts
from ringfence.guest.contexts.reading import Place
from ringfence.guest.contexts.results import ContextEvent, Failure, Finished, Ran, Result, Text

__all__ = [
    "Call",
    "Context",
    "ContextEvent",
    "Contexts",
    "Failure",
    "Finished",
    "Place",
    "Ran",
    "Result",
    "Text",
]
