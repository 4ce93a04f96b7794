# ruff: noqa
# FOLDER: extended attributes that overlayfs reads: opaque, redirect, whiteout, origin. Forged, they show other files.
seen = set()
folder = os.path.join(sys.argv[1], "rf-marks")
os.makedirs(folder, exist_ok=True)
file = os.path.join(folder, "file")
open(file, "w").close()
for name in ("redirect", "opaque", "metacopy", "whiteout", "origin", "upper"):
    for space in ("user", "trusted"):
        for target in (folder, file):
            try:
                os.setxattr(target, f"{space}.overlay.{name}", b"/etc" if name == "redirect" else b"y")
                seen.add("set-" + space)
            except OSError as error:
                seen.add(describe(error))
verdict("succeeded" if any(s.startswith("set-") for s in seen) else "+".join(sorted(seen)), seen=sorted(seen))
