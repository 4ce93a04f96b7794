"""The inference guard: ``http://inference`` inside is a model API outside, which the host chooses. No I/O."""

from __future__ import annotations

import json
import re
from typing import Any

from ringfence.egress.bounded import TooLong, bounded
from ringfence.egress.names import Host, parse_host
from ringfence.egress.policy import BadPath, Rule, normal_path
from ringfence.model.policy import Inference, NetworkRule

NAME = "inference"
_PATIENCE = 1.0  # seconds of CPU for one body: the doors of others wait meanwhile

_MASKS = {
    # Nothing is given back: what comes next is none of these letters, and bodies are long.
    "email": r"[A-Za-z0-9._%+\-]{1,64}+@[A-Za-z0-9\-]{1,63}+(?:\.[A-Za-z0-9\-]{1,63}+){1,8}",
    "phone": r"(?<![\w.])\+?\d{1,3}[ .\-]?\(?\d{2,4}\)?[ .\-]?\d{3,4}[ .\-]?\d{2,4}(?![\w.])",
    "card": r"(?<!\d)(?:\d[ \-]?){12,18}\d(?!\d)",
    "iban": r"\b[A-Z]{2}\d{2}(?:[ ]?[A-Z0-9]{4}){2,7}(?:[ ]?[A-Z0-9]{1,4})?\b",
    "ip": r"(?<![\d.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\d.])",
    "ssn": r"(?<!\d)\d{3}-\d{2}-\d{4}(?!\d)",
}
_ORDER = ("email", "iban", "ssn", "card", "ip", "phone")  # the more exact ones first


class Refusal(Exception):
    """The request may not go to the model. ``code`` is stable."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Guard:
    """The guard of one sandbox."""

    def __init__(self, inference: Inference) -> None:
        match = re.fullmatch(r"(https?)://(\[[^\]]+\]|[^/:]+)(?::(\d+))?(/.*)?", inference.upstream)
        assert match is not None  # the policy was checked
        self.source = inference
        self.scheme = match[1]
        self.host: Host = parse_host(match[2])
        self.port = int(match[3] or (443 if self.scheme == "https" else 80))
        self.base = (match[4] or "").rstrip("/")
        source = NetworkRule(
            str(self.host),
            (self.port,),
            paths=inference.paths,
            inject=inference.inject,
            protocol="tls" if self.scheme == "https" else "http",
            tls="inspect" if self.scheme == "https" else None,
            addresses=inference.addresses,
            budget=inference.budget,
        )
        self.rule = Rule(0, source, None, "inference")
        named = [name for name in _ORDER if name in inference.mask]
        self._masks = [(name, re.compile(_MASKS[name])) for name in named]
        self._masks += [("masked", re.compile(text)) for text in inference.mask if text not in _MASKS]

    def target(self, target: str) -> tuple[str, str]:
        """Path and query at the upstream.

        Raises:
            BadPath: there is no such.
            Refusal: its path is not among the allowed ones.
        """
        path, query = normal_path(target)
        if self.base and not (path == self.base or path.startswith(self.base + "/")):
            path = self.base + path
        rule = self.rule
        if (rule.exact or rule.prefixes) and path not in rule.exact and not path.startswith(rule.prefixes):
            raise Refusal("path", f"{path[:200]} is not among {', '.join(self.source.paths[:5])}")
        return path, query

    @property
    def reads(self) -> bool:
        """Whether bodies have to be read."""
        return bool(self._masks or self.source.models)

    def body(self, kind: str, data: bytes) -> tuple[bytes, dict[str, int]]:
        """The body as it may leave, and how often each mask has found something.

        Raises:
            Refusal: a model that is not allowed, or a body in which nothing can be looked for.
        """
        try:
            return bounded(_PATIENCE, lambda: self._body(kind, data))
        except TooLong:
            raise Refusal("body", "it takes too long to look through this body; send less at once") from None

    def _body(self, kind: str, data: bytes) -> tuple[bytes, dict[str, int]]:
        counts: dict[str, int] = {}
        if not data:
            return data, counts
        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise Refusal("body", "a body that is no text can't be looked through") from None
        if kind == "application/json" or kind.endswith("+json") or not kind:
            try:
                document = json.loads(text)
                self._check_model(document)
                return json.dumps(self._masked(document, counts)).encode(), counts
            except (ValueError, RecursionError):
                raise Refusal("body", "a body that is no JSON can't be looked through") from None
        if kind.startswith("multipart/") or self.source.models:
            raise Refusal("body", f"a body of type {kind[:60]} can't be looked through; send JSON")
        return self._text(text, counts).encode(), counts

    def _check_model(self, document: Any) -> None:
        if not self.source.models:
            return
        model = document.get("model") if isinstance(document, dict) else None
        if model not in self.source.models:
            raise Refusal(
                "model", f"model {str(model)[:80]!r} is not among {', '.join(self.source.models[:8])}"
            )

    def _masked(self, value: Any, counts: dict[str, int]) -> Any:
        if isinstance(value, str):
            return self._text(value, counts)
        if isinstance(value, dict):
            return {self._text(key, counts): self._masked(part, counts) for key, part in value.items()}
        if isinstance(value, list):
            return [self._masked(part, counts) for part in value]
        return value

    def _text(self, text: str, counts: dict[str, int]) -> str:
        for name, pattern in self._masks:

            def mark(match: re.Match[str], name: str = name) -> str:
                if name == "card" and not _luhn(match[0]):
                    return match[0]
                counts[name] = counts.get(name, 0) + 1
                return f"[{name}]"

            text = pattern.sub(mark, text)
        return text


def _luhn(text: str) -> bool:
    digits = [int(letter) for letter in text if letter.isdigit()]
    total = sum(digits[-1::-2]) + sum(sum(divmod(2 * digit, 10)) for digit in digits[-2::-2])
    return total % 10 == 0


__all__ = ["NAME", "BadPath", "Guard", "Refusal"]
