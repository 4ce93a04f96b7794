# ruff: noqa
# KIND COUNT: takes more and more of one thing.
kind, count = sys.argv[1], int(sys.argv[2])
kept = []
try:
    if kind == "memory":  # MiB
        for _ in range(count):
            kept.append(bytearray(b"1" * (1 << 20)))
    elif kind == "disk":  # MiB
        with open("rf-bomb", "wb", buffering=0) as file:
            for _ in range(count):
                left = 1 << 20
                while left:  # what does not fit is an error the next time
                    left -= file.write(b"1" * left)
    elif kind == "files":
        for number in range(count):
            os.close(os.open(f"rf-{number}", os.O_WRONLY | os.O_CREAT))
    elif kind == "folders":
        for number in range(count):
            os.mkdir(f"rf-folder-{number}")
    elif kind == "descriptors":
        open("rf-one", "w").close()
        for _ in range(count):
            kept.append(os.open("rf-one", os.O_RDONLY))
    elif kind == "output":  # MiB
        for _ in range(count):
            os.write(1, b"x" * (1 << 20))
    elif kind == "errors":  # MiB
        for _ in range(count):
            os.write(2, b"x" * (1 << 20))
    elif kind == "spin":  # millions
        for _ in range(count):
            for _ in range(1_000_000):
                pass
except OSError as error:
    verdict("contained:" + errno.errorcode.get(error.errno, str(error.errno)))
except MemoryError:
    verdict("contained:MemoryError")
verdict("succeeded")
