"""Policy files: what they say, and that every mistake names file, line, field and remedy."""

# ruff: noqa: E501 (the tables have one case a line)

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence.model import policies
from ringfence.model.errors import InvalidRequest, NotFound, PolicyError
from ringfence.model.levels import Level
from ringfence.model.policy import (
    GIB,
    MIB,
    Audit,
    Door,
    Filesystem,
    Isolation,
    Limits,
    Mount,
    Network,
    NetworkRule,
    Policy,
    Process,
    Resources,
    Wall,
)

HEAD = "apiVersion: ringfence/v1\nkind: Policy\n"
ROOT = Path(__file__).parents[3]

DESIGN = """\
apiVersion: ringfence/v1
kind: Policy
metadata: {name: tools-with-openai}
isolation: {minimum: L2, prefer: [gvisor, jail], allowEmulated: false}
filesystem:
  root: overlay                # overlay | readonly
  readOnly: [/usr, /data]
  readWrite: [/workspace, /tmp]
process: {user: 1000, seccomp: default, maxProcesses: 256, maxOpenFiles: 1024, cpuTime: 10m}
resources: {size: small, disk: 2GiB, bandwidth: 10Mbit}
limits: {timeout: 30m, idle: 10m, onIdle: pause, output: 10MiB}
network:
  mode: egress                 # none | egress | open
  allow:
    - {host: api.openai.com, ports: [443], methods: [POST], paths: ["/v1/*"],
       inject: {header: Authorization, value: "Bearer {{secret:openai}}"}}
    - {host: "*.pypi.example", ports: [443]}
  record: metadata             # none | metadata | headers | bodies, secrets always redacted
audit: {files: true, network: true}
"""


def test_every_field_of_the_design_arrives() -> None:
    inject = {"header": "Authorization", "value": "Bearer {{secret:openai}}"}
    assert policies.load(DESIGN) == Policy(
        name="tools-with-openai",
        wall=Wall(
            Isolation(Level.L2, None, ("gvisor", "jail"), False),
            Filesystem("overlay", ("/usr", "/data"), ("/workspace", "/tmp")),
            Process(1000, "default", 256, 1024, 600.0),
            Resources(1, GIB, 2 * GIB, 10_000_000),
        ),
        door=Door(
            Limits(1800.0, 600.0, "pause", 10 * MIB),
            Network(
                "egress",
                (
                    NetworkRule("api.openai.com", (443,), ("POST",), ("/v1/*",), inject),
                    NetworkRule("*.pypi.example", (443,)),
                ),
                "metadata",
            ),
            Audit(True, True),
        ),
    )


def test_a_file_with_the_head_only_is_the_default_policy() -> None:
    assert policies.load(HEAD) == Policy("policy")


def test_other_values_arrive() -> None:
    policy = policies.load(
        HEAD
        + """
isolation: {minimum: L4, runtime: qemu, allowEmulated: true}
filesystem:
  root: readonly
  mounts:
    - {source: /srv/data, target: /data}
    - {source: /srv/out, target: /out, readOnly: false}
    - /srv/a:/a
    - /srv/b:/b:rw
process: {user: 0}
resources: {size: large, cpus: 0.5, memory: 64M}
limits: {timeout: 90, onIdle: stop, maxTemplateAge: 30d}
network: {mode: open, record: bodies}
audit: {files: true, network: false}
"""
    )
    assert policy.wall == Wall(
        Isolation(Level.L4, "qemu", (), True),
        Filesystem(
            "readonly",
            mounts=(
                Mount("/srv/data", "/data"),
                Mount("/srv/out", "/out", False),
                Mount("/srv/a", "/a"),
                Mount("/srv/b", "/b", False),
            ),
        ),
        Process(user=0),
        Resources(0.5, 64 * MIB, 32 * MIB),
    )
    assert policy.door == Door(
        Limits(90.0, on_idle="stop", max_template_age=30 * 86400.0),
        Network("open", record="bodies"),
        Audit(True, False),
    )


RULE = "network:\n  mode: egress\n  allow:\n    - host: api.example.com\n"

