"""`python -m cloudyard.assemble supervisor|control|edge --state DIR`: one process of a yard; people use `up`.

Each loads only its own parts: how soon a killed edge is back depends on how long its imports take.
"""

from __future__ import annotations

import logging
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import anyio

from cloudyard.assemble import children, supervisor, tidy
from cloudyard.assemble.config import load_config
from cloudyard.errors import CloudyardError

EXIT_FAILED = 1


async def until_told(work: Callable[[], Awaitable[None]]) -> None:
    """Do the work until SIGTERM or SIGINT, which cancel it."""
    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            await work()
            tasks.cancel_scope.cancel()

        tasks.start_soon(run)
        tasks.start_soon(tidy.give_back)
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                tasks.cancel_scope.cancel()
                return


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
                from cloudyard.assemble.control_main import be_control

                tidy.collect_less()
                anyio.run(until_told, partial(be_control, config), backend_options={"use_uvloop": True})
            case _:
                from cloudyard.assemble.edge_main import be_edge

                # Its processes are started past the loop (edge/host/processes.py): under uvloop's own way of
                # starting them they would cost three times as much.
                tidy.collect_less()
                anyio.run(until_told, partial(be_edge, config), backend_options={"use_uvloop": True})
    except CloudyardError as exc:
        print(f"{args.role}: {exc}", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
