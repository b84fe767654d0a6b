"""An installed wheel is complete: it runs away from any checkout, with its own configs, data and model."""

import json
import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.helpers.cli import ROOT

pytestmark = pytest.mark.packaging
SOURCES = (
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
    "NOTICE",
    "rlpipe",
    "configs",
    "data",
    "models",
    "sglang_env",
)


def pip(*arguments, cwd):
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps", "--no-input"]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The wheels of rlpipe and rlpipe-models, built from a copy so that the checkout stays clean."""
    top = tmp_path_factory.mktemp("wheels")
    source = top / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(top), ".", "./models", cwd=source)
    return next(top.glob("rlpipe-*.whl")), next(top.glob("rlpipe_models-*.whl"))


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory):
    """A folder with the content of rlpipe's wheel, as an installation has it."""
    target = tmp_path_factory.mktemp("installed")
    pip("install", "--target", str(target), str(wheels[0]), cwd=target)
    return target


def rlpipe(installed, cwd, *arguments):
    """`rlpipe run` from the installed wheel; the checkout is not on the path."""
    return subprocess.run(
        [sys.executable, "-m", "rlpipe.run", *arguments],
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "HOME": str(cwd), "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_wheels_have_every_module_and_every_shipped_file_once(wheels):
    names = [name for wheel in wheels for name in zipfile.ZipFile(wheel).namelist()]
    inside = set(names)
    assert len(names) == len(inside)
    assert wheels[0].stat().st_size < 13_000_000
    code = (path for path in (ROOT / "rlpipe").rglob("*") if path.is_file() and path.suffix != ".pyc")
    expected = {str(path.relative_to(ROOT)) for path in code}
    for folder in ("configs", "data", "models", "sglang_env"):
        files = (path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".pyc")
        expected |= {
            f"rlpipe/_data/{path.relative_to(ROOT)}" for path in files if path.parent != ROOT / "models"
        }
    assert expected <= inside, sorted(expected - inside)
    extra = {name for name in inside - expected if ".dist-info/" not in name}
    assert not extra, sorted(extra)


def where(target, relative):
    """What rlpipe.config.paths.shipped answers in an installation, or its error."""
    code = f"from rlpipe.config.paths import shipped; print(shipped({relative!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=target,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return (done.stdout + done.stderr).strip()


def test_the_installed_package_is_the_one_that_runs(installed):
    config = "models/tiny/config.json"
    assert where(installed, config) == str(installed / "rlpipe/_data" / config)


def test_a_model_of_the_other_package_is_found_once_that_is_installed(wheels, installed, tmp_path):
    message = where(installed, "models/tiny_tools")
    assert "'models/tiny_tools' is not in this installation" in message
    assert "Install the package rlpipe-models" in message
    pip("install", "--target", str(tmp_path), *map(str, wheels), cwd=tmp_path)
    for name in ("tiny", "tiny_tools"):
        assert where(tmp_path, f"models/{name}") == str(tmp_path / "rlpipe/_data/models" / name)


def test_help_works_from_an_unrelated_folder(installed, tmp_path):
    done = rlpipe(installed, tmp_path, "--help")
    assert done.returncode == 0, done.stderr
    assert "+recipe=swe_rl" in done.stdout


def test_the_shipped_recipe_composes(installed, tmp_path):
    done = rlpipe(installed, tmp_path, "--cfg", "job", "+recipe=swe_rl")
    assert done.returncode == 0, done.stderr
    assert "recipe: swe_rl" in done.stdout


def test_without_a_recipe_the_shipped_ones_are_listed(installed, tmp_path):
    done = rlpipe(installed, tmp_path)
    assert done.returncode == 2
    shipped = {path.stem for path in (ROOT / "configs" / "recipe").glob("*.yaml")}
    assert all(f"+recipe={name}" in done.stdout for name in shipped), done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


def test_doctor_judges_an_installation_without_a_checkout(installed, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "rlpipe", "doctor", "--json", "+recipe=swe_rl", "cluster=inline"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert findings["verl"]["level"] == findings["shipped files"]["level"] == "ok"
    assert "embedded engine: " in findings["memory"]["found"]
    assert findings["all versions"]["found"]