# text after the two lines of HEAD; line; field; words of the message; words of the hint
MISTAKES = [
    # unknown and doubled keys
    ("proces: {user: 1}", 3, "proces", "unknown key", "did you mean process?"),
    ("process:\n  maxProceses: 1", 4, "process.maxProceses", "unknown key", "did you mean maxProcesses?"),
    ("process: {max_processes: 1}", 3, "process.max_processes", "unknown key", "maxProcesses"),
    ("metadata: {labels: {a: b}}", 3, "metadata.labels", "unknown key", "known keys are name"),
    ("privileged: true", 3, "privileged", "unknown key", "baseline"),
    ("process: {noNewPrivileges: false}", 3, "process.noNewPrivileges", "unknown key", "baseline"),
    ("resources: {swap: 1G}", 3, "resources.swap", "unknown key", "baseline"),
    ("process:\n  user: 1\n  cpuTime: 1s\n  user: 0", 6, "process.user", "given twice, first in line 4", "keep one"),
    ("audit: {}\nlimits: {}\naudit: {}", 5, "audit", "given twice, first in line 3", "keep one"),
    (RULE + "      hosts: x", 7, "network.allow[0].hosts", "unknown key", "did you mean host?"),
    # missing values
    ("limits:\n  timeout:\n", 4, "limits.timeout", "has no value", "remove the key"),
    ("network: ~", 3, "network", "has no value", "remove the key"),
    # types
    ("process: [1]", 3, "process", "a list where a mapping belongs", "its keys are user"),
    ("process: {user: root}", 3, "process.user", "'root' where a whole number belongs", "digits"),
    ("process: {user: true}", 3, "process.user", "True where a whole number belongs", "digits"),
    ("process: {user: 01000}", 3, "process.user", "'01000' where a whole number belongs", "digits"),
    ("process: {user: 1.5}", 3, "process.user", "1.5 where a whole number belongs", "digits"),
    ("resources: {cpus: yes}", 3, "resources.cpus", "'yes' where a number belongs", "0.5"),
    ("resources: {cpus: .inf}", 3, "resources.cpus", "'.inf' where a number belongs", "0.5"),
    ("audit: {files: yes}", 3, "audit.files", "'yes' where true or false belongs", "true or false"),
    ("audit: {files: 1}", 3, "audit.files", "1 where true or false belongs", "true or false"),
    ("isolation: {prefer: jail}", 3, "isolation.prefer", "'jail' where a list belongs", "[a, b]"),
    ("isolation:\n  prefer:\n    - jail\n    - 7", 6, "isolation.prefer[1]", "7 where text belongs", "quotes"),
    ("metadata: {name: [a]}", 3, "metadata.name", "a list where text belongs", "quotes"),
    # words
    ("isolation: {minimum: L5}", 3, "isolation.minimum", "'L5' is not one of L1, L2, L3, L4", "choose one"),
    ("isolation: {minimum: 2}", 3, "isolation.minimum", "2 is not one of", "choose one"),
    ("network: {mode: egres}", 3, "network.mode", "'egres' is not one of", "did you mean egress?"),
    ("resources: {size: huge}", 3, "resources.size", "'huge' is not one of small, medium, large", "choose one"),
    ("preset: untrustd", 3, "preset", "'untrustd' is not one of", "did you mean untrusted?"),
    ("filesystem: {root: rw}", 3, "filesystem.root", "'rw' is not one of overlay, readonly", "choose one"),
    ("isolation: {runtime: 'a b'}", 3, "isolation.runtime", "not the name of a runtime", "doctor"),
    ("isolation: {prefer: [jail, ../x]}", 3, "isolation.prefer[1]", "not the name of a runtime", "doctor"),
    ("metadata: {name: '../etc'}", 3, "metadata.name", "is not a name", "letters"),
    # quantities
    ("resources: {memory: 64Q}", 3, "resources.memory", "unknown unit", "64M"),
    ("resources: {memory: lots}", 3, "resources.memory", "is not a size", "64M"),
    ("resources: {memory: -1}", 3, "resources.memory", "is not a size", "64M"),
    ("resources: {memory: [1]}", 3, "resources.memory", "a list where a size belongs", "unit"),
    ("resources: {memory: 15MiB}", 3, "resources.memory", "15MiB is out of range", "16MiB to 64TiB"),
    ("resources: {memory: 1000000T}", 3, "resources.memory", "out of range", "16MiB to 64TiB"),
    ("resources: {memory: " + "9" * 400 + "}", 3, "resources.memory", "too large", "64M"),
    ("resources:\n  size: small\n  disk: 1K", 5, "resources.disk", "1KiB is out of range", "1MiB to 64TiB"),
    ("resources: {cpus: 0}", 3, "resources.cpus", "0.0 is out of range", "0.01 to 1024"),
    ("resources: {cpus: 5000}", 3, "resources.cpus", "out of range", "0.01 to 1024"),
    ("resources: {bandwidth: 10Mb}", 3, "resources.bandwidth", "unknown unit", "Mbit"),
    ("resources: {bandwidth: 1bit}", 3, "resources.bandwidth", "1bit is out of range", "8000bit"),
    ("limits: {timeout: soon}", 3, "limits.timeout", "'soon' is not a duration", "30s"),
    ("limits: {timeout: 0}", 3, "limits.timeout", "out of range", "365d"),
    ("limits: {timeout: 1000d}", 3, "limits.timeout", "1000d is out of range", "365d"),
    ("limits: {timeout: true}", 3, "limits.timeout", "True where a duration belongs", "unit"),
    ("limits: {timeout: " + "9" * 400 + "s}", 3, "limits.timeout", "too large", "30s"),
    ("limits: {idle: 10ms}", 3, "limits.idle", "10ms is out of range", "1s"),
    ("limits: {maxTemplateAge: 0}", 3, "limits.maxTemplateAge", "out of range", "3650d"),
    ("limits: {maxTemplateAge: old}", 3, "limits.maxTemplateAge", "'old' is not a duration", "30s"),
    ("limits: {output: 0}", 3, "limits.output", "out of range", "1B to 1TiB"),
    ("process: {user: 60001}", 3, "process.user", "60001 is out of range", "0 to 60000"),
    ("process: {user: -1}", 3, "process.user", "-1 is out of range", "0 to 60000"),
    ("process: {maxProcesses: 0}", 3, "process.maxProcesses", "0 is out of range", "1 to"),
    ("process: {maxOpenFiles: 3}", 3, "process.maxOpenFiles", "3 is out of range", "16 to"),
    ("process: {cpuTime: 1ms}", 3, "process.cpuTime", "1ms is out of range", "100ms"),
    ("process: {seccomp: unconfined}", 3, "process.seccomp", "not a system call filter", "can't be switched off"),
    # paths
    ("filesystem: {readWrite: [workspace]}", 3, "filesystem.readWrite[0]", "is not absolute", "full path"),
    ("filesystem: {readWrite: [/a/../b]}", 3, "filesystem.readWrite[0]", "'..'", "full path"),
    ("filesystem: {readOnly: [/ok, /a//b]}", 3, "filesystem.readOnly[1]", "shortest form, which is '/a/b'", ""),
    ('filesystem: {readOnly: ["/a\\nb"]}', 3, "filesystem.readOnly[0]", "control character", "full path"),
    ("filesystem: {readWrite: [/proc/sys]}", 3, "filesystem.readWrite[0]", "can't be writable", "overlay"),
    ("filesystem: {readWrite: [/]}", 3, "filesystem.readWrite[0]", "can't be writable", "overlay"),
    ("filesystem: {readWrite: [/a], readOnly: [/a]}", 3, "filesystem.readWrite", "both", "one of the two"),
    # mounts
    ("filesystem: {mounts: [data:/data]}", 3, "filesystem.mounts[0]", "absolute source", "/SRC:/DST"),
    ("filesystem: {mounts: [/data]}", 3, "filesystem.mounts[0]", "is not a mount", "SRC:DST"),
    ("filesystem: {mounts: [{source: /d}]}", 3, "filesystem.mounts[0].target", "missing", "target"),
    ("filesystem: {mounts: [{target: /d}]}", 3, "filesystem.mounts[0].source", "missing", "source"),
    ("filesystem:\n  mounts:\n    - source: d\n      target: /d", 5, "filesystem.mounts[0].source", "not absolute", ""),
    ("filesystem:\n  mounts:\n    - source: /d\n      target: /usr/x", 6, "filesystem.mounts[0].target", "in /usr", ""),
    ("filesystem: {mounts: [/a:/d, /b:/d]}", 3, "filesystem.mounts[1].target", "mounts[0] too", "own target"),
    # network
    ("network: {allow: [{host: a.example}]}", 3, "network.mode", "never be used", "mode: egress"),
    ("network: {mode: open, allow: [{host: a.example}]}", 3, "network.allow[0]", "IPv4 ranges", "mode: egress"),
    ("network: {mode: egress, allow: [{ports: [1]}]}", 3, "network.allow[0].host", "missing", "one host"),
    (RULE + "      ports: [443, 70000]", 7, "network.allow[0].ports[1]", "70000 is out of range", "1 to 65535"),
    (RULE + "      ports:\n        - 443\n        - 0", 9, "network.allow[0].ports[1]", "0 is out of range", ""),
    (RULE + "      ports: 443", 7, "network.allow[0].ports", "443 where a list belongs", "[443]"),
    (RULE + "      ports: ['443']", 7, "network.allow[0].ports[0]", "'443' where a whole number", "digits"),
    (RULE + "      ports: []", 7, "network.allow[0].ports", "is empty", "[443]"),
    (RULE + "      methods: []", 7, "network.allow[0].methods", "is empty", "leave it out"),
    (RULE + "      paths: []", 7, "network.allow[0].paths", "is empty", "leave it out"),
    (RULE + "      paths:", 7, "network.allow[0].paths", "has no value", "remove the key"),
    (RULE + "      methods: [FETCH]", 7, "network.allow[0].methods[0]", "not an HTTP method", "GET"),
    (RULE + "      paths: [v1]", 7, "network.allow[0].paths[0]", "not a URL path", "start with /"),
    (RULE + "      paths: ['/a/*/b']", 7, "network.allow[0].paths[0]", "not a URL path", "at the end"),
    (RULE + "      paths: ['/a/../b']", 7, "network.allow[0].paths[0]", "not a URL path", ""),
    (RULE + "      paths: ['/a?b']", 7, "network.allow[0].paths[0]", "not a URL path", "query"),
    (RULE + "      paths: ['/%zz']", 7, "network.allow[0].paths[0]", "not a URL path", ""),
    *(
        (f"network: {{mode: egress, allow: [{{host: '{host}'}}]}}", 3, "network.allow[0].host", what, "")
        for host, what in [
            ("*", "every host"),
            ("https://a.example", "is a URL"),
            ("a.example/x", "has a path"),
            ("a.example:443", "has a port"),
            ("a.*.example", "left-most"),
            ("**.example", "left-most"),
            ("*a.example", "left-most"),
            ("bücher.example", "ASCII"),
            ("a..example", "not a host name"),
            ("a.example.", "not a host name"),
            ("-a.example", "not a host name"),
            ("a b", "not a host name"),
            ("", "not a host name"),
            ("1.2.3", "not a host name"),
            ("0x7f.1", "not a host name"),
            ("010.0.0.1", "not a host name"),
            ("a" * 64 + ".example", "not a host name"),
        ]
    ),
    # injection
    (RULE + "      inject: {header: A}", 7, "network.allow[0].inject.value", "is missing", "{{secret:NAME}}"),
    (RULE + "      inject: {header: A, value: sk-123}", 7, "network.allow[0].inject.value", "names no secret", ""),
    (RULE + "      inject: {header: A, value: '{{secret: a}}'}", 7, "network.allow[0].inject.value", "no secret", ""),
    (RULE + "      inject: {header: A, value: '{{secret:a}} {{x}}'}", 7, "network.allow[0].inject.value", "braces", ""),
    (RULE + "      inject: {header: 'A: b', value: '{{secret:a}}'}", 7, "network.allow[0].inject.header", "name of", ""),
    (RULE + "      inject: {header: Host, value: '{{secret:a}}'}", 7, "network.allow[0].inject.header", "Host", ""),
    (RULE + '      inject: {header: A, value: "{{secret:a}}\\r\\nB: c"}', 7, "network.allow[0].inject.value", "carry", ""),
    (RULE + "      inject: {header: A, value: '{{secret:a}}', to: b}", 7, "network.allow[0].inject.to", "unknown", ""),
    (
        "network: {mode: egress, allow: [{host: '*.a.example', inject: {header: A, value: '{{secret:a}}'}}]}",
        3, "network.allow[0].inject", "any host under a wildcard", "api.a.example",
    ),
    *(
        (RULE + f"      inject: {text}", 7, "network.allow[0].inject.env", what, hint)
        for text, what, hint in [
            ("{placeholder: '{{secret:a}}', env: 1A}", "name of a variable", "API_TOKEN"),
            ("{placeholder: '{{secret:a}}', env: 'A=B'}", "name of a variable", "API_TOKEN"),
            ("{placeholder: '{{secret:a}} {{secret:b}}', env: A}", "of one secret", "{{secret:NAME}}"),
            ("{bearer: '{{secret:a}}', env: A}", "is not known", ""),
        ]
    ),
    (
        RULE + "      inject: {placeholder: '{{secret:a}}', env: A}\n"
        "    - host: b.example\n      inject: {placeholder: '{{secret:b}}', env: A}",
        9, "network.allow[1].inject.env", "another secret", "of its own",
    ),
    # presets
    ("preset: untrusted\nisolation: {minimum: L2}", 4, "isolation.minimum", "weaker than preset untrusted", "L3"),
    ("preset: controlled\nisolation: {minimum: L1}", 4, "isolation.minimum", "weaker than preset controlled", "L2"),
    ("preset: trusted\nisolation: {minimum: L1}", 4, "isolation.minimum", "weaker than preset trusted", "L2"),
    ("preset: untrusted\nnetwork: {mode: open}", 4, "network.mode", "open is not for preset untrusted", "egress"),
    ("preset: controlled\nnetwork: {mode: open}", 4, "network.mode", "open is not for preset controlled", "egress"),
    ("preset: untrusted\nprocess: {user: 0}", 4, "process.user", "drops all capabilities", "trusted"),
    ("preset: untrusted\nfilesystem: {mounts: [/a:/a]}", 4, "filesystem.mounts[0]", "no host files", "--file"),
    ("preset: controlled\nfilesystem: {mounts: [/a:/a:rw]}", 4, "filesystem.mounts[0].readOnly", "read-only", ""),
    (
        "preset: untrusted\n" + RULE + "      inject: {header: A, value: '{{secret:a}}'}",
        8, "network.allow[0].inject", "untrusted input and outbound access meet", "remove inject",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "field", "what", "hint"), MISTAKES)
