"""Taking a solution out of a folder whose owner sets traps."""

import hashlib
import io
import os
import socket
import stat
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from solutions import descriptors

from justgoal.evaluation import collect as module
from justgoal.evaluation.collect import InvalidSolution, Solution, collect

TEXT = b"def run(x):\n    return x\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "solution"
    folder.mkdir()
    (folder / "solution.py").write_bytes(TEXT)
    return folder


def why(folder: Path) -> str:
    with pytest.raises(InvalidSolution) as problem:
        collect(folder)
    return str(problem.value)


def test_regular_files(folder: Path) -> None:
    (folder / "src" / "deep").mkdir(parents=True)
    (folder / "src" / "kernel.cpp").write_bytes(b"int x;\n")
    (folder / "src" / "deep" / "\u00e4.bin").write_bytes(bytes(range(256)))
    (folder / "empty").mkdir()
    found = collect(folder)
    assert found.contents == {
        "solution.py": TEXT,
        "src/kernel.cpp": b"int x;\n",
        "src/deep/\u00e4.bin": bytes(range(256)),
    }
    assert found.files["src/kernel.cpp"] == hashlib.sha256(b"int x;\n").hexdigest()


def test_pycache_stays_behind(folder: Path) -> None:
    (folder / "src" / "__pycache__").mkdir(parents=True)
    (folder / "src" / "__pycache__" / "solution.cpython-311.pyc").write_bytes(b"x")
    (folder / "__pycache__").symlink_to("/etc")
    assert list(collect(folder).contents) == ["solution.py"]


def test_hash_is_that_of_the_listing() -> None:
    listing = "".join(
        f"{hashlib.sha256(data).hexdigest()}  {path}\n" for path, data in (("a/b.h", b"x"), ("solution.py", TEXT))
    )
    found = Solution({"solution.py": TEXT, "a/b.h": b"x"})
    assert found.sha256 == hashlib.sha256(listing.encode()).hexdigest()


def test_hash_does_not_depend_on_place_or_time(folder: Path, tmp_path: Path) -> None:
    (folder / "a.h").write_bytes(b"x")
    (folder / "a.h").chmod(0o755)
    found = collect(folder)
    found.write(tmp_path / "elsewhere")
    os.utime(tmp_path / "elsewhere" / "a.h", (1, 1))
    again = collect(tmp_path / "elsewhere")
    assert again.sha256 == found.sha256
    assert again.tar() == found.tar()
    (tmp_path / "elsewhere" / "a.h").write_bytes(b"y")
    assert collect(tmp_path / "elsewhere").sha256 != found.sha256


@pytest.mark.parametrize("change", [{"b.h": b"x"}, {"a.h": b""}, {"a.hx": b""}, {"a.h": b"x", "b.h": b""}])
def test_hash_tells_names_and_contents_apart(change: dict[str, bytes]) -> None:
    assert Solution({"solution.py": TEXT, "a.h": b"x"}).sha256 != Solution({"solution.py": TEXT, **change}).sha256


def test_tar_holds_files_alone(folder: Path) -> None:
    (folder / "src").mkdir()
    (folder / "src" / "a.h").write_bytes(b"x")
    with tarfile.open(fileobj=io.BytesIO(collect(folder).tar())) as archive:
        items = archive.getmembers()
    assert [(item.name, item.size, item.uid, item.uname, item.mtime) for item in items] == [
        ("solution.py", len(TEXT), 0, "", 1_000_000_000),
        ("src/a.h", 1, 0, "", 1_000_000_000),
    ]


def test_not_a_folder(tmp_path: Path) -> None:
    assert why(tmp_path / "solution") == "there is no folder solution"
    (tmp_path / "solution").write_bytes(TEXT)
    assert why(tmp_path / "solution") == "solution is not a folder"


def test_a_link_to_a_folder_is_none(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert why(tmp_path / "link") == "link is not a folder"


def test_no_entry(folder: Path) -> None:
    (folder / "solution.py").rename(folder / "solution.cpp")
    assert why(folder) == "it has no solution.py"
    (folder / "solution.py").mkdir()
    assert why(folder) == "it has no solution.py"


def a_link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def a_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def a_link_to_a_folder(path: Path) -> None:
    path.symlink_to("..")


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(path.parent)
        server.bind(path.name)
        os.chdir(here)


def a_character_device(path: Path) -> None:
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))


def a_block_device(path: Path) -> None:
    os.mknod(path, 0o666 | stat.S_IFBLK, os.makedev(240, 0))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (a_link, "a link"),
        (a_dangling_link, "a link"),
        (a_link_to_a_folder, "a link"),
        (a_fifo, "a FIFO"),
        (a_socket, "a socket"),
        (a_character_device, "a device"),
        (a_block_device, "a device"),
    ],
)
@pytest.mark.parametrize("place", ["x", "src/x", "solution.py"])
def test_other_than_files_and_folders(folder: Path, make: Callable[[Path], None], kind: str, place: str) -> None:
    if "device" in kind and os.geteuid() != 0:
        pytest.skip("only root makes devices")
    (folder / "src").mkdir()
    (folder / place).unlink(missing_ok=True)
    make(folder / place)
    assert why(folder) == f"{place} is {kind}: only regular files and folders"


