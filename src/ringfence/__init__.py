"""Ringfence: the place where AI agents run.

Packages, from the top down (imports point downwards only; import-linter proves it): ``cli`` > ``sdk`` >
``serving`` > ``api`` > ``control`` > ``placement``, ``egress``, ``store`` > ``node`` > ``images`` >
``runtimes`` > ``guest`` > ``model``; ``conformance`` sits beside ``cli``.

The SDK's names are here as well: ``from ringfence import Sandbox``. They are imported when they are asked
for, so that the command line does not wait for them.
"""

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.sdk import AsyncJob as AsyncJob
    from ringfence.sdk import AsyncPool as AsyncPool
    from ringfence.sdk import AsyncSandbox as AsyncSandbox
    from ringfence.sdk import AsyncService as AsyncService
    from ringfence.sdk import AsyncSnapshot as AsyncSnapshot
    from ringfence.sdk import AsyncTemplate as AsyncTemplate
    from ringfence.sdk import AsyncVolume as AsyncVolume
    from ringfence.sdk import Job as Job
    from ringfence.sdk import Policy as Policy
    from ringfence.sdk import Pool as Pool
    from ringfence.sdk import RingfenceError as RingfenceError
    from ringfence.sdk import Sandbox as Sandbox
    from ringfence.sdk import Service as Service
    from ringfence.sdk import Snapshot as Snapshot
    from ringfence.sdk import Template as Template
    from ringfence.sdk import Volume as Volume

_SDK = frozenset(
    name + kind
    for name in ("", "Async")
    for kind in ("Sandbox", "Service", "Job", "Pool", "Snapshot", "Template", "Volume")
) | {"Policy", "RingfenceError"}


def __getattr__(name: str) -> object:
    if name not in _SDK:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found: object = getattr(import_module("ringfence.sdk"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_SDK})
