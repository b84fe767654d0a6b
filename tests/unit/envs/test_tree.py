"""Trees written and read back, and what hostile directories cannot do to the reader."""

import os
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.envs.sandbox.tree import (
    EmptyDirectory,
    File,
    Link,
    TreeLimits,
    TreeTooLarge,
    exceeds,
    fingerprint,
    read_tree,
    remove_tree,
    scratch,
    tree_of,
    write_tree,
)

pytestmark = pytest.mark.unit
LIMITS = TreeLimits(max_bytes=1 << 20, max_entries=100)


def test_what_is_written_is_read_back(tmp_path):
    tree = {
        "a.py": File(b"x = 1\n"),
        "run": File(b"\x00\xff", executable=True),
        "deep/er/b.txt": File(b""),
        "deep/link": Link("../a.py"),
        "empty": EmptyDirectory(),
    }
    write_tree(tree, tmp_path, owner=None)
    assert read_tree(tmp_path, LIMITS) == tree


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b", "c/d", "c/e", "f/g/h"]), st.binary(max_size=40)))
def test_any_tree_survives_the_disk(tmp_path_factory, contents):
    root = tmp_path_factory.mktemp("tree")
    tree = {path: File(content) for path, content in contents.items()}
    write_tree(tree, root, owner=None)
    assert read_tree(root, LIMITS) == tree


def test_links_are_kept_as_links_and_never_followed(tmp_path):
    outside = tmp_path / "secret"
    outside.mkdir()
    (outside / "key").write_text("hunter2")
    work = tmp_path / "work"
    work.mkdir()
    (work / "file").symlink_to(outside / "key")
    (work / "dir").symlink_to(outside)
    (work / "loop").symlink_to("loop")
    assert read_tree(work, LIMITS) == {
        "file": Link(str(outside / "key")),
        "dir": Link(str(outside)),
        "loop": Link("loop"),
    }
    remove_tree(work)
    assert (outside / "key").read_text() == "hunter2"


def test_pipes_and_bytecode_are_left_out(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_bytes(b"x")
    (tmp_path / "a.py").write_text("")
    assert read_tree(tmp_path, LIMITS) == tree_of({"a.py": ""})


def test_unreadable_files_and_directories_are_read_all_the_same(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("x")
    (tmp_path / "d" / "f").chmod(0)
    (tmp_path / "d").chmod(0)
    assert read_tree(tmp_path, LIMITS) == tree_of({"d/f": "x"})


def test_too_many_entries_too_many_bytes_and_too_deep_are_refused(tmp_path):
    many, big, deep = (tmp_path / name for name in ("many", "big", "deep"))
    for directory in (many, big, deep):
        directory.mkdir()
    for number in range(101):
        (many / str(number)).touch()
    (big / "f").write_bytes(b"x" * ((1 << 20) + 1))
    here = os.open(deep, os.O_RDONLY)
    for _ in range(60):
        os.mkdir("d" * 100, dir_fd=here)
        below = os.open("d" * 100, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    for directory in (many, big, deep):
        assert exceeds(directory, LIMITS)
        with pytest.raises(TreeTooLarge):
            read_tree(directory, LIMITS)
        remove_tree(directory)
        assert not directory.exists()


def test_a_tree_deeper_than_the_interpreters_stack_is_removed():
    top = Path(tempfile.mkdtemp(dir=scratch()))
    root = top / "root"
    root.mkdir()
    here = os.open(root, os.O_RDONLY)
    for _ in range(sys.getrecursionlimit() + 500):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    remove_tree(root)
    top.rmdir()  # nothing is left beside it


def test_fingerprints_tell_content_mode_kind_and_place_apart_but_not_order():
    trees = [
        {"a": File(b"1")},
        {"a": File(b"1", executable=True)},
        {"b": File(b"1")},
        {"a": File(b"2")},
        {"a": Link("1")},
        {"a": EmptyDirectory()},
        {"a": File(b"1"), "b": File(b"")},
    ]
    assert len({fingerprint(tree) for tree in trees}) == len(trees)
    assert fingerprint({"a": File(b""), "b": File(b"x")}) == fingerprint({"b": File(b"x"), "a": File(b"")})
