"""How old templates are, and how they are made again from where they came from."""

from __future__ import annotations

import time

from ringfence.images.contract import Template
from ringfence.model.errors import WrongState
from ringfence.model.quantities import format_duration

BUILD = "build"


def fresh_at(template: Template) -> float:
    """When its base was last taken from its source, in seconds since the epoch: fetched, made from packages.

    What is built on another template is as old as that one. When the makers of an image made it says little:
    the newest one of a tag may be old, and no refresh would make it younger.
    """
    if template.source == BUILD and template.base_made_at:
        return min(template.base_made_at, template.made_at)
    return template.made_at


def age(template: Template, now: float | None = None) -> float:
    """Seconds since :func:`fresh_at`; not negative."""
    return max(0.0, (time.time() if now is None else now) - fresh_at(template))


def check_age(template: Template, most: float | None, now: float | None = None) -> None:
    """Refuse a template that is older than a policy lets it be. ``most``: seconds; None: any age will do.

    Raises:
        WrongState: it is too old; the hint says how to refresh it.
    """
    if most is None:
        return
    old = age(template, now)
    if old <= most:
        return
    name = template.name or template.digest
    raise WrongState(
        f"template {name} is {_days(old)} old, and the policy wants {_days(most)} at most (maxTemplateAge)",
        hint=f"ringfence template refresh {name}",
        template=name,
        age=round(old),
        most=round(most),
    )


def _days(seconds: float) -> str:
    return format_duration(float(round(seconds - seconds % 3600 if seconds > 86400 else seconds)))
