"""measure() and stats(): what the driver says of a wall, against what the wall shows."""

from __future__ import annotations

import os
from pathlib import Path

from ringfence.conformance.harness import Kit, RuntimeSuite, python, run
from ringfence.conformance.plugin import needs
from ringfence.guest.processes import ProcessSpec
from ringfence.model.levels import Boundary

FACTS = """
import os
for line in open("/proc/self/status"):
    if line.startswith(("Seccomp:", "NoNewPrivs:", "CapEff:", "CapBnd:", "CapPrm:")):
        print(line.replace(":", "").strip().replace("\\t", " "))
for name in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup", "time"):
    if os.path.lexists("/proc/self/ns/" + name):
        print("ns-" + name, os.readlink("/proc/self/ns/" + name).replace(" ", ""))
print("kernel", os.uname().release)
"""
SECCOMP = {"0": "disabled", "1": "strict", "2": "filter"}


class BoundarySuite(RuntimeSuite):
    """The effective boundary is measured, never configured."""

    async def _facts(self, kit: Kit) -> tuple[dict[str, str], object]:
        sandbox = await kit.sandbox()
        link = await kit.link(sandbox)
        done = await python(link, FACTS)
        facts = dict(line.split(" ", 1) for line in done.text.splitlines())
        return facts, await kit.runtime.measure(sandbox.handle)

    @needs("programs")
    async def test_it_is_what_the_inside_shows(self, kit: Kit) -> None:
        sandbox = await kit.sandbox()
        link = await kit.link(sandbox)
        facts = dict(line.split(" ", 1) for line in (await python(link, FACTS)).text.splitlines())
        measured = await kit.runtime.measure(sandbox.handle)
        assert measured.runtime == kit.name
        assert (measured.level, measured.boundary) == (kit.runtime.level, kit.runtime.boundary)
        assert bool(measured.capabilities) == (int(facts["CapEff"], 16) != 0)
        if kit.runtime.boundary in (Boundary.NONE, Boundary.NAMESPACES):
            assert measured.seccomp == SECCOMP[facts["Seccomp"]]
            assert measured.no_new_privs == (facts["NoNewPrivs"] == "1")
            assert measured.kernel == facts["kernel"] == os.uname().release
            differing = {
                name for name in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup", "time")
                if facts[f"ns-{name}"] != os.readlink(f"/proc/self/ns/{name}")
            }  # fmt: skip
            assert set(measured.namespaces) == differing
            assert measured.user_namespace == ("user" in differing)
        else:  # another kernel answers: what is measured is what stands between that one and the host
            assert measured.kernel.startswith(facts["kernel"])
            assert facts["kernel"] != os.uname().release

    @needs("programs")
    async def test_the_workload_is_who_it_says_on_the_host(self, kit: Kit) -> None:
        sandbox = await kit.sandbox()
        link = await kit.link(sandbox)
        mark = "ringfence-conformance-" + sandbox.id
        process = await link.start(ProcessSpec(("/bin/sh", "-c", "read x", mark), stdin=True))
        measured = await kit.runtime.measure(sandbox.handle)
        uids = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if mark.encode() in (entry / "cmdline").read_bytes():
                        text = (entry / "status").read_text()
                        uids.add(int(text.partition("\nUid:")[2].split()[1]))
                except OSError:
                    continue
        await process.close_stdin()
        assert measured.host_uid != 0
        if kit.runtime.boundary in (Boundary.NONE, Boundary.NAMESPACES):
            assert uids == {measured.host_uid}
        else:  # the workload's processes are none of the host's; the kernel that runs them is
            assert uids == set()
            text = Path(f"/proc/{sandbox.handle.pid}/status").read_text()
            assert int(text.partition("\nUid:")[2].split()[1]) == measured.host_uid

    async def test_a_wall_of_level_two_holds_what_it_promises(self, kit: Kit) -> None:
        measured = await kit.runtime.measure((await kit.sandbox()).handle)
        if measured.level.rank < 2:
            assert measured.boundary in (Boundary.NONE, Boundary.INSTRUCTION)
            return
        assert measured.boundary is not Boundary.NONE
        if measured.boundary is Boundary.NAMESPACES:
            assert {"user", "mnt", "pid", "net", "ipc", "uts"} <= set(measured.namespaces)
            assert measured.seccomp == "filter"
        assert measured.no_new_privs
        assert measured.capabilities == ()
        assert measured.network == "none"

    async def test_each_wall_has_ids_of_its_own_as_root(self, kit: Kit) -> None:
        uids = {(await kit.runtime.measure((await kit.sandbox()).handle)).host_uid for _ in range(3)}
        assert 0 not in uids
        if os.geteuid() == 0 and kit.runtime.level.rank >= 2:
            assert len(uids) == 3

    async def test_stats_count_the_wall_only(self, kit: Kit) -> None:
        sandbox = await kit.sandbox()
        link = await kit.link(sandbox)
        before = await kit.runtime.stats(sandbox.handle)
        for _ in range(5):
            await link.start(ProcessSpec(("sleep", "60"), detached=True))
        after = await kit.runtime.stats(sandbox.handle)
        assert 1 <= before.processes < 10
        assert after.processes >= before.processes + 5
        assert after.resident_bytes > 0
        assert (await run(link, "true")).exit.code == 0
