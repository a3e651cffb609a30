"""The template mount namespace, and both ways of mounting a layer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cloudyard.edge.host.layers import LayerMount
from cloudyard.edge.host.template import Template
from cloudyard.errors import NotFound, Unsupported
from support import wait_until

pytestmark = pytest.mark.live


@pytest.fixture
def layer(yard_dir: Path, leaks: None) -> Path:
    tree = yard_dir / "tree"
    tree.mkdir()
    (tree / "hello").write_text("from the layer")
    path = yard_dir / "layer.erofs"
    subprocess.run(["mkfs.erofs", "--quiet", str(path), str(tree)], check=True, stdin=subprocess.DEVNULL)
    return path


@pytest.fixture
def boxes(yard_dir: Path) -> Path:
    path = yard_dir / "boxes"
    path.mkdir()
    (path / "7").mkdir()
    return path


def inside(template: Template, *argv: str) -> str:
    """What a program prints that runs in the template."""
    enter = ["nsenter", f"--mount=/proc/self/fd/{template.fd}", *argv]
    return subprocess.run(
        enter, pass_fds=[template.fd], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("way", ["direct", "loop"])
async def test_a_layer_is_read_in_the_template_and_the_host_mounts_nothing(
    layer: Path, boxes: Path, way: LayerMount
) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    template = await Template.make(boxes, way)
    place = await template.layer(layer)
    assert await template.layer(layer) == place
    assert inside(template, "/bin/cat", f"{place}/hello") == "from the layer"
    assert Path("/proc/self/mountinfo").read_text() == before
    template.close()
    await wait_until(lambda: not loops_of(layer), "its loop device is free")


async def test_a_layer_whose_file_was_removed_or_replaced_is_let_go_of_at_the_second_look(
    layer: Path, boxes: Path
) -> None:
    """Who asked for it just before the first may be about to use it."""
    template = await Template.make(boxes, "loop")
    first = await template.layer(layer)
    assert await template.let_go() == []
    content = layer.read_bytes()
    layer.unlink()
    assert await template.let_go() == [first]
    assert inside(template, "/bin/cat", f"{first}/hello") == "from the layer"
    layer.write_bytes(content)
    second = await template.layer(layer)
    assert second != first
    assert await template.let_go() == []
    assert inside(template, "/bin/ls", "/layers").split() == [Path(second).name]
    again = layer.with_suffix(".again")
    again.write_bytes(content)
    again.rename(layer)
    assert await template.let_go() == [second]
    assert await template.let_go() == []
    await wait_until(lambda: not loops_of(layer), "its loop devices are free")
    template.close()


async def test_only_what_bubblewrap_needs_is_in_the_template(boxes: Path) -> None:
    template = await Template.make(boxes)
    names = set(inside(template, "/bin/ls", "/").split())
    assert inside(template, "/bin/ls", "/boxes").split() == ["7"]
    template.close()
    assert names <= {
        "usr",
        "bin",
        "sbin",
        "lib",
        "lib32",
        "lib64",
        "libx32",
        "proc",
        "dev",
        "tmp",
        "root",
    } | {
        "boxes",
        "layers",
        "lower",
        "filters",
        "pts",
        "nothing",
        "nowhere",
    }


async def test_a_missing_layer_is_named(yard_dir: Path, boxes: Path) -> None:
    template = await Template.make(boxes)
    with pytest.raises(NotFound, match="no-such-layer"):
        await template.layer(yard_dir / "no-such-layer")
    template.close()


@pytest.mark.parametrize("way", ["direct", "loop"])
async def test_a_file_that_is_no_image_is_refused_and_leaves_nothing(
    yard_dir: Path, boxes: Path, leaks: None, way: LayerMount
) -> None:
    rubbish = yard_dir / "rubbish.erofs"
    rubbish.write_bytes(os.urandom(64 * 1024))
    template = await Template.make(boxes, way)
    with pytest.raises(Unsupported, match="rubbish"):
        await template.layer(rubbish)
    template.close()


def loops_of(path: Path) -> list[str]:
    """Loop devices on a file."""
    files = Path("/sys/block").glob("loop*/loop/backing_file")
    return [file.parts[3] for file in files if str(path) in file.read_text()]
