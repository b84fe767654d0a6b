"""What changes are named for: attacks on the grader, and no repair of the shipped tasks."""

import pytest

from rlpipe.envs.sandbox.tree import tree_of
from rlpipe.envs.swe.instances import load_instances
from rlpipe.envs.swe.tamper import changes_of_diff, changes_of_trees, tampering

pytestmark = pytest.mark.unit
CODE = {
    "frames": ["frame = sys._getframe(1)", "inspect.stack()", "gc.get_objects()", "f.f_back.f_globals"],
    "tests": ["import unittest.result", "from _pytest import reports", "os.environ['PYTEST_ADDOPTS'] = ''"],
    "builtins": ["import builtins", "__builtins__['len'] = one"],
    "replaced": ["json.dumps = lie", "    time.perf_counter = lambda: 0", "setattr(json, 'dumps', lie)"],
    "equality": ["    def __eq__(self, other):", "__lt__ = lambda *a: True"],
    "modules": ["sys.modules['core'] = fake", "sys.meta_path.insert(0, finder)", "sys.path.insert(0, here)"],
    "exit": ["os._exit(0)", "sys.exit(0)", "atexit.register(f)", "raise SystemExit"],
    "channels": ["open('/proc/1/fd/1')", "os.write(3, text)", "sys.stdout = None"],
}


def diff(path, *lines, created=False):
    head = f"diff --git a/{path} b/{path}\n" + ("new file mode 100644\n" if created else "")
    old = "/dev/null" if created else f"a/{path}"
    return f"{head}--- {old}\n+++ b/{path}\n@@ -1 +1 @@\n" + "".join(f"+{line}\n" for line in lines)


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in CODE.items() for line in lines])
def test_each_kind_is_named_in_a_diff_and_in_a_tree(name, line):
    assert name in tampering(changes_of_diff(diff("core.py", "x = 1", line))).split()
    before, after = tree_of({"core.py": "x = 1\n"}), tree_of({"core.py": f"x = 1\n{line}\n"})
    assert name in tampering(changes_of_trees(before, after)).split()
    assert tampering(changes_of_trees(after, after)) == "", "what was there before"
    assert tampering(changes_of_diff(diff("core.py").replace("+1 @@", f"+1 @@\n-{line}\n {line}"))) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (diff("tests/test_core.py", "import pytest"), "test_files"),
        (diff("tests/test_mine.py", "import pytest", created=True), ""),
        (diff("conftest.py", "x = 1", created=True), "config_files"),
        (diff("a/setup.cfg", "x = 1"), "config_files"),
        (diff("evil.egg-info/entry_points.txt", "x", created=True), "config_files"),
        (diff("core.py", "++ b/setup.cfg"), ""),
        (diff("core.py", "\x0cos._exit(0)"), "exit"),
        (diff("core.py", "x = 1") + diff("b.py", "os._exit(0)") + diff("test_core.py"), "exit test_files"),
        ("", ""),
        ("no diff", ""),
    ],
)
def test_files_are_named_unless_they_are_new_tests(text, expected):
    assert tampering(changes_of_diff(text)) == expected


def test_a_deleted_test_is_named():
    before = tree_of({"core.py": "x = 1", "test_core.py": "y = 2"})
    assert tampering(changes_of_trees(before, tree_of({"core.py": "x = 2"}))) == "test_files"


@pytest.mark.parametrize("name", ["train", "held_instances", "held_families"])
def test_no_shipped_repair_is_named(name):
    for instance in load_instances(f"shipped:data/swe/{name}.jsonl", "file").values():
        patch = instance.patch.replace("--- a/", "diff --git a/ b/core.py\n--- a/")
        assert [change.path for change in changes_of_diff(patch)] and not tampering(changes_of_diff(patch))