def test_mistake(tmp_path: Path, text: str, line: int, field: str, what: str, hint: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(HEAD + text)
    with pytest.raises(PolicyError) as caught:
        policies.load(path)
    error = caught.value
    assert (error.details["file"], error.details["line"], error.details["field"]) == (str(path), line, field)
    assert str(error).startswith(f"{path}:{line}: {field}: ")
    assert what in error.message
    assert hint in error.hint
    assert error.hint
    assert len(error.message) < 500 + len(str(path))


@pytest.mark.parametrize(
    ("text", "line", "field", "what"),
    [
        ("kind: Policy\n", 1, "apiVersion", "missing"),
        ("apiVersion: ringfence/v1\nname: x\n", 2, "name", "unknown key"),
        ("apiVersion: ringfence/v1\n", 1, "kind", "missing"),
        (
            "\napiVersion: ringfence/v2\nkind: Policy\n",
            2,
            "apiVersion",
            "'ringfence/v2' is not one of ringfence/v1",
        ),
        ("apiVersion: ringfence/v1\nkind: Pod\n", 2, "kind", "'Pod' is not one of Policy"),
        ("- a\n", 1, "", "a list where a mapping belongs"),
        ("just words\n", 1, "", "'just words' where a mapping belongs"),
        ("\n", 1, "", "empty"),
        ("# nothing\n", 1, "", "empty"),
    ],
)
def test_not_a_policy(text: str, line: int, field: str, what: str) -> None:
    with pytest.raises(PolicyError) as caught:
        policies.load(text, file="x.yaml")
    assert (caught.value.details["line"], caught.value.details["field"]) == (line, field)
    assert what in caught.value.message
    assert caught.value.message.startswith(f"x.yaml:{line}: ")


def test_a_secret_written_out_is_not_repeated_in_the_error() -> None:
    with pytest.raises(PolicyError) as caught:
        policies.load(HEAD + RULE + "      inject: {header: Authorization, value: sk-hunter2}")
    assert "hunter2" not in str(caught.value.as_dict())


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="can't be read: No such file"):
        policies.load(str(tmp_path / "missing.yaml"))
    with pytest.raises(PolicyError, match="can't be read: Is a directory"):
        policies.load(tmp_path)
    with pytest.raises(PolicyError, match="can't be read"):
        policies.load("a\0b")
    with pytest.raises(PolicyError, match="larger than 1024 KiB"):
        policies.load("/dev/zero")
    (tmp_path / "latin.yaml").write_bytes(b"apiVersion: ringfence/v1\nkind: \xff\n")
    with pytest.raises(PolicyError, match=r"latin.yaml:2: not UTF-8"):
        policies.load(tmp_path / "latin.yaml")
    (tmp_path / "mark.yaml").write_bytes(b"\xef\xbb\xbf" + HEAD.encode())
    assert policies.load(tmp_path / "mark.yaml") == Policy("policy")


