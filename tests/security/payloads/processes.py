# ruff: noqa
# PID: can a process of the host be seen?
verdict("succeeded" if os.path.exists(f"/proc/{sys.argv[1]}/stat") else "invisible")
