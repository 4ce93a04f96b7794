# ruff: noqa
# PATH MARKER: every way from the opened folders to a file of the host: climbing, links, renamed folders.
path, marker = sys.argv[1], sys.argv[2]
seen = set()


def look(name, **options):
    try:
        fd = os.open(name, os.O_RDONLY, **options)
        if marker.encode() in os.read(fd, 4096):
            verdict("succeeded", by=name)
        seen.add("different")
    except OSError as error:
        seen.add(describe(error))
    except (ValueError, NotImplementedError):
        seen.add("no-such-call")


def attempt(make):
    try:
        make()
    except OSError as error:
        seen.add(describe(error))
        return False
    except AttributeError:
        seen.add("no-such-call")
        return False
    return True


up = "../" * 24
leaf = path.lstrip("/")
home = os.getcwd()
for way in (
    path,
    "/" + path,
    "//" + leaf,
    up + leaf,
    "./" + up + leaf,
    f"{home}/{up}{leaf}",
    f"/tmp/{up}{leaf}",
    f"/proc/self/root/{leaf}",
    f"/proc/1/root/{leaf}",
    f"/proc/self/cwd/{up}{leaf}",
    f"/dev/fd/3/{up}{leaf}",
    f"{home}/nothing/../{up}{leaf}",
    "a/" * 20 + up + leaf,
    path + "/",
    path + "/.",
    "..",
):
    look(way)
# Links that lead out: absolute, climbing, one over another, to a folder and from there.
for number, target in enumerate((path, up + leaf, "/", up, "..", f"{home}/{up}{leaf}", "/proc/self/root")):
    name = f"rf-link{number}"
    if attempt(lambda: os.symlink(target, name)):
        look(name)
        look(f"{name}/{leaf}")
        look(f"{name}/{up}{leaf}")
        attempt(lambda: os.symlink(f"{name}/{leaf}", name + "x")) and look(name + "x")
# Something that was checked as a folder and is another thing when it is used.
attempt(lambda: os.makedirs("rf-one/two/three"))
for number in range(40):
    attempt(lambda: os.rename("rf-one/two", "/tmp/rf-two"))
    look(f"rf-one/two/three/{up}{leaf}")
    look(f"/tmp/rf-two/three/{up}{leaf}")
    attempt(lambda: os.rename("/tmp/rf-two", "rf-one/two"))
    if attempt(lambda: os.rmdir("rf-one/two/three")):
        attempt(lambda: os.symlink(up, "rf-one/two/three")) and look(f"rf-one/two/three/{leaf}")
        attempt(lambda: os.unlink("rf-one/two/three"))
    attempt(lambda: os.mkdir("rf-one/two/three"))
# Descriptors: those that are open, and folders of our own that move while they are open.
for number in range(3, 48):
    look(up + leaf, dir_fd=number)
    look(path, dir_fd=number)
try:
    fd = os.open("rf-one/two/three", os.O_RDONLY)
    attempt(lambda: os.rename("rf-one/two/three", "/tmp/rf-three"))
    look(up + leaf, dir_fd=fd)
except OSError as error:
    seen.add(describe(error))
attempt(lambda: os.link(path, "rf-hard")) and look("rf-hard")
attempt(lambda: os.rename(path, "rf-moved")) and look("rf-moved")
attempt(lambda: os.chdir("/".join([".."] * 30))) and look(leaf)
verdict("+".join(sorted(seen)))