def test_presets() -> None:
    untrusted, controlled, trusted = (policies.preset(name) for name in policies.PRESETS)
    assert untrusted.wall.isolation.minimum is Level.L3
    assert untrusted.door.network == Network("none")
    assert untrusted.door.limits.timeout == 600
    assert controlled.wall.isolation.minimum is Level.L2
    assert controlled.door.network.mode == "none"
    assert trusted.wall.isolation.minimum is Level.L2
    assert trusted.door.network.mode == "open"
    for policy in (untrusted, controlled, trusted):
        assert policy.trust == policy.name
        assert policies.check(policy) is policy
        assert policies.warnings(policy) == []
        assert policy.wall.filesystem.mounts == ()
    with pytest.raises(NotFound, match="no preset 'untrustd'") as caught:
        policies.preset("untrustd")
    assert "did you mean untrusted?" in caught.value.hint


def test_a_file_overrides_its_preset_field_by_field() -> None:
    text = (
        HEAD
        + "preset: untrusted\nlimits: {output: 1MiB}\nnetwork: {mode: egress, allow: [{host: a.example}]}\n"
    )
    policy = policies.load(text)
    base = policies.preset("untrusted")
    assert policy == replace(
        base,
        door=Door(
            replace(base.door.limits, output=MIB),
            Network("egress", (NetworkRule("a.example"),)),
            base.door.audit,
        ),
    )


