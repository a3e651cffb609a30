"""`python -m cloudyard.assemble supervisor|control|edge --state DIR`: one process of a yard. People use
`cloudyard up`."""

from __future__ import annotations

import logging
import sys
from argparse import ArgumentParser
from pathlib import Path

import anyio

from cloudyard.assemble import children, roles, supervisor
from cloudyard.assemble.config import load_config
from cloudyard.errors import CloudyardError

EXIT_FAILED = 1


def main() -> int:
    """Be the process that the arguments name, until told to end."""
    parser = ArgumentParser(prog="python -m cloudyard.assemble")
    parser.add_argument("role", choices=["supervisor", "control", "edge"])
    parser.add_argument("--state", type=Path, required=True)
    args = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        config = load_config(args.state)
        match args.role:
            case "supervisor":
                anyio.run(supervisor.supervise, config, children.plans(config))
            case "control":
                roles.run_control(config)
            case _:
                roles.run_edge(config)
    except CloudyardError as exc:
        print(f"{args.role}: {exc}", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
