"""The Python SDK: ``Sandbox``, ``AsyncSandbox``, ``Job``, ``Volume``, ``Template``, ``Policy``, ``Pool``.

Belongs here: everything that a user's program needs to speak HTTP and WebSocket to a service; written once as
coroutines, with a blocking half that a script writes from it (``scripts/sdk_blocking.py``). Does not belong
here: anything a service decides. Imports only ``ringfence.model``, and the reader of hostile archives
(``guest.archives``); ``sdk.embedded`` alone starts a service where none is configured.

Names are imported when they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfence.model.errors import RingfenceError as RingfenceError
    from ringfence.sdk.blocking.contexts import Context as Context
    from ringfence.sdk.blocking.files import Files as Files
    from ringfence.sdk.blocking.jobs import Job as Job
    from ringfence.sdk.blocking.pools import Pool as Pool
    from ringfence.sdk.blocking.ports import Tunnel as Tunnel
    from ringfence.sdk.blocking.process import Process as Process
    from ringfence.sdk.blocking.sandbox import Sandbox as Sandbox
    from ringfence.sdk.blocking.service import Service as Service
    from ringfence.sdk.blocking.templates import Snapshot as Snapshot
    from ringfence.sdk.blocking.templates import Template as Template
    from ringfence.sdk.blocking.volumes import Volume as Volume
    from ringfence.sdk.contexts import AsyncContext as AsyncContext
    from ringfence.sdk.failures import ServiceUnreachable as ServiceUnreachable
    from ringfence.sdk.files import AsyncFiles as AsyncFiles
    from ringfence.sdk.jobs import AsyncJob as AsyncJob
    from ringfence.sdk.policy import Policy as Policy
    from ringfence.sdk.pools import AsyncPool as AsyncPool
    from ringfence.sdk.ports import AsyncTunnel as AsyncTunnel
    from ringfence.sdk.process import AsyncProcess as AsyncProcess
    from ringfence.sdk.results import CodeResult as CodeResult
    from ringfence.sdk.results import CommandFailed as CommandFailed
    from ringfence.sdk.results import CommandResult as CommandResult
    from ringfence.sdk.results import FileInfo as FileInfo
    from ringfence.sdk.results import Output as Output
    from ringfence.sdk.results import SandboxInfo as SandboxInfo
    from ringfence.sdk.sandbox import AsyncSandbox as AsyncSandbox
    from ringfence.sdk.service import AsyncService as AsyncService
    from ringfence.sdk.templates import AsyncSnapshot as AsyncSnapshot
    from ringfence.sdk.templates import AsyncTemplate as AsyncTemplate
    from ringfence.sdk.volumes import AsyncVolume as AsyncVolume

_HOMES = {
    "sandbox": ("Sandbox",),
    "process": ("Process",),
    "files": ("Files",),
    "contexts": ("Context",),
    "ports": ("Tunnel",),
    "jobs": ("Job",),
    "volumes": ("Volume",),
    "templates": ("Template", "Snapshot"),
    "pools": ("Pool",),
    "service": ("Service",),
}
_PLAIN = {
    "policy": ("Policy",),
    "failures": ("ServiceUnreachable",),
    "results": ("CodeResult", "CommandFailed", "CommandResult", "FileInfo", "Output", "SandboxInfo"),
}
_WHERE = {name: f"ringfence.sdk.blocking.{home}" for home, names in _HOMES.items() for name in names}
_WHERE |= {f"Async{name}": f"ringfence.sdk.{home}" for home, names in _HOMES.items() for name in names}
_WHERE |= {name: f"ringfence.sdk.{home}" for home, names in _PLAIN.items() for name in names}
_WHERE["RingfenceError"] = "ringfence.model.errors"

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(_WHERE[name]), name)
    globals()[name] = found
    return found
