# ruff: noqa
# Moves itself out of its own cgroup, or lifts its limits.
seen = set()
roots = ["/sys/fs/cgroup"]
for root in roots:
    if not os.path.isdir(root):
        seen.add("invisible")
    for base, _, files in os.walk(root):
        for name in files:
            if name in (
                "cgroup.procs",
                "tasks",
                "memory.limit_in_bytes",
                "memory.max",
                "pids.max",
                "cpu.max",
                "cpu.cfs_quota_us",
                "cgroup.kill",
                "freezer.state",
                "cgroup.freeze",
            ):
                try:
                    os.close(os.open(os.path.join(base, name), os.O_WRONLY))
                    verdict("succeeded", by=os.path.join(base, name))
                except OSError as error:
                    seen.add(describe(error))
verdict("+".join(sorted(seen)) or "invisible")
