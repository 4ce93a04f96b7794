"""From options to the request for a sandbox."""

from __future__ import annotations

import pytest

from ringfence.cli import requesting
from ringfence.cli.options import configure
from ringfence.cli.parsing import Parser
from ringfence.model.errors import DangerousMount, InvalidRequest, PolicyError, RingfenceError
from ringfence.model.levels import Level
from ringfence.model.policy import GIB, MIB, SIZES, Policy


def options(*arguments):
    parser = Parser(prog="ringfence run")
    configure(parser)
    return parser.parse_command_line([*arguments, "--", "true"])


def policy(*arguments):
    return requesting.policy(options(*arguments))


def test_without_options_it_is_the_default_policy():
    assert policy() == Policy()


def test_limits_are_where_they_belong():
    made = policy(
        "--cpus", "0.5", "--memory", "64M", "--disk", "16M", "--pids", "7",
        "--timeout", "2s", "--cpu-time", "1m", "--output", "1K",
    )  # fmt: skip
    resources, process, limits = made.wall.resources, made.wall.process, made.door.limits
    assert (resources.cpus, resources.memory, resources.disk) == (0.5, 64 * MIB, 16 * MIB)
    assert (process.max_processes, process.cpu_time) == (7, 60.0)
    assert (limits.timeout, limits.output) == (2.0, 1024)


def test_the_default_disk_follows_the_memory():
    assert policy("--memory", "64M").wall.resources.disk == 32 * MIB
    assert policy("--memory", "4G").wall.resources.disk == SIZES["small"].disk
    assert (
        policy("--size", "medium").wall.resources == policy("--size", "medium", "--cpus", "2").wall.resources
    )
    assert policy("--size", "medium").wall.resources.memory == 4 * GIB


def test_who_names_a_runtime_has_seen_its_level_but_a_minimum_that_was_asked_for_holds():
    assert policy("--runtime", "fake").wall.isolation.minimum is Level.L1
    both = policy("--runtime", "fake", "--isolation", "L2").wall.isolation
    assert (both.runtime, both.minimum) == ("fake", Level.L2)


def test_a_policy_files_minimum_is_not_lowered_by_naming_a_runtime(tmp_path):
    file = tmp_path / "policy.yaml"
    file.write_text("apiVersion: ringfence/v1\nkind: Policy\nmetadata: {name: p}\nisolation: {minimum: L3}\n")
    assert policy("--policy", str(file), "--runtime", "jail").wall.isolation.minimum is Level.L3


def test_options_win_over_the_file(tmp_path):
    file = tmp_path / "policy.yaml"
    file.write_text(
        "apiVersion: ringfence/v1\nkind: Policy\nmetadata: {name: p}\n"
        "resources: {memory: 128MiB, disk: 64MiB}\nlimits: {timeout: 5m, output: 1MiB}\n"
    )
    made = policy("--policy", str(file), "--timeout", "7s")
    assert made.wall.resources.memory == 128 * MIB
    assert (made.door.limits.timeout, made.door.limits.output) == (7.0, MIB)


def test_a_wrong_policy_file_names_line_and_field(tmp_path):
    file = tmp_path / "policy.yaml"
    file.write_text(
        "apiVersion: ringfence/v1\nkind: Policy\nmetadata: {name: p}\nresources:\n  memory: lots\n"
    )
    with pytest.raises(PolicyError) as caught:
        policy("--policy", str(file))
    assert caught.value.details["line"] == 5
    assert caught.value.details["field"] == "resources.memory"


def test_presets():
    assert policy("--preset", "untrusted").trust == "untrusted"
    assert policy("--preset", "untrusted").wall.isolation.minimum is Level.L3
    with pytest.raises(RingfenceError, match="untrustd") as caught:
        policy("--preset", "untrustd")
    assert "untrusted" in caught.value.hint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "0"], "--memory 0"),
        (["--memory", "1K"], "holds no program"),
        (["--memory", "12Q"], "--memory: unknown unit"),
        (["--disk", "much"], "--disk"),
        (["--cpus", "0"], "--cpus 0"),
        (["--cpus", "-1"], "--cpus -1"),
        (["--cpus", "nan"], "--cpus nan"),
        (["--pids", "0"], "--pids 0"),
        (["--timeout", "0"], "--timeout 0"),
        (["--timeout", "soon"], "--timeout: 'soon'"),
        (["--output", "-1"], "--output"),
        (["--user", "-1"], "--user -1"),
        (["--user", "64999"], "--user 64999"),
    ],
)
def test_impossible_values_name_the_option(arguments, message):
    with pytest.raises(InvalidRequest) as caught:
        policy(*arguments)
    assert message in caught.value.message
    assert caught.value.hint


