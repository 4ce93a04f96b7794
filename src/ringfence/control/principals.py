"""Who asks: a key's organisation, project and user, and what the key may do."""

from __future__ import annotations

from ringfence.model.errors import NotAllowed
from ringfence.model.values import dataclass

# Each takes in those before it.
SCOPES = ("read", "run", "admin")


@dataclass(frozen=True, slots=True)
class Principal:
    """Whoever asks, as his key says. ``scopes``: of ``read`` (look), ``run`` (create, change, end) and
    ``admin`` (keys and limits of the project).

    ``operator``: administrates the service itself: organisations, projects and their quotas.
    """

    organisation: str
    project: str
    user: str = ""
    key_id: str = ""
    scopes: tuple[str, ...] = ("read",)
    operator: bool = False

    def may(self, scope: str) -> bool:
        """Whether a scope, or one that takes it in, is the key's."""
        return any(had in SCOPES and SCOPES.index(had) >= SCOPES.index(scope) for had in self.scopes)

    def require(self, scope: str) -> None:
        """Raise NotAllowed unless :meth:`may`."""
        if not self.may(scope):
            raise NotAllowed(
                f"this needs a key with the scope {scope}",
                hint="`ringfence key create --scope …` makes one",
                scope=scope,
            )

    def require_operator(self) -> None:
        """Raise NotAllowed unless this is the operator of the service."""
        if not (self.operator and self.may("admin")):
            raise NotAllowed("only the operator of the service may do this", hint="use the operator's key")
