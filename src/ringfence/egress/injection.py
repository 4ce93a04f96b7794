"""Credentials put into a request, and placeholders found in one. No I/O.

Each way gives a new target, headers or body; what the client had at that place itself is replaced.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from urllib.parse import parse_qsl, quote, quote_plus, urlencode

from ringfence.egress.http1 import Headers
from ringfence.egress.secrets import PLACEHOLDER
from ringfence.model.policy_network_checks import SECRET
from ringfence.model.values import dataclass

MOST_BODY = 8 * 1024 * 1024  # bytes of a body that has to be read before it is sent


class CannotInject(Exception):
    """The request has no place for the credential. The message says why."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request as it will be sent. ``body`` is ``None`` while it streams."""

    method: str
    host: str  # as in the Host header
    target: str
    headers: Headers
    body: bytes | None = None


def secret_names(inject: Mapping[str, str]) -> list[str]:
    """The secrets that a rule's injection names, in order."""
    return list(dict.fromkeys(name for value in inject.values() for name in re.findall(SECRET, value)))


def needs_body(inject: Mapping[str, str]) -> bool:
    """Whether the whole body has to be there."""
    return "field" in inject or "placeholder" in inject or "aws" in inject


def apply(
    inject: Mapping[str, str],
    values: Mapping[str, str],
    request: Outgoing,
    now: datetime.datetime | None = None,
) -> Outgoing:
    """The request with its credential.

    Raises:
        CannotInject: it has no place for it.
    """

    def filled(text: str) -> str:
        return re.sub(SECRET, lambda match: values[match[1]], text)

    if "header" in inject:
        return _with_header(request, inject["header"], filled(inject["value"]))
    if "bearer" in inject:
        return _with_header(request, "Authorization", "Bearer " + filled(inject["bearer"]))
    if "basic" in inject:
        encoded = base64.b64encode(filled(inject["basic"]).encode()).decode()
        return _with_header(request, "Authorization", "Basic " + encoded)
    if "query" in inject:
        return _with_query(request, inject["query"], filled(inject["value"]))
    if "field" in inject:
        return _with_field(request, inject["field"], filled(inject["value"]))
    if "aws" in inject:
        return _signed(inject, filled(inject["aws"]), request, now or datetime.datetime.now(datetime.UTC))
    return request  # placeholder: swapped where it stands


def _with_header(request: Outgoing, name: str, value: str) -> Outgoing:
    if not all(letter == "\t" or 32 <= ord(letter) < 127 or 128 <= ord(letter) < 256 for letter in value):
        raise CannotInject("the secret has characters that a header can't carry")
    headers = [(own, text) for own, text in request.headers if own.lower() != name.lower()]
    return Outgoing(request.method, request.host, request.target, [*headers, (name, value)], request.body)


def _with_query(request: Outgoing, name: str, value: str) -> Outgoing:
    path, _, query = request.target.partition("?")
    kept = [part for part in query.split("&") if part and _decoded(part.partition("=")[0]) != name]
    kept.append(f"{quote_plus(name)}={quote(value, safe='')}")
    target = f"{path}?{'&'.join(kept)}"
    return Outgoing(request.method, request.host, target, request.headers, request.body)


def _decoded(text: str) -> str:
    found = parse_qsl(text + "=", keep_blank_values=True)
    return found[0][0] if found else text


def content_type(headers: Headers) -> str:
    """The media type of a message, in small letters."""
    found = next((value for name, value in headers if name.lower() == "content-type"), "")
    return found.partition(";")[0].strip().lower()


def _with_field(request: Outgoing, name: str, value: str) -> Outgoing:
    kind = content_type(request.headers)
    body = request.body or b""
    if kind == "application/x-www-form-urlencoded":
        fields = [
            pair for pair in parse_qsl(body.decode("latin-1"), keep_blank_values=True) if pair[0] != name
        ]
        data = urlencode([*fields, (name, value)]).encode()
    elif kind == "application/json" or kind.endswith("+json"):
        try:
            document = json.loads(body)
            if not isinstance(document, dict):
                raise CannotInject("the body is no JSON object")
            document[name] = value
            data = json.dumps(document).encode()
        except (ValueError, RecursionError):
            raise CannotInject("the body is not the JSON that it says it is") from None
    else:
        raise CannotInject(f"a body of type {kind[:60] or 'unknown'} has no fields; send JSON or a form")
    return Outgoing(request.method, request.host, request.target, request.headers, data)


# -- placeholders


def found_in(target: str, headers: Headers, body: bytes | None = None) -> set[str]:
    """The placeholders in a request, in small letters: also in basic credentials."""
    texts = [target, *(value for _, value in headers)]
    texts += [name for name, _ in headers]
    texts += filter(None, (_basic(value) for _, value in headers))
    if body is not None:
        texts.append(body.decode("latin-1"))
    return {found.lower() for text in texts for found in PLACEHOLDER.findall(text)}