def test_find_takes_presets_and_files(tmp_path: Path) -> None:
    assert policies.find("controlled") == policies.preset("controlled")
    path = tmp_path / "p.yaml"
    path.write_text(HEAD)
    assert policies.find(str(path)) == Policy("policy")
    with pytest.raises(PolicyError, match="no such preset or policy file") as caught:
        policies.find("controled")
    assert "did you mean controlled?" in caught.value.hint


def test_checks_hold_for_policies_made_in_code() -> None:
    with pytest.raises(PolicyError, match=r"resources\.cpus: nan is out of range"):
        policies.check(Policy().with_wall(resources=Resources(cpus=float("nan"))))
    with pytest.raises(PolicyError, match=r"filesystem\.mounts\[0\]: preset untrusted shows no host files"):
        policies.check(
            policies.preset("untrusted").with_wall(filesystem=Filesystem(mounts=(Mount("/a", "/a"),)))
        )
    with pytest.raises(PolicyError, match=r"limits\.timeout: inf"):
        policies.check(Policy().with_door(limits=Limits(timeout=float("inf"))))
    with pytest.raises(PolicyError, match=r"capital letters"):
        policies.check(Policy().with_door(network=Network("egress", (NetworkRule("A.example"),))))


def test_hosts_and_methods_are_taken_in_any_case() -> None:
    policy = policies.load(
        HEAD + "network: {mode: egress, allow: [{host: API.Example.com, methods: [post]}]}"
    )
    assert policy.door.network.allow == (NetworkRule("api.example.com", methods=("POST",)),)


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "2001:db8::1", "localhost", "a_b.example", "xn--bcher-kva.example"]
)
def test_hosts_that_are_fine(host: str) -> None:
    policy = policies.load(HEAD + f"network: {{mode: egress, allow: [{{host: '{host}'}}]}}")
    assert policy.door.network.allow[0].host == host


