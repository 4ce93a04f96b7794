"""Questions posted to a program of the operator's."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

_PATIENCE = 30.0
_MOST = 64 * 1024


def post(url: str, event: dict[str, Any]) -> dict[str, bool] | None:
    """Post a question; ``None``: no answer in the response, somebody may give one elsewhere.

    The answer is ``{"answer": "allow" | "deny", "remember": true | false}``.
    """
    if not url.startswith(("http://", "https://")):
        return None
    body = json.dumps(event).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})  # noqa: S310 - checked above
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_PATIENCE) as response:
            answer = json.loads(response.read(_MOST))
    except (OSError, ValueError, urllib.error.URLError):
        return None
    if not isinstance(answer, dict) or answer.get("answer") not in ("allow", "deny"):
        return None
    return {"allow": answer["answer"] == "allow", "remember": answer.get("remember") is True}