def _basic(value: str) -> str | None:
    kind, _, rest = value.partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        return base64.b64decode(rest.strip(), validate=True).decode("latin-1")
    except (binascii.Error, ValueError):
        return None


def swap(request: Outgoing, values: Mapping[str, str]) -> Outgoing:
    """The request with placeholders (keys, in small letters) turned into what they stand for."""

    def put(text: str, encode: bool = False) -> str:
        def one(match: re.Match[str]) -> str:
            value = values.get(match[0].lower(), match[0])
            return quote(value, safe="") if encode else value

        return PLACEHOLDER.sub(one, text)

    headers: Headers = []
    for name, value in request.headers:
        basic = _basic(value)
        if basic is not None and PLACEHOLDER.search(basic):
            text = base64.b64encode(put(basic).encode("latin-1", "replace")).decode()
            headers.append((name, "Basic " + text))
        else:
            headers.append((name, put(value)))
    body = request.body
    if body is not None and PLACEHOLDER.search(body.decode("latin-1")):
        form = content_type(headers) == "application/x-www-form-urlencoded"
        as_json = content_type(headers) == "application/json"

        def in_body(match: re.Match[bytes]) -> bytes:
            value = values.get(match[0].decode().lower())
            if value is None:
                return match[0]
            text = quote_plus(value) if form else json.dumps(value)[1:-1] if as_json else value
            return text.encode()

        body = re.sub(PLACEHOLDER.pattern.encode(), in_body, body, flags=re.IGNORECASE)
    return Outgoing(request.method, request.host, put(request.target, True), headers, body)


# -- AWS, Signature Version 4


def _signed(inject: Mapping[str, str], pair: str, request: Outgoing, now: datetime.datetime) -> Outgoing:
    key_id, _, key = pair.partition(":")
    service, region = inject.get("service", ""), inject.get("region", "")
    guessed = _endpoint(request.host)
    service, region = service or guessed[0], region or guessed[1]
    if not service or not region:
        raise CannotInject("the service and region can't be told from the host; name them in inject")
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    body_hash = hashlib.sha256(request.body or b"").hexdigest()
    dropped = ("authorization", "x-amz-date", "x-amz-content-sha256", "x-amz-security-token")
    headers = [(name, value) for name, value in request.headers if name.lower() not in dropped]
    headers += [("X-Amz-Date", stamp), ("X-Amz-Content-Sha256", body_hash)]
    signing = {"host": request.host}
    for name, value in headers:
        lower = name.lower()
        if lower.startswith("x-amz-") or lower == "content-type":
            signing[lower] = (
                f"{signing[lower]},{value.strip()}" if lower in signing else " ".join(value.split())
            )
    path, _, query = request.target.partition("?")
    pairs = sorted(
        (quote(a, safe="-_.~"), quote(b, safe="-_.~")) for a, b in parse_qsl(query, keep_blank_values=True)
    )
    canonical_path = path if service == "s3" else quote(path, safe="/-_.~")
    names = ";".join(sorted(signing))
    canonical = "\n".join(
        [
            request.method,
            canonical_path,
            "&".join(f"{a}={b}" for a, b in pairs),
            *(f"{name}:{signing[name]}" for name in sorted(signing)),
            "",
            names,
            body_hash,
        ]
    )
    scope = f"{stamp[:8]}/{region}/{service}/aws4_request"
    to_sign = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    signature = b"AWS4" + key.encode()
    for part in (stamp[:8], region, service, "aws4_request"):
        signature = hmac.new(signature, part.encode(), hashlib.sha256).digest()
    mark = hmac.new(signature, to_sign.encode(), hashlib.sha256).hexdigest()
    credential = f"AWS4-HMAC-SHA256 Credential={key_id}/{scope}, SignedHeaders={names}, Signature={mark}"
    # The query is sent in the form that was signed.
    target = path + ("?" + "&".join(f"{a}={b}" for a, b in pairs) if pairs else "")
    signed = Outgoing(request.method, request.host, target, headers, request.body)
    return _with_header(signed, "Authorization", credential)


def _endpoint(host: str) -> tuple[str, str]:
    """Service and region in the name of an AWS endpoint."""
    labels = host.partition(":")[0].split(".")
    if labels[-2:] != ["amazonaws", "com"]:
        return "", ""
    labels = labels[:-2]
    if len(labels) >= 2 and re.fullmatch(r"[a-z]{2}(-[a-z]+)+-\d", labels[-1]):
        return labels[-2].removesuffix("-fips"), labels[-1]
    return labels[-1], "us-east-1"
