"""The software bill of materials: CycloneDX 1.5, JSON. The same template gives the same document."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

from ringfence.images.contract import Template
from ringfence.images.scanning.packages import Found, Package

SPEC = "1.5"
_NAMESPACE = uuid.UUID("5f2a7d0e-6f0c-5c39-9d5f-0f6f0a5b9e21")


def cyclonedx(template: Template, found: Found, version: str) -> dict[str, Any]:
    """The document, JSON-able. ``version``: Ringfence's own."""
    name, _, tag = template.name.partition(":")
    root = f"template:{template.digest}"
    components: list[dict[str, Any]] = []
    seen: dict[str, dict[str, Any]] = {}
    for package in found.packages:
        reference = package.purl(*found.distribution[:2])
        if reference in seen:  # the same package in several places
            seen[reference]["evidence"]["occurrences"].append({"location": package.place})
            continue
        seen[reference] = _component(package, reference)
        components.append(seen[reference])
    if found.distribution[0]:
        system, release, pretty = found.distribution
        components.append(
            {
                "type": "operating-system",
                "bom-ref": f"os:{system}@{release}",
                "name": system,
                "version": release,
                **({"description": pretty} if pretty else {}),
            }
        )
    made = datetime.fromtimestamp(template.made_at or 0, UTC).replace(microsecond=0)
    return {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPEC}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPEC,
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, template.digest)}",
        "version": 1,
        "metadata": {
            "timestamp": made.isoformat().replace("+00:00", "Z"),
            "tools": {"components": [{"type": "application", "name": "ringfence", "version": version}]},
            "component": {
                "type": "container",
                "bom-ref": root,
                "name": name or template.digest,
                "version": tag or template.digest,
                "hashes": [{"alg": "SHA-256", "content": template.digest.removeprefix("sha256:")}],
            },
        },
        "components": components,
        "dependencies": [{"ref": root, "dependsOn": [each["bom-ref"] for each in components]}],
    }


def _component(package: Package, reference: str) -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": reference,
        "name": package.name,
        "version": package.version,
        "purl": reference,
        "properties": [{"name": "ringfence:kind", "value": package.kind}],
        "evidence": {"occurrences": [{"location": package.place}]},
    }
    if package.licence:
        component["licenses"] = [{"license": {"name": package.licence}}]
    if package.source:
        component["properties"].append({"name": "ringfence:source", "value": package.source})
    return component
