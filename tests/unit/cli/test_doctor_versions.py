"""The doctor compares the versions that are installed with the tested ones."""

import sys

import pytest

from rlpipe.cli import doctor


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout that needs NumPy, at the installed version, and pins another package, which is absent."""
    pins = f"numpy=={doctor.installed('numpy')}\nwith-setuptools==2.5.0\n"
    (tmp_path / "constraints.txt").write_text(pins)
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["numpy"]\n')
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    monkeypatch.setattr(doctor, "CHECKOUT", True)
    monkeypatch.setenv("RLPIPE_PINS", "cpu")
    return tmp_path


def test_a_package_inside_another_one_is_not_taken_for_an_installed_one(checkout, monkeypatch):
    """Setuptools contains packages of other versions and, once imported, puts them on the path."""
    inside = checkout / "_vendor"
    (inside / "with_setuptools-2.4.0.dist-info").mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: with-setuptools\nVersion: 2.4.0\n"
    (inside / "with_setuptools-2.4.0.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.setattr(sys, "path", [*sys.path])
    check = doctor.check_package

    def importing(name, pin):
        sys.path.append(str(inside))
        return check(name, pin)

    monkeypatch.setattr(doctor, "check_package", importing)
    numpy, others = doctor.check_packages()
    assert doctor.installed("with-setuptools") == "2.4.0"
    assert (numpy.level, others.level, others.found) == (doctor.Level.OK, doctor.Level.OK, "as tested")


def test_another_version_than_the_tested_one_is_named(checkout):
    (checkout / "constraints.txt").write_text("numpy==0.1\n")
    numpy, others = doctor.check_packages()
    assert numpy.level is others.level is doctor.Level.WARN
    assert "tested with 0.1" in numpy.found and others.found.startswith("numpy ")
