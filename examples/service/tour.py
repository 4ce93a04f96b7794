"""A sandbox from Python: commands, code, files, a port, a snapshot.

Against the service that RINGFENCE_URL or `ringfence login` names; without one, it starts its own:

    python examples/service/tour.py
"""

from __future__ import annotations

from ringfence import RingfenceError, Sandbox


def main() -> None:
    """Everything, step by step."""
    with Sandbox.create(timeout="10m", labels={"example": "tour"}) as sandbox:
        wall = sandbox.boundary()
        print(f"wall: {wall['runtime']}, {wall['level']}")

        result = sandbox.run("echo out; echo err >&2; exit 3")
        print("command:", result.exit_code, result.cause, result.stdout.strip(), result.stderr.strip())

        # Output as it comes; the connection may break meanwhile, and nothing is lost.
        for piece in sandbox.start("for n in 1 2 3; do echo $n; sleep 0.2; done"):
            print("stream:", piece.text.strip())

        sandbox.run_code("def double(x): return 2 * x")
        print("code:", sandbox.run_code("double(21)").text)

        sandbox.files.write("data/numbers.csv", "1\n2\n3\n")
        print("sum:", sandbox.run("awk '{n += $1} END {print n}' data/numbers.csv").stdout.strip())

        sandbox.start("python3 -m http.server 8000 --directory data")
        sandbox.wait_for_port(8000)
        print("port:", sandbox.fetch(8000, "/numbers.csv").text.split())

        try:
            saved = sandbox.snapshot()
        except RingfenceError as error:
            print("snapshot:", error.message, error.hint)
            return
    with Sandbox.create(snapshot=saved.id) as again:
        print("again:", again.files.read_text("data/numbers.csv").split())


if __name__ == "__main__":
    main()
