"""Without async: write a program, run it, bring back what it made. Needs a yard: `cloudyard up`."""

from pathlib import Path
from tempfile import TemporaryDirectory

from cloudyard import blocking


def main() -> None:
    with blocking.connect() as yard, yard.sandbox(image="debian") as box:
        box.write("/work/make.sh", b"#!/bin/sh\necho made inside > /work/result.txt\n", mode=0o755)
        done = box.run("/work/make.sh", timeout_s=10)
        assert done.ok, done.stderr
        with TemporaryDirectory() as here:
            box.download("/work/result.txt", Path(here) / "result.txt")
            print((Path(here) / "result.txt").read_text(), end="")


if __name__ == "__main__":
    main()