@pytest.mark.parametrize("name", [b"a\nb", b"a\x1b[31mb", b"a\xffb", "a\u202eb".encode(), b"\x7f"])
@pytest.mark.parametrize("place", ["", "src"])
def test_unprintable_names(folder: Path, name: bytes, place: str) -> None:
    (folder / place).mkdir(exist_ok=True)
    (Path(os.fsdecode(os.fsencode(folder / place) + b"/" + name))).write_bytes(b"")
    text = why(folder)
    assert text.endswith(" has characters in its name that cannot be printed")
    assert text.isprintable()


def test_too_large(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SIZE_CAP", 3 << 20)
    (folder / "a").write_bytes(bytes(2 << 20))
    collect(folder)
    (folder / "b").write_bytes(bytes(2 << 20))
    assert why(folder) == "its files take more than 3 MB"
    (folder / "a").unlink()
    (folder / "b").write_bytes(bytes((3 << 20) + 1))
    assert why(folder) == "b is larger than 3 MB"


def test_a_sparse_file_is_not_read_whole(folder: Path) -> None:
    with (folder / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    assert why(folder) == "sparse is larger than 64 MB"


@pytest.mark.parametrize(("outer", "inner"), [(9_999, 0), (99, 100)])
def test_too_many(folder: Path, outer: int, inner: int) -> None:
    """Ten thousand files and folders are not; empty folders count too."""
    for one in range(outer):
        (folder / f"{one}").mkdir()
        for other in range(inner):
            (folder / f"{one}" / f"{other}").touch()
    collect(folder)
    (folder / "more").mkdir()
    assert why(folder) == "it has more than 10000 files and folders"


@pytest.fixture
def nested(folder: Path) -> Iterator[Callable[[str, int], None]]:
    """Makes folders in each other, and a file in the last: by hand, as their path is longer than paths may be."""

    def make(name: str, depth: int) -> None:
        descriptor = os.open(folder, os.O_DIRECTORY)
        for _ in range(depth):
            os.mkdir(name, dir_fd=descriptor)
            inner = os.open(name, os.O_DIRECTORY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor))
        os.close(descriptor)

    yield make
    subprocess.run(["rm", "-rf", str(folder)], check=True)


@pytest.mark.parametrize(("name", "depth"), [("d", 1500), ("d" * 200, 30), ("d" * 200, 900)])
def test_paths_too_deep_or_too_long(folder: Path, nested: Callable[[str, int], None], name: str, depth: int) -> None:
    """A level costs a frame and a descriptor, and no path of more than 4 KB can be opened again."""
    nested(name, depth)
    before = descriptors()
    assert why(folder) == "a path in it is longer than 512 bytes"
    assert descriptors() == before


def test_folders_in_folders(folder: Path, nested: Callable[[str, int], None], tmp_path: Path) -> None:
    nested("some_folder", 20)
    found = collect(folder)
    assert sorted(found.contents) == ["solution.py", "some_folder/" * 20 + "file"]
    found.write(tmp_path / "copy")
    assert collect(tmp_path / "copy") == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def run(x): pass", True), ("run = torch.compile(f)", True), ("from kernel import run", True),
        ("from kernel import *", True), ("import kernel as run", True), ("class run: pass", True),
        ("if x:\n    def run(x): pass", True), ("a, run = f()", True), ("def run(:", True), ("x = 1\0", True),
        ("-" * 100_000 + "1", True), ("+".join(["1"] * 20_000), True),
        ("", False), ("x = 1", False), ("runs = 1", False), ("x = 'run'  # run", False), ("import kernel", False),
    ],
    ids=lambda value: repr(value)[:30],
)  # fmt: skip
def test_whether_run_is_defined(text: str, found: bool) -> None:
    """What cannot be read is left to the build."""
    assert Solution({"solution.py": text.encode()}).mentions_run() is found


def test_no_descriptor_stays_open(folder: Path) -> None:
    (folder / "src").mkdir()
    (folder / "src" / "x").symlink_to("y")
    before = descriptors()
    for _ in range(3):
        why(folder)
    assert descriptors() == before


def test_files_without_permission(folder: Path) -> None:
    (folder / "solution.py").chmod(0)
    if os.geteuid() == 0:
        assert collect(folder).contents == {"solution.py": TEXT}
    else:
        assert "solution.py" in why(folder)


def test_swapped_links_are_never_followed(folder: Path, tmp_path: Path) -> None:
    """Files and folders turn into links to a secret and back as fast as they can, while copies are made."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "inner.txt").write_bytes(b"a secret")
    (folder / "src").mkdir()
    (folder / "src" / "inner.txt").write_bytes(b"plain")
    links = tmp_path / "links"
    links.mkdir()
    ending = threading.Event()

    def swap() -> None:
        number = 0
        while not ending.is_set():
            number += 1
            link, kept = links / str(number), links / f"kept-{number}"
            link.symlink_to(secret)
            (folder / "src").rename(kept)
            link.rename(folder / "src")
            (folder / "src").rename(link)
            kept.rename(folder / "src")
            link.unlink()

    swapping = threading.Thread(target=swap)
    swapping.start()
    outcomes = set()
    deadline = time.monotonic() + 2.0
    try:
        while time.monotonic() < deadline:
            try:
                outcomes.add(collect(folder).contents.get("src/inner.txt"))
            except InvalidSolution as problem:
                outcomes.add(str(problem))
    finally:
        ending.set()
        swapping.join()
    assert b"a secret" not in outcomes
    assert outcomes <= {
        None,
        b"plain",
        "src is a link: only regular files and folders",
        "src is gone: only regular files and folders",
        "src is not readable: only regular files and folders",
    }
    assert b"plain" in outcomes
    assert len(outcomes) > 1, "nothing was ever swapped in time"
