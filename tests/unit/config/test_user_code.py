"""Functions named by `module:function` or `path/to/file.py:function`: loaded, kept apart, refused by name."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from rlpipe.config import user_code
from rlpipe.config.algo import AlgoConfig
from rlpipe.config.env import EnvConfig
from rlpipe.config.user_code import absolute, load_function

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder a run is started in; modules and search path are those of before afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(user_code, "_user_folders", set())
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def load(name):
    return load_function(name, setting="env.suite", takes="config, seed")


def write(file, text):
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)


def test_a_file_is_named_relative_to_the_start_of_the_run_absolutely_or_from_home(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder / "home"))
    write(folder / "home" / "mine.py", "def f(): return 3")
    for path in ("home/mine.py", "./home/../home/mine.py", "~/mine.py", folder / "home" / "mine.py"):
        assert load(f"{path}:f")() == 3


def test_settings_hold_absolute_files_so_a_worker_elsewhere_loads_the_same_one(folder, monkeypatch):
    write(folder / "mine.py", "def f(): return 3")
    env = EnvConfig(suite="mine.py:f")
    algo = AlgoConfig(correction="user", user_correction="mine.py:f")
    monkeypatch.chdir("/")
    for name in (env.suite, algo.user_correction):
        assert name == f"{folder}/mine.py:f"
        assert load(pickle.loads(pickle.dumps(name)))() == 3
    assert absolute("a.b:c.d") == "a.b:c.d" and absolute("") == ""


def test_files_of_one_name_and_their_siblings_of_one_name_do_not_collide(folder):
    for number in (1, 2):
        write(folder / f"f{number}" / "mine.py", "import sibling\ndef f(): return sibling.number")
        write(folder / f"f{number}" / "sibling.py", f"number = {number}")
    assert [load(f"f{number}/mine.py:f")() for number in (1, 2, 1)] == [1, 2, 1]


def test_a_file_is_executed_once_and_again_when_it_has_changed(folder):
    write(folder / "mine.py", "def f(): return 1")
    assert load("mine.py:f") is load("mine.py:f")
    write(folder / "mine.py", "def f(): return 22")
    assert load("mine.py:f")() == 22


def test_objects_of_a_file_are_pickled_and_its_dataclasses_work(folder):
    write(folder / "mine.py", "from dataclasses import dataclass\n@dataclass\nclass A:\n  x: 'int' = 1")
    made = load("mine.py:A")(x=5)
    assert pickle.loads(pickle.dumps(made)) == made


def test_files_named_as_installed_modules_replace_none_of_them(folder):
    for name in ("types", "numpy", "json", "yaml"):
        write(folder / f"{name}.py", "raise ImportError('mine')")
    write(folder / "mine.py", "import types, numpy, json\ndef f(): return numpy.ones(1).sum()")
    load_both = (
        "from rlpipe.config.user_code import load_function as load\n"
        "for name in ('mine.py:f', 'mine:f'): print(load(name, setting='s', takes='')())\n"
        "import yaml; print(yaml.__file__)"
    )
    # -P: the folder is not on the path before, as with the command `rlpipe`.
    done = subprocess.run([sys.executable, "-P", "-c", load_both], capture_output=True, text=True)
    assert done.stdout.startswith("1.0\n1.0\n"), done.stderr
    assert str(folder) not in done.stdout


@pytest.mark.parametrize("module", ["rlpipe", "rlpipe.run"])
def test_python_m_starts_in_a_folder_with_files_named_as_what_it_imports(folder, module):
    for name in ("numpy", "yaml", "hydra", "dataclasses", "difflib", "pathlib"):
        write(folder / f"{name}.py", "raise ImportError('mine')")
    given = [sys.executable, "-m", module, *["run"] * (module == "rlpipe"), "+recipe=swe_rl", "--cfg", "job"]
    done = subprocess.run(given, capture_output=True, text=True)
    assert "user_correction" in done.stdout, done.stderr


def test_a_file_may_itself_be_named_as_an_installed_module(folder):
    write(folder / "types.py", "def f(): return 7")
    assert load("types.py:f")() == 7
    assert "SimpleNamespace" in vars(__import__("types"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine", "must be module:function or path/to/file.py:function"),
        ("mine.py", r"add the function, as in mine\.py:NAME"),
        ("a:b:c", "must be module:function"),
        (":f", "must be module:function"),
        ("mine.py:", "must be module:function"),
        ("mime.py:reward", r"there is no file .*/mime\.py\. Did you mean mine\.py"),
        ("none/x.py:f", r"no file .*/none/x\.py\. A relative path starts at the folder in which"),
        ("mine.py:rewrad", r"/mine\.py has no 'rewrad'\. Did you mean reward\?"),
        ("mine:rewrad", r"/mine\.py has no 'rewrad'\. Did you mean reward\?"),
        ("mine.py:xyz", r"It defines reward, Suite\."),
        ("mine.py:number", r"is a int, not a function\(config, seed\)"),
        ("not_there:f", "cannot be imported from .*No module named 'not_there'.*Name its file"),
        ("syntax.py:f", r"syntax\.py:2: importing .*SyntaxError.*Correct that line"),
        ("raises.py:f", r"raises\.py:3: importing .*ZeroDivisionError"),
        ("raises:f", r"raises\.py:3: importing .*ZeroDivisionError"),
        ("leaves.py:f", r"leaves\.py:1: importing .*SystemExit: 3"),
        ("imports.py:f", r"imports\.py:1: importing .*No module named 'nunpy'.*install it, or put nunpy\.py"),
        ("imports:f", r"imports\.py:1: importing .*No module named 'nunpy'"),
        ("calls.py:f", r"calls\.py:2: importing .*JSONDecodeError"),
        ("latin.py:f", r"latin\.py.*importing .*SyntaxError"),
        ("nul.py:f", r"nul\.py.*importing "),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_the_place_and_a_hint(folder, name, message):
    write(folder / "mine.py", "import os\nnumber = 3\ndef reward(): ...\nclass Suite: ...")
    write(folder / "syntax.py", "a = 1\ndef f(:")
    write(folder / "raises.py", "\n\n1 / 0")
    write(folder / "leaves.py", "raise SystemExit(3)")
    write(folder / "imports.py", "import nunpy")
    write(folder / "calls.py", "import json\njson.loads('{')")
    (folder / "latin.py").write_bytes(b"a = '\xe9'")
    (folder / "nul.py").write_bytes(b"a = 1\0")
    with pytest.raises(ValueError, match=message) as refused:
        load(name)
    assert "env.suite=" in str(refused.value)
    assert not [module for module in sys.modules if module.startswith(("syntax_", "raises_", "leaves_"))]