def test_resize() -> None:
    assert policies.resize(Resources(), memory=64 * MIB) == Resources(1, 64 * MIB, 32 * MIB)
    assert policies.resize(Resources(), size="large") == Resources(4, 8 * GIB, 4 * GIB)
    assert policies.resize(Resources(), memory=4 * GIB) == Resources(1, 4 * GIB, 512 * MIB)
    assert policies.resize(Resources(), memory=64 * MIB, disk=GIB) == Resources(1, 64 * MIB, GIB)
    assert policies.resize(Resources(bandwidth=9000), cpus=3) == Resources(3, GIB, 512 * MIB, 9000)
    with pytest.raises(InvalidRequest, match="no size 'smal'") as caught:
        policies.resize(Resources(), size="smal")
    assert "did you mean small?" in caught.value.hint


DANGER = "private data"


def test_the_three_dangers_are_warned_of_only_where_they_meet() -> None:
    private = Filesystem(mounts=(Mount("/srv/data", "/data"),))
    outbound = Network("egress", (NetworkRule("a.example"),))
    plain = Policy()
    assert policies.warnings(plain) == []
    assert policies.warnings(plain.with_wall(filesystem=private)) == []
    assert policies.warnings(plain.with_door(network=outbound)) == []
    [sentence] = policies.warnings(plain.with_wall(filesystem=private).with_door(network=outbound))
    assert DANGER in sentence
    assert "/srv/data" in sentence
    assert "a.example" in sentence
    trusted = policies.preset("trusted").with_wall(filesystem=private)
    assert policies.warnings(trusted.with_door(network=outbound)) == []
    [sentence] = policies.warnings(trusted)  # an open network brings the input of strangers
    assert "anywhere" in sentence
    secret = NetworkRule("a.example", inject={"header": "A", "value": "{{secret:key}}"})
    [sentence] = policies.warnings(plain.with_door(network=Network("egress", (secret,))))
    assert "the secret key" in sentence
    assert policies.secrets(plain.with_door(network=Network("egress", (secret, secret)))) == ("key",)


