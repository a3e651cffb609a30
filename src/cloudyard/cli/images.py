"""`cloudyard image`: build images, list them, remove them. Needs no yard, but asks the local one's
configuration, if there is one, for its depot."""

from __future__ import annotations

import json
import os
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cloudyard.assemble.config import load_config
from cloudyard.errors import Forbidden, InvalidRequest, NotFound
from cloudyard.images.apt import SUITE_DEFAULT
from cloudyard.images.build import build_debian
from cloudyard.images.depot import BUILD_HINT, Depot
from cloudyard.model import MIB
from cloudyard.sdk.config import local_client_file

DEPOT_DEFAULT = Path("/var/lib/cloudyard/depot")
_ID_SHOWN = 12  # characters of a layer's name, enough to tell layers apart


def add_arguments(parser: ArgumentParser) -> None:
    """Declare `build`, `ls` and `rm`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    build = actions.add_parser("build", help="build an image", description="Build an image (needs root).")
    build.add_argument("system", choices=["debian"], help="what to build it from")
    build.add_argument(
        "--package", action="append", default=[], metavar="NAME", help="a package to install; may be repeated"
    )
    build.add_argument("--name", default="debian", help="name of the image (debian)")
    build.add_argument("--suite", default=SUITE_DEFAULT, help=f"Debian release ({SUITE_DEFAULT})")
    listing = actions.add_parser("ls", help="list images", description="List the images of a depot.")
    listing.add_argument("--json", action="store_true", help="print JSON")
    remove = actions.add_parser("rm", help="remove images", description="Remove images and their own layers.")
    remove.add_argument("name", nargs="+", help="name of an image")
    for action in (build, listing, remove):
        action.add_argument(
            "--depot",
            type=Path,
            metavar="DIR",
            help=f"the depot (that of the local yard, which CLOUDYARD_CLIENT_FILE may name; {DEPOT_DEFAULT})",
        )


def run(args: Namespace) -> int:
    """Do what was asked."""
    depot = Depot(args.depot or local_depot())
    match args.action:
        case "build":
            _build(depot, args)
        case "ls":
            _list(depot, as_json=args.json)
        case _:
            for name in args.name:
                freed = depot.remove(name)
                print(f"Removed {name}; {freed / MIB:.0f} MiB freed.")
    return 0


def local_depot() -> Path:
    """The depot of the yard that the local client file belongs to, DEPOT_DEFAULT if there is no such yard.

    Raises:
        Forbidden: this user may not read where that yard keeps its images.
        InvalidRequest: the yard's configuration is damaged.
    """
    state = local_client_file().absolute().parent
    try:
        return load_config(state).paths.depot
    except NotFound:
        return DEPOT_DEFAULT
    except InvalidRequest as exc:
        if not isinstance(exc.__cause__, PermissionError):
            raise
        usual = state / "depot"  # only root may read the configuration, images may be seen by others
        if os.path.isdir(usual):
            return usual
        raise Forbidden(
            f"Where the yard in {state} keeps its images is for its owner to know.",
            code="depot_unknown",
            hint="Run it with sudo, or name the depot with --depot.",
        ) from exc


def _build(depot: Depot, args: Namespace) -> None:
    started = time.monotonic()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<28}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=1.0)

        def progress(done: float, doing: str) -> None:
            if console.is_terminal:
                bar.update(task, completed=done, description=doing)
            else:
                console.print(f"{args.name}: {doing}")

        image = build_debian(depot, args.name, packages=args.package, suite=args.suite, progress=progress)
    took = time.monotonic() - started
    print(f"Built {image.name}: {image.size_bytes / MIB:.0f} MiB in {took:.0f} s, in {depot.path}.")


def _list(depot: Depot, *, as_json: bool) -> None:
    images = depot.images()
    if as_json:
        rows = [
            {
                "name": image.name,
                "size_bytes": image.size_bytes,
                "created_at": image.created_at,
                "layers": image.layers,
            }
            for image in images
        ]
        print(json.dumps(rows, indent=2))
        return
    if not images:
        print(f"There are no images in {depot.path}. {BUILD_HINT}")
        return
    table = Table("image", "size", "built", "layers", box=None)
    for image in images:
        built = time.strftime("%Y-%m-%d %H:%M", time.localtime(image.created_at))
        layers = " ".join(layer[:_ID_SHOWN] for layer in image.layers)
        table.add_row(image.name, f"{image.size_bytes / MIB:.0f} MiB", built, layers)
    Console().print(table)
