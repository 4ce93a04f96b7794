"""What packages a template has: found through its layers; hostile records; the document's form."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from ringfence.images.contract import Layer, Template
from ringfence.images.scanning.documents import cyclonedx
from ringfence.images.scanning.packages import Found, scan
from ringfence.images.scanning.walking import Bounds, walk

OPAQUE = "trusted.overlay.opaque" if os.geteuid() == 0 else "user.overlay.opaque"
STATUS = """\
Package: curl
Status: install ok installed
Version: 7.88.1-10+deb12u5
Architecture: amd64
Source: curl (7.88.1)
Description: a tool
 Package: forged

Package: gone
Status: deinstall ok config-files
Version: 1
"""


def write(top: Path, path: str, text: str | bytes) -> Path:
    file = top / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


@pytest.fixture
def layers(tmp_path: Path) -> tuple[Path, Path]:
    """(upper, lower) of a template with packages of every kind."""
    lower, upper = tmp_path / "lower", tmp_path / "upper"
    upper.mkdir()
    write(lower, "etc/os-release", 'ID=debian\nVERSION_ID="12"\nPRETTY_NAME="Debian 12"\n')
    write(lower, "var/lib/dpkg/status", STATUS)
    write(lower, "var/lib/dpkg/status.d/base", "Package: base-files\nVersion: 12.4\nArchitecture: all\n")
    write(lower, "var/lib/dpkg/status.d/base.md5sums", "Package: forged\n")
    site = "usr/lib/python3/dist-packages"
    write(
        lower,
        f"{site}/Foo_Bar-1.0.dist-info/METADATA",
        "Name: Foo_Bar\nVersion: 1.0\nLicense: MIT\n\nName: forged\n",
    )
    write(lower, f"{site}/old.egg-info/PKG-INFO", "Name: old\nVersion: 2\n")
    write(lower, f"{site}/single-3.egg-info", "Name: single\nVersion: 3\n")
    write(lower, f"{site}/removed-1.dist-info/METADATA", "Name: removed\nVersion: 1\n")
    modules = "srv/app/node_modules"
    write(
        lower,
        f"{modules}/left-pad/package.json",
        json.dumps({"name": "left-pad", "version": "1.3.0", "license": "WTFPL"}),
    )
    write(lower, f"{modules}/@scope/x/package.json", json.dumps({"name": "@scope/x", "version": "2.0.0"}))
    write(lower, f"{modules}/left-pad/lib/package.json", json.dumps({"name": "no-package", "version": "1"}))
    write(lower, "srv/app/package.json", json.dumps({"name": "the-app", "version": "0"}))
    return upper, lower


def found(*layers: Path) -> dict[str, str]:
    return {each.name: each.version for each in scan(tuple(map(str, layers))).packages}


ALL = {
    "curl": "7.88.1-10+deb12u5", "base-files": "12.4", "Foo_Bar": "1.0", "old": "2", "single": "3",
    "removed": "1", "left-pad": "1.3.0", "@scope/x": "2.0.0",
}  # fmt: skip


def test_every_kind(layers: tuple[Path, Path]) -> None:
    assert found(*layers) == ALL
    result = scan(tuple(map(str, layers)))
    assert result.distribution == ("debian", "12", "Debian 12")
    assert result.notes == ()
    assert {each.name: each.purl("debian", "12") for each in result.packages} == {
        "curl": "pkg:deb/debian/curl@7.88.1-10+deb12u5?arch=amd64&distro=debian-12",
        "base-files": "pkg:deb/debian/base-files@12.4?arch=all&distro=debian-12",
        "Foo_Bar": "pkg:pypi/foo-bar@1.0",
        "old": "pkg:pypi/old@2",
        "single": "pkg:pypi/single@3",
        "removed": "pkg:pypi/removed@1",
        "left-pad": "pkg:npm/left-pad@1.3.0",
        "@scope/x": "pkg:npm/%40scope/x@2.0.0",
    }


def test_upper_layers_change_delete_and_hide(layers: tuple[Path, Path]) -> None:
    upper, _ = layers
    site = upper / "usr/lib/python3/dist-packages"
    write(upper, "var/lib/dpkg/status", STATUS.replace("7.88.1-10+deb12u5", "8"))
    site.mkdir(parents=True)
    try:
        os.mknod(site / "removed-1.dist-info", 0o020600, 0)
        (upper / "srv/app").mkdir(parents=True)
        os.setxattr(upper / "srv/app", OPAQUE, b"y")
    except OSError as error:
        pytest.skip(f"overlay's marks can't be made here: {error}")
    write(upper, "usr/lib/python3/dist-packages/single-3.egg-info", "Name: single\nVersion: 4\n")
    expected = {
        name: version for name, version in ALL.items() if name not in ("removed", "left-pad", "@scope/x")
    }
    assert found(*layers) == expected | {"curl": "8", "single": "4"}


def test_a_file_in_place_of_a_folder_hides_it(layers: tuple[Path, Path]) -> None:
    write(layers[0], "srv", "a file")
    assert set(ALL) - set(found(*layers)) == {"left-pad", "@scope/x"}


def test_a_status_that_is_a_link_is_not_followed(layers: tuple[Path, Path], tmp_path: Path) -> None:
    upper, _ = layers
    outside = write(tmp_path, "outside", "Package: host-secret\nStatus: install ok installed\nVersion: 1\n")
    (upper / "var/lib/dpkg").mkdir(parents=True)
    (upper / "var/lib/dpkg/status").symlink_to(outside)
    result = scan(tuple(map(str, layers)))
    assert not {"host-secret", "curl"} & {each.name for each in result.packages}
    assert "'/var/lib/dpkg/status' is no file" in result.notes[0]


@pytest.mark.parametrize("folder", ["var/lib/dpkg", "usr/lib/python3/dist-packages"])
def test_a_folder_that_is_a_link_is_not_entered(tmp_path: Path, folder: str) -> None:
    outside = tmp_path / "outside"
    write(outside, "status", STATUS)
    write(outside, "x-1.dist-info/METADATA", "Name: x\nVersion: 1\n")
    top = tmp_path / "top"
    (top / folder).parent.mkdir(parents=True)
    (top / folder).symlink_to(outside)
    assert found(top) == {}


def test_hostile_records(tmp_path: Path) -> None:
    top = tmp_path / "top"
    write(
        top, "var/lib/dpkg/status", b"Package: bad\xff\xfe\nStatus: install ok installed\nVersion: 1\x1b[2J\n"
    )
    with open(write(top, "var/lib/dpkg/status.d/huge", ""), "wb") as file:
        file.truncate(1 << 40)
    modules = top / "app/node_modules"
    write(top, "app/node_modules/deep/package.json", "[" * 100_000)
    write(top, "app/node_modules/list/package.json", "[]")
    write(
        top,
        "app/node_modules/odd/package.json",
        json.dumps({"name": "odd", "version": {}, "license": {"type": "MIT"}}),
    )
    with open(write(top, "app/node_modules/huge/package.json", ""), "wb") as file:
        file.truncate(1 << 40)
    (modules / "linked").mkdir()
    (modules / "linked/package.json").symlink_to("/etc/passwd")
    write(top, "site/piped-1.2.dist-info/RECORD", "")
    os.mkfifo(top / "site/piped-1.2.dist-info/METADATA")
    write(top, "site/no_name-3.dist-info/METADATA", "Version: 3\n")
    (top / "site/loop").symlink_to(".")
    result = scan((str(top),))
    assert {each.name: each.version for each in result.packages} == {
        "bad\ufffd\ufffd": "1\ufffd[2J",  # no control characters
        "odd": "",
        "piped": "1.2",  # by the folder's name
        "no_name": "3",
    }
    text = " ".join(result.notes)
    for name in ("deep", "list", "huge/package.json", "status.d/huge", "linked", "piped", "no_name"):
        assert name in text


def test_bounds_are_said(tmp_path: Path) -> None:
    for number in range(20):
        write(tmp_path, f"a/{number}/x", "")
    notes: list[str] = []
    assert len(list(walk((str(tmp_path),), notes, Bounds(entries=10)))) < 20
    assert "more than 10 files" in notes[0]
    notes.clear()
    list(walk((str(tmp_path),), notes, Bounds(depth=1)))
    assert "deeper than 1" in notes[0]


TOP = {
    "$schema", "bomFormat", "specVersion", "serialNumber", "version", "metadata", "components",
    "dependencies",
}  # fmt: skip
COMPONENT = {
    "type", "bom-ref", "name", "version", "description", "purl", "properties", "evidence", "licenses",
}  # fmt: skip


def document(result: Found) -> dict[str, object]:
    layer = Layer("sha256:" + "a" * 64, "/x")
    return cyclonedx(Template("sha256:" + "b" * 64, "app:1", (layer,), made_at=1e9), result, "9")


def test_the_document_is_cyclonedx(layers: tuple[Path, Path]) -> None:
    result = scan(tuple(map(str, layers)))
    made = document(result)
    assert made == document(result)  # the same template gives the same document
    assert (made["bomFormat"], made["specVersion"], made["version"]) == ("CycloneDX", "1.5", 1)
    assert re.fullmatch(
        r"urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", str(made["serialNumber"])
    )
    # The fields that the published schema allows at each place: it has additionalProperties: false.
    assert set(made) <= TOP
    metadata, components = made["metadata"], made["components"]
    assert isinstance(metadata, dict) and isinstance(components, list)
    assert metadata["timestamp"] == "2001-09-09T01:46:40Z"
    assert metadata["component"]["type"] == "container" and metadata["component"]["name"] == "app"
    references = [each["bom-ref"] for each in components]
    assert len(set(references)) == len(references) == len(ALL) + 1
    for each in components:
        assert each["type"] in ("library", "operating-system") and each["name"]
        assert set(each) <= COMPONENT
        if each["type"] == "library":
            assert each["purl"].startswith("pkg:") and each["purl"] == each["bom-ref"]
            assert set(each["evidence"]) == {"occurrences"} and each["evidence"]["occurrences"][0][
                "location"
            ].startswith("/")
        for licence in each.get("licenses", []):
            assert set(licence) == {"license"} and set(licence["license"]) == {"name"}
    known = {metadata["component"]["bom-ref"], *references}
    for each in made["dependencies"]:  # type: ignore[attr-defined]
        assert {each["ref"], *each["dependsOn"]} <= known
    json.dumps(made)


def test_the_same_package_twice_is_one_component(tmp_path: Path) -> None:
    for place in ("a", "b"):
        write(tmp_path, f"{place}/node_modules/x/package.json", '{"name": "x", "version": "1"}')
    components = document(scan((str(tmp_path),)))["components"]
    assert isinstance(components, list)
    assert [len(each["evidence"]["occurrences"]) for each in components] == [2]