def test_other_warnings() -> None:
    rule = NetworkRule("a.example", (80,), inject={"header": "A", "value": "{{secret:key}}"})
    found = " ".join(
        policies.warnings(
            Policy()
            .with_wall(process=Process(user=0), isolation=Isolation(Level.L1))
            .with_door(network=Network("egress", (NetworkRule("*.com"), rule)))
        )
    )
    for words in ("top-level domain", "in the clear", "process.user is 0", "L1"):
        assert words in found
    assert "nothing can be reached" in policies.warnings(Policy().with_door(network=Network("egress")))[0]


def test_nothing_is_imported_before_a_file_is_loaded() -> None:
    code = (
        "import sys; from ringfence.model import policies; policies.preset('trusted'); "
        "heavy = {'yaml', 'msgspec', 'difflib', 'ipaddress', 'inspect', 'asyncio', 'rich'} & set(sys.modules); "
        "assert not heavy - set(sys.argv[1].split()), heavy; "
        "policies.load('apiVersion: ringfence/v1\\nkind: Policy\\n'); assert 'yaml' in sys.modules"
    )
    always = subprocess.run(
        [sys.executable, "-c", "import sys, dataclasses; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    subprocess.run([sys.executable, "-c", code, always], check=True, env={"PYTHONPATH": str(ROOT / "src")})
