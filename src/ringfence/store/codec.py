"""What both implementations make of values: JSON that keeps every string, texts that every database takes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ringfence.model.errors import InvalidRequest
from ringfence.store.contract import Add, Change, Event, Held, Put, Remove, Row

_BIGGEST = 2**53  # of an amount or revision: sums of them stay far below the databases' 2**63

_encode = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode


def storable(*texts: str | None) -> bool:
    """Whether every database can hold these texts: no NUL, no half of a surrogate pair."""
    for text in texts:
        if text is None or (text.isascii() and "\0" not in text):
            continue
        if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
            return False
    return True


def encode(value: Mapping[str, Any]) -> str:
    """A mapping as JSON in ASCII: NUL and half surrogates in its values survive as escapes.

    Raises:
        InvalidRequest: it holds what JSON has not (NaN, infinity, bytes, other objects, cycles).
    """
    try:
        return _encode(dict(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"not a JSON document: {error}") from None


def decode(text: str) -> dict[str, Any]:
    """The mapping that :func:`encode` was given. Of a key that stands there twice, the last counts."""
    value: dict[str, Any] = json.loads(text)
    return value


def row_of(columns: Sequence[Any]) -> Row:
    """A row from its columns, in the order of the fields of Row; labels and document as JSON text."""
    kind, id, project, state, key, due, created, revision, labels, document = columns
    return Row(
        kind,
        id,
        project,
        state,
        key,
        due,
        created,
        revision,
        {} if labels == "{}" else json.loads(labels),
        {} if document == "{}" else json.loads(document),
    )


def check(changes: Sequence[Change]) -> None:
    """Refuse what one of the databases could not hold, before anything is begun.

    Raises:
        InvalidRequest: a NUL in a name, a time that is no number, a change of no known type.
    """
    for change in changes:
        if isinstance(change, Put):
            _check_row(change.row)
        elif isinstance(change, Event):
            _texts(change.kind, change.subject, change.project, change.name)
            _times(change.at)
        elif isinstance(change, Remove):
            _texts(change.kind, change.id)
        elif isinstance(change, Add):
            _texts(change.counter)
            if abs(change.amount) > _BIGGEST or (change.most is not None and abs(change.most) > _BIGGEST):
                raise InvalidRequest(f"{change.counter}: {change.amount} is no amount")
            if change.every is not None and not 0 < change.every < _BIGGEST:
                raise InvalidRequest(f"{change.counter}: {change.every} s is no period")
        elif isinstance(change, Held):
            _texts(change.lease, change.owner)
        else:
            raise InvalidRequest(f"not a change: {change!r}")


def _check_row(row: Row) -> None:
    _texts(row.kind, row.id, row.project, row.state, row.key)
    _times(row.created, row.due)
    if not row.kind or not row.id:
        raise InvalidRequest("a row needs a kind and an id")
    if not 0 <= row.revision < _BIGGEST:
        raise InvalidRequest(f"{row.kind} {row.id}: {row.revision} is no revision")
    for name, value in row.labels.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidRequest(f"label {name!r}: names and values are texts")
        _texts(name, value)


def _texts(*texts: str) -> None:
    if not storable(*texts):
        raise InvalidRequest(f"not storable as text: {texts!r}")


def _times(*times: float | None) -> None:
    if any(at is not None and not math.isfinite(at) for at in times):
        raise InvalidRequest(f"not a time: {times!r}")


def merged(document: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """``more`` over ``document`` at the top level."""
    return {**document, **more}


def check_taken(into: str, project: str | None, due: float | None) -> None:
    """Refuse what a row that is taken could not become; InvalidRequest."""
    _texts(into, project or "")
    _times(due)


def check_lease(name: str, owner: str, seconds: float) -> None:
    """Refuse what can't be a lease; InvalidRequest."""
    _texts(name, owner)
    if not owner or not math.isfinite(seconds):
        raise InvalidRequest(f"no lease: {name!r} for {owner!r}, {seconds} s")
