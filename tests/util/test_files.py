"""Tests of atomic writing: permissions, links, full disks, unwritable paths, threads."""

import os
import stat
import threading
from functools import partial
from pathlib import Path

import pytest

from addnorm._util.files import UnwritableError, atomic_path, check_writable, write_text


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_write_makes_folder_and_leaves_no_other_file(tmp_path):
    path = tmp_path / "new" / "deep" / "a.txt"
    for text in ("before", "α\n"):
        assert write_text(path, text) == path
    assert path.read_bytes() == "α\n".encode()
    assert names(path.parent) == ["a.txt"]


def test_write_without_parents_makes_no_folder(tmp_path):
    with pytest.raises(UnwritableError, match=r"which cannot be written \(No such file or directory\)"):
        write_text(tmp_path / "new" / "a", "x", parents=False)
    assert names(tmp_path) == []


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_write_gives_permissions_of_new_file(tmp_path, umask):
    path = tmp_path / "a"
    before = os.umask(umask)
    try:
        write_text(path, "x")
    finally:
        os.umask(before)
    assert mode(path) == 0o666 & ~umask


@pytest.mark.parametrize("bits", [0o600, 0o640, 0o444])
def test_write_keeps_permissions_of_existing_file(tmp_path, bits):
    path = tmp_path / "a"
    path.write_text("before")
    path.chmod(bits)
    with atomic_path(path) as temporary:
        assert mode(temporary) == 0o600  # private until it gets the permissions of the file
        temporary.write_text("after")
    assert (path.read_text(), mode(path)) == ("after", bits)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, OSError("a message of its own"), ValueError("x")])
def test_failed_block_keeps_old_file_and_error(tmp_path, error):
    path = tmp_path / "a"
    path.write_text("before")
    with (  # noqa: PT012 (the block is what fails)
        pytest.raises(error if isinstance(error, type) else type(error)) as raised,
        atomic_path(path) as temporary,
    ):
        temporary.write_text("half")
        raise error
    assert not isinstance(raised.value, UnwritableError)
    assert (path.read_text(), names(tmp_path)) == ("before", ["a"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_keeps_old_file(tmp_path):
    path = tmp_path / "a"
    path.write_text("before")
    with pytest.raises(UnwritableError) as raised, atomic_path(path):
        Path("/dev/full").write_text("x")
    assert str(raised.value) == (
        f"path is '{path}', which cannot be written (No space left on device): choose another path."
    )
    assert (path.read_text(), names(tmp_path)) == ("before", ["a"])


def test_link_leads_to_its_target(tmp_path):
    (tmp_path / "folder").mkdir()
    target, link, dangling = tmp_path / "folder" / "a", tmp_path / "link", tmp_path / "dangling"
    target.write_text("before")
    link.symlink_to(target)
    dangling.symlink_to("folder/b")
    for path in (link, dangling):
        check_writable(path)
        write_text(path, "after")
        assert path.is_symlink()
        assert path.read_text() == "after"
    assert names(tmp_path / "folder") == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("folder", "a directory, expected the file to write: choose another path."),
        ("pipe", "a pipe, expected the file to write: choose another path."),
        ("to_null", "a device, expected the file to write: choose another path."),
        ("loop", "which cannot be written (Too many levels of symbolic links): choose another path."),
        ("file/a", "which cannot be written (Not a directory): choose another path."),
        ("a\0", "which cannot be written ("),
        ("x" * 300, "which cannot be written (File name too long): choose another path."),
    ],
)
def test_unwritable_path_is_one_sentence(tmp_path, name, words):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to_null").symlink_to("/dev/null")
    (tmp_path / "loop").symlink_to("loop")
    before = names(tmp_path)
    path = tmp_path / name
    for argument, refuse in (("--out", partial(check_writable, name="--out")), ("path", partial(write_text, text="x"))):
        with pytest.raises(UnwritableError) as raised:
            refuse(path)
        assert str(raised.value).startswith(f"{argument} is {str(path)!r}, {words}")
        assert "\n" not in str(raised.value)
    assert names(tmp_path) == before
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UnwritableError, match="Permission denied"):
        check_writable(tmp_path / "a")
    tmp_path.chmod(0o700)


def test_check_makes_folder_and_keeps_file(tmp_path):
    path = tmp_path / "new" / "a"
    check_writable(path)
    assert names(path.parent) == []
    path.write_text("before")
    check_writable(path)
    assert path.read_text() == "before"


def test_long_name_that_the_system_allows_is_written(tmp_path):
    path = tmp_path / ("ä" * 127)
    assert write_text(path, "x").read_text() == "x"


def test_threads_write_one_file_whole(tmp_path):
    path, texts = tmp_path / "a", [character * 100_000 for character in "abcd"]
    threads = [threading.Thread(target=write_text, args=(path, text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in texts
    assert names(tmp_path) == ["a"]


def test_only_null_bytes_make_a_value_error_unwritable(tmp_path):
    with pytest.raises(ValueError, match="surrogates not allowed"):
        write_text(tmp_path / "a", "\ud800")
    assert names(tmp_path) == []
