"""Wire types that several routes share, and those of sandboxes.

Bodies are strict: an unknown field is refused by name, and ``"5"`` is no number. Queries are text, so there
numbers are read from it. Answers are documented by models, and made from plain mappings.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MOST_LABELS = 64
Label = Annotated[str, Field(max_length=256)]
LabelName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")]
Labels = Annotated[dict[LabelName, Label], Field(max_length=MOST_LABELS)]
Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
EnvName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^=\x00]+$")]
EnvValue = Annotated[str, Field(max_length=128 * 1024, pattern=r"^[^\x00]*$")]
Env = Annotated[dict[EnvName, EnvValue], Field(max_length=1024)]
Seconds = Annotated[float, Field(gt=0, le=366 * 24 * 3600, allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=256)]
Path = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]


class Body(BaseModel):
    """A JSON body."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Query(BaseModel):
    """Parameters of a query."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Shown(BaseModel):
    """An answer; more fields may come with later versions."""

    model_config = ConfigDict(extra="allow", frozen=True)


class Paging(Query):
    """One page of a list."""

    limit: int = Field(100, ge=1, le=1000, description="Most items of this page.")
    cursor: str = Field("", max_length=1024, description="`next_cursor` of the page before.")


class Page(Shown):
    """One page of a list."""

    items: list[dict[str, Any]]
    next_cursor: str | None = Field(None, description="For the next page; null: this is the last one.")


class Content(Body):
    """A file's content: text, or base64."""

    content: str
    encoding: Literal["utf-8", "base64"] = "utf-8"


class Attached(Body):
    """A volume at a path inside."""

    volume: Text
    path: Path
    read_only: bool = True


class CreateSandbox(Body):
    """A sandbox, please. `policy`: the name of a preset, or the document of a policy file (docs/policy.md);
    the fields after it replace single values of it.
    """

    template: Text = "host"
    snapshot: Text = Field("", description="Start from this saved sandbox instead of a template.")
    pool: Text = Field("", description="Take a member of this pool, or wait for one.")
    policy: Annotated[str, Field(max_length=64)] | dict[str, Any] | None = None
    runtime: Text | None = None
    level: Literal["L1", "L2", "L3", "L4"] | None = None
    size: Literal["small", "medium", "large"] | None = None
    cpus: Annotated[float, Field(gt=0, le=4096, allow_inf_nan=False)] | None = None
    memory: Annotated[int, Field(gt=0, lt=2**63)] | Text | None = Field(None, description="Bytes, or 512MiB.")
    disk: Annotated[int, Field(gt=0, lt=2**63)] | Text | None = None
    timeout: Seconds | Text | None = Field(
        None, description="Seconds (or 30m) until it ends, whatever happens."
    )
    idle: Seconds | Text | None = Field(
        None, description="Seconds without use until it is paused or stopped."
    )
    on_idle: Literal["pause", "stop"] | None = None
    network: Literal["none", "egress", "open"] | dict[str, Any] | None = None
    env: Env = Field(default_factory=dict)
    labels: Labels = Field(default_factory=dict)
    secrets: Annotated[dict[Name, EnvValue], Field(max_length=64)] = Field(
        default_factory=dict, description="Files in /run/secrets, in memory only; never stored."
    )
    files: Annotated[dict[Path, str | Content], Field(max_length=1000)] = Field(
        default_factory=dict, description="Written before it counts as running."
    )
    volumes: Annotated[tuple[Attached, ...], Field(max_length=16)] = ()
    wait: bool = Field(True, description="Answer when it runs; else as soon as it is accepted (202).")
    start_timeout: Annotated[float, Field(gt=0, le=600)] = 60.0
    agent: Text | None = None
    parent_agent: Text | None = None
    agent_class: (
        Literal["conversational", "tool-calling", "code-executing", "planning", "multi-agent"] | None
    ) = None
    task: Text | None = None


class UpdateSandbox(Body):
    """Changes of the door. What is left out stays."""

    labels: Labels | None = None
    env: Env | None = None
    timeout: Seconds | Text | None = Field(None, description="Seconds from now until it ends.")
    idle: Seconds | Text | None = None
    on_idle: Literal["pause", "stop"] | None = None
    network: Literal["none", "egress", "open"] | dict[str, Any] | None = None


class Extend(Body):
    """More time: so many seconds from now."""

    timeout: Seconds


class MakeSnapshot(Body):
    """A snapshot, please. `kind`: `disk`, or `memory` with everything that runs; else the best there is."""

    name: Name | None = None
    kind: Literal["disk", "memory"] | None = None


class Fork(Body):
    """Copies of a sandbox, please."""

    count: Annotated[int, Field(ge=1, le=32)] = 1
    labels: Labels = Field(default_factory=dict)


class SandboxQuery(Paging):
    """Which sandboxes."""

    label: tuple[str, ...] = Field((), max_length=16, description="`name=value`; all must fit.")
    state: tuple[str, ...] = Field((), max_length=16, description="Only these states.")
    order: Literal["oldest", "newest"] = "oldest"


class Sandbox(Shown):
    """A sandbox. Times are seconds since the epoch."""

    id: str
    state: str
    project: str
    template: str
    runtime: str
    pool: str
    labels: dict[str, str]
    created_at: float
    started_at: float | None
    deadline: float | None
    ended_at: float | None
    cause: str
    detail: str
    exit_code: int | None
    boundary: dict[str, Any] | None
    capabilities: dict[str, Any]


class SandboxPage(Page):
    """One page of sandboxes."""

    items: list[Sandbox]  # type: ignore[assignment]
