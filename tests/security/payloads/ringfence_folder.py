# ruff: noqa
# read|write: the layer below the sandbox's own files, which is shown for the host at /.ringfence.
place = "/.ringfence"
try:
    names = os.listdir(place)
    if sys.argv[1] == "read":
        verdict("succeeded" if names else "empty", names=names)
except OSError as error:
    if sys.argv[1] == "read":
        denied(error)
    names = ["upper", "work"]
seen = set()
for name in [*names, "."]:
    try:
        with open(os.path.join(place, name, "rf-forged"), "w"):
            verdict("succeeded", by=name)
    except OSError as error:
        seen.add(describe(error))
    if name == ".":
        continue
    try:
        os.rename(os.path.join(place, name), os.path.join(place, name + "x"))
        verdict("succeeded", by=name)
    except OSError as error:
        seen.add(describe(error))
verdict("+".join(sorted(seen)))