def test_mounts(tmp_path):
    (tmp_path / "data").mkdir()
    made = policy("--mount", f"{tmp_path}/data:/data", "--mount", f"{tmp_path}/data:/more:rw")
    read_only, writable = made.wall.filesystem.mounts
    assert (read_only.target, read_only.read_only) == ("/data", True)
    assert (writable.target, writable.read_only) == ("/more", False)


@pytest.mark.parametrize("source", ["/", "/proc", "/dev", "/root", "/home"])
def test_dangerous_mounts_are_refused_unless_named(source):
    with pytest.raises(DangerousMount) as caught:
        policy("--mount", f"{source}:/x")
    assert "--allow-dangerous-mount" in caught.value.hint
    with pytest.raises(DangerousMount):
        policy("--mount", f"{source}:/x", "--allow-dangerous-mount", "/somewhere/else")


def test_a_dangerous_mount_that_is_named_is_allowed():
    made = policy("--mount", "/proc:/x", "--allow-dangerous-mount", "/proc")
    assert made.wall.filesystem.mounts[0].source == "/proc"


@pytest.mark.parametrize("text", ["/x", "a:b:c:d", ":/x", "/nosuch:/x"])
def test_mounts_that_can_not_be(text):
    with pytest.raises(InvalidRequest):
        policy("--mount", text)


def test_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("FROM_HERE", "here")
    file = tmp_path / "env"
    file.write_text("# comment\n\nA=1\nB=two words = yes\n")
    made = requesting.environment(
        options("--env-file", str(file), "--env", "A=2", "-e", "FROM_HERE", "-e", "E=")
    )
    assert made == {"A": "2", "B": "two words = yes", "FROM_HERE": "here", "E": ""}


@pytest.mark.parametrize("text", ["=x", "NOT_SET_ANYWHERE", "a b=c"])
def test_variables_that_can_not_be(text):
    with pytest.raises(InvalidRequest):
        requesting.environment(options("--env", text))


def test_files_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").touch()
    (tmp_path / "odd:name").touch()
    made = requesting.files_in(
        options(
            "--file", "a.csv", "--file", "a.csv:/data/b.csv", "--file", "a.csv:sub/", "--file", "odd:name"
        )
    )
    assert [(t.local, t.inside) for t in made] == [
        ("a.csv", "a.csv"), ("a.csv", "/data/b.csv"), ("a.csv", "sub/a.csv"), ("odd:name", "odd:name"),
    ]  # fmt: skip


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(InvalidRequest, match="there is no /nosuch/file here"):
        requesting.files_in(options("--file", "/nosuch/file:x"))


def test_files_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    made = requesting.files_out(
        options("--out", "/w/r.md", "--out", "r.md:mine.md", "--out", "/w/r.md:folder")
    )
    assert [(t.local, t.inside) for t in made] == [
        ("r.md", "/w/r.md"), ("mine.md", "r.md"), ("folder/r.md", "/w/r.md"),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["/", "..", ":x", "/a/.."])
def test_out_of_nothing_in_particular_is_refused(text):
    with pytest.raises(InvalidRequest, match="no name of a file or folder"):
        requesting.files_out(options("--out", text))


def test_who_asks():
    made = requesting.request(
        options(
            "--agent", "coder", "--parent-agent", "planner", "--agent-class", "code-executing",
            "--task", "T1", "--name", "n", "--label", "team=search", "--keep",
        )
    )  # fmt: skip
    owner = made.owner
    assert (owner.agent, owner.parent_agent, owner.agent_class, owner.task) == (
        "coder", "planner", "code-executing", "T1",
    )  # fmt: skip
    assert made.labels == {"team": "search", "name": "n"}
    assert made.keep


@pytest.mark.parametrize(
    "arguments",
    [
        ["--policy", "x", "--preset", "untrusted"],
        ["--interactive", "--json"],
        ["--stream"],
        ["--allow-dangerous-mount", "/"],
    ],
)
def test_options_that_exclude_each_other(arguments):
    with pytest.raises(InvalidRequest):
        requesting.check_modes(options(*arguments))


def test_no_command():
    made = options()
    made.command = []
    with pytest.raises(InvalidRequest, match="no command"):
        requesting.check_command(made)


def test_an_empty_template_is_not_the_host():
    made = options("--template", "")
    made.command = ["true"]
    with pytest.raises(InvalidRequest, match="empty name"):
        requesting.check_command(made)
