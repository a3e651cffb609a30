"""The depot: what is in it is whole, shared by content, and gone when nothing uses it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cloudyard.assemble.config import YardConfig, save_config
from cloudyard.cli import main
from cloudyard.cli.images import DEPOT_DEFAULT, local_depot
from cloudyard.errors import Conflict, InvalidRequest, NotFound
from cloudyard.images.apt import apt_sources, check_package
from cloudyard.images.build import build_from_tree
from cloudyard.images.depot import Depot
from cloudyard.model import Image, ImageConfig

needs_mkfs = pytest.mark.skipif(shutil.which("mkfs.erofs") is None, reason="mkfs.erofs is not installed")


@pytest.fixture
def depot(tmp_path: Path) -> Depot:
    return Depot(tmp_path / "depot")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "bin").mkdir(parents=True)
    (root / "bin/hello").write_text("#!/bin/sh\necho hello\n")
    (root / "bin/hello").chmod(0o755)
    (root / "bin/link").symlink_to("hello")
    return root


def disk(path: Path) -> dict[str, int]:
    return {str(file.relative_to(path)): file.stat().st_size for file in path.rglob("*") if file.is_file()}


def layer_file(depot: Depot, content: bytes) -> str:
    with depot.work_dir() as work:
        file = work.path / "layer"
        file.write_bytes(content)
        return depot.add_layer(file)


def test_an_unknown_image_lists_those_there_are_and_says_how_to_build(depot: Depot) -> None:
    depot.save(Image(name="alpha", layers=[]))
    with pytest.raises(NotFound, match=r"no image 'beta'.*alpha") as caught:
        depot.image("beta")
    assert caught.value.code == "image_not_found"
    assert "cloudyard image build debian" in caught.value.hint


def test_an_empty_depot_that_does_not_exist_yet_has_no_images(depot: Depot) -> None:
    assert depot.names() == []
    assert depot.images() == []
    assert not depot.path.exists()


@pytest.mark.parametrize("name", ["", "../etc/passwd", "A", "a/b", "a\n", "x" * 64])
def test_a_name_that_is_no_image_name_is_refused(depot: Depot, name: str) -> None:
    with pytest.raises(InvalidRequest):
        depot.image(name)
    with pytest.raises(InvalidRequest):
        depot.save(Image(name=name, layers=[]))


@pytest.mark.parametrize("layer", ["", "../../etc/passwd", "ab", "G" * 64])
def test_a_name_that_is_no_layer_name_is_refused(depot: Depot, layer: str) -> None:
    with pytest.raises(InvalidRequest):
        depot.layer_path(layer)


def test_an_image_whose_layer_is_missing_is_not_saved(depot: Depot) -> None:
    with pytest.raises(NotFound, match="is not in the depot"):
        depot.save(Image(name="alpha", layers=["0" * 64]))
    assert depot.names() == []


def test_layers_are_shared_by_content_and_go_with_their_last_image(depot: Depot) -> None:
    with depot.locked():
        one, two = layer_file(depot, b"x" * 100), layer_file(depot, b"x" * 100)
        assert one == two
        depot.save(Image(name="alpha", layers=[one]))
        depot.save(Image(name="beta", layers=[one]))
    assert depot.remove("alpha") == 0
    assert depot.layer_path(one).read_bytes() == b"x" * 100
    assert depot.remove("beta") == 100
    with pytest.raises(NotFound):
        depot.layer_path(one)


def test_saving_over_an_image_drops_the_layer_that_only_it_used(depot: Depot) -> None:
    with depot.locked():
        old = layer_file(depot, b"old")
        depot.save(Image(name="alpha", layers=[old]))
        fresh = layer_file(depot, b"new")
        depot.save(Image(name="alpha", layers=[fresh]))
    assert [path.stem for path in (depot.path / "layers").iterdir()] == [fresh]


@needs_mkfs
def test_five_builds_and_removals_leave_the_disk_as_it_was(depot: Depot, tree: Path) -> None:
    depot.remove(build_from_tree(depot, "tree", tree).name)
    before = disk(depot.path)
    for _ in range(5):
        image = build_from_tree(depot, "tree", tree)
        assert depot.image("tree") == image
        assert depot.layer_path(image.layers[0]).stat().st_size == image.size_bytes
        depot.remove("tree")
        assert disk(depot.path) == before
    assert list((depot.path / "tmp").iterdir()) == []


@needs_mkfs
def test_a_build_gives_the_same_layer_again_whatever_the_dates(depot: Depot, tree: Path) -> None:
    first = build_from_tree(depot, "one", tree, newest_s=1_000_000_000)
    copy = tree.with_name("copy")
    shutil.copytree(tree, copy, symlinks=True)
    os.utime(copy / "bin/hello", (2_000_000_000, 2_000_000_000))
    second = build_from_tree(depot, "two", copy, newest_s=1_000_000_000)
    assert first.layers == second.layers
    assert len(list((depot.path / "layers").iterdir())) == 1


@needs_mkfs
def test_dates_are_kept_unless_a_bound_is_given(depot: Depot, tree: Path) -> None:
    first = build_from_tree(depot, "one", tree)
    os.utime(tree / "bin/hello", (1_000_000_000, 1_000_000_000))
    second = build_from_tree(depot, "two", tree)
    assert first.layers != second.layers


@needs_mkfs
def test_a_failed_build_leaves_nothing(depot: Depot, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        build_from_tree(depot, "tree", tmp_path / "nowhere")
    with pytest.raises(InvalidRequest):
        build_from_tree(depot, "Bad Name", tmp_path)
    assert depot.names() == []
    assert not list((depot.path / "tmp").glob("*"))


def test_images_are_those_of_the_yard_that_the_client_file_belongs_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state, elsewhere = tmp_path / "state", tmp_path / "elsewhere"
    state.mkdir()
    monkeypatch.setenv("CLOUDYARD_CLIENT_FILE", str(state / "client.json"))
    assert local_depot() == DEPOT_DEFAULT
    config = YardConfig(state=str(state), run=str(tmp_path / "run"), depot=str(elsewhere))
    save_config(config)
    Depot(elsewhere).save(Image(name="alpha", layers=[]))
    assert main(["image", "rm", "alpha"]) == 0
    assert capsys.readouterr().out.startswith("Removed alpha")
    assert Depot(elsewhere).names() == []


@needs_mkfs
def test_a_build_takes_paths_as_strings(depot: Depot, tree: Path) -> None:
    image = build_from_tree(str(depot.path), "tree", str(tree))
    assert depot.image("tree") == image


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--name", "BAD/NAME"], "is not an image name"),
        (["--suite", "no such"], "is not the name of a Debian release"),
        (["--package", "a,b"], "is not the name of a Debian package"),
    ],
)
def test_a_bad_argument_is_refused_before_the_build(
    depot: Depot, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["image", "build", "debian", "--depot", str(depot.path), *words]) == 2
    assert said in capsys.readouterr().err
    assert not depot.path.exists()


def test_a_layer_does_not_stay_without_its_image(depot: Depot) -> None:
    depot.path.mkdir()
    (depot.path / "images").write_text("in the way")
    with depot.work_dir() as work:
        file = work.path / "layer"
        file.write_bytes(b"content")
        with pytest.raises(Conflict):
            depot.add_image("alpha", file, config=ImageConfig())
    assert not list(depot.path.rglob("*.erofs"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_told_what_it_may_not_do() -> None:
    with tempfile.TemporaryDirectory(prefix="cloudyard-depot-") as directory:
        depot = Depot(directory)
        depot.path.chmod(0o755)
        depot.save(Image(name="alpha", layers=[]))
        assert "Cannot use the depot" in as_nobody(depot, "rm", "alpha")
        (depot.path / "images").chmod(0o700)
        for words in (["ls"], ["rm", "alpha"]):
            said = as_nobody(depot, *words)
            assert "Permission denied" in said
            assert "sudo" in said


def as_nobody(depot: Depot, *words: str) -> str:
    """What `cloudyard image` says on stderr to a user who owns nothing; it must fail, with a sentence."""
    program = (
        "import os, sys, cloudyard.cli.images; from cloudyard.cli import main;"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534); sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "image", *words, "--depot", str(depot.path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr


def test_work_of_a_killed_process_is_removed_and_work_under_way_is_not(depot: Depot) -> None:
    hold = "import sys; from cloudyard.images.depot import Depot\nwith Depot(sys.argv[1]).work_dir() as w:\n"
    hold += " (w.path / 'half').write_text('made'); print(w.path, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(depot.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    ) as other:
        assert other.stdout is not None
        work = Path(other.stdout.readline().strip())
        depot.save(Image(name="alpha", layers=[]))
        assert (work / "half").exists()
        other.send_signal(signal.SIGKILL)
    depot.save(Image(name="alpha", layers=[]))
    assert not work.exists()


def test_a_damaged_image_is_named_and_can_be_removed(depot: Depot) -> None:
    with depot.locked():
        layer = layer_file(depot, b"kept")
        depot.save(Image(name="alpha", layers=[layer]))
    (depot.path / "images/beta.json").write_text("{")
    with pytest.raises(Exception, match="is damaged") as caught:
        depot.image("beta")
    assert "cloudyard image rm beta" in str(caught.value)
    assert depot.remove("beta") == 0
    assert depot.layer_path(layer).exists()


def test_a_depot_that_is_a_file_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Conflict, match="Cannot use the depot"):
        Depot(tmp_path / "file").save(Image(name="alpha", layers=[]))


@pytest.mark.parametrize("package", ["", "-y", "python3 git", "python3,git", "Python", "a;b", "../x"])
def test_a_bad_package_name_is_refused(package: str) -> None:
    with pytest.raises(InvalidRequest):
        check_package(package)


@pytest.mark.parametrize("package", ["python3", "g++", "libc6:amd64", "git=1:2.39.5-0+deb12u2"])
def test_a_package_name_may_carry_architecture_and_version(package: str) -> None:
    check_package(package)


def test_only_sources_of_the_release_are_handed_on(tmp_path: Path) -> None:
    etc = tmp_path / "apt"
    (etc / "sources.list.d").mkdir(parents=True)
    (etc / "sources.list").write_text(
        "# deb http://no.example bookworm main\ndeb [arch=amd64] http://a.example bookworm main\n"
        "deb http://a.example trixie main\ndeb-src http://a.example bookworm main\n"
    )
    (etc / "sources.list.d/one.sources").write_text(
        "# a note\nTypes: deb deb-src\nURIs: http://b.example\nSuites: bookworm bookworm-updates trixie\n"
        "Components: main\nSigned-By:\n -----BEGIN\n .\n -----END\n\n"
        "Types: deb\nURIs: http://c.example\nSuites: nodistro\n"
    )
    (etc / "sources.list.d/off.sources").write_text(
        "Types: deb\nURIs: http://d.example\nSuites: bookworm\nComponents: main\nEnabled: no\n"
    )
    (etc / "sources.list.d/gone.list.disabled").write_text("deb http://e.example bookworm main\n")
    made = {path.suffix: path.read_text() for path in apt_sources("bookworm", tmp_path, etc=etc)}
    assert made[".list"] == "deb [arch=amd64] http://a.example bookworm main\n"
    assert made[".sources"] == (
        "Types: deb\nSuites: bookworm bookworm-updates\nURIs: http://b.example\nComponents: main\n"
        "Signed-By:\n -----BEGIN\n .\n -----END\n\n"
    )


def test_the_command_lists_and_removes_images(depot: Depot, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--depot", str(depot.path)]
    assert main(["image", "ls", *place]) == 0
    assert "no images" in capsys.readouterr().out
    with depot.locked():
        layer = layer_file(depot, b"x" * 2**20)
        depot.save(Image(name="alpha", layers=[layer], size_bytes=2**20))
    assert main(["image", "ls", "--json", *place]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["size_bytes"], row["layers"]) == ("alpha", 2**20, [layer])
    assert main(["image", "ls", *place]) == 0
    assert "alpha" in capsys.readouterr().out
    assert main(["image", "rm", "alpha", *place]) == 0
    assert capsys.readouterr().out == "Removed alpha; 1 MiB freed.\n"
    assert main(["image", "rm", "alpha", *place]) == 1
    assert "no image 'alpha'" in capsys.readouterr().err
