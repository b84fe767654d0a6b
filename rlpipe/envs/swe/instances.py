"""SWE instances: reads and checks files with SWE-bench's field names, as JSONL or parquet.

Owns the fields of an instance. An instance with `files` runs on a tree of files on this machine; an instance
without `files` runs in a container image or a checkout of its repository. Every error in a file is reported
with its line.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from rlpipe.config.data import DataConfig
from rlpipe.config.paths import resolve
from rlpipe.envs.function.rows import read_rows

_TEST_PART = re.compile(r"(tests?|test_.*|.*_test(\.py)?|conftest\.py)")
_DIFF_TARGET = re.compile(r"^\+\+\+ b/(\S+)", re.MULTILINE)
_IMAGE_COLUMNS = ("image", "image_name", "docker_image")
# Repositories of SWE-Gym, whose image names have another format. SWE-bench has none of these repositories.
_SWE_GYM = {
    *(
        "pandas-dev/pandas",
        "getmoto/moto",
        "python/mypy",
        "iterative/dvc",
        "dask/dask",
        "project-monai/monai",
    ),
    *("pydantic/pydantic", "conan-io/conan", "facebookresearch/hydra", "modin-project/modin"),
    "project-monai/monai",
}


@dataclass(slots=True, kw_only=True)
class Instance:
    """One task, with SWE-bench's fields.

    files: path -> text of each file of the repository, including tests; empty if `image` has the repository.
    fail_to_pass, pass_to_pass: test ids, e.g. "test_core.Test.test_it".
    graded_in_process: whether tests and the model's code run in one process, because the tests inspect the
    module (its source, its identity, callbacks); the code can cheat there.
    metadata: the record's remaining text and number fields (family, bug_kind, ...).
    """

    instance_id: str
    problem_statement: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    repo: str = ""
    base_commit: str = ""
    version: str = ""
    patch: str = ""
    test_patch: str = ""
    image: str = ""
    graded_in_process: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def tests(self) -> tuple[str, ...]:
        """Return all test ids that must pass."""
        return self.fail_to_pass + self.pass_to_pass

    @property
    def image_name(self) -> str:
        """Return the container image: `image`, or by default the name that SWE-bench or SWE-Gym uses.

        >>> Instance(instance_id="a__b-1", problem_statement="", fail_to_pass=("t",)).image_name
        'swebench/sweb.eval.x86_64.a_1776_b-1:latest'
        """
        gym = self.repo.lower() in _SWE_GYM
        owner, between = ("xingyaoww", "_s_") if gym else ("swebench", "_1776_")
        name = self.instance_id.replace("__", between).lower()
        return self.image or f"{owner}/sweb.eval.x86_64.{name}:latest"

    @property
    def labels(self) -> dict[str, Any]:
        """Return the metadata to record with each attempt."""
        return {name: self.metadata[name] for name in ("family", "bug_kind") if name in self.metadata}

    @property
    def patched_tests(self) -> list[str]:
        """Return the paths that `test_patch` writes."""
        return _DIFF_TARGET.findall(self.test_patch)

    def owns_test(self, path: str) -> bool:
        """Return whether a path belongs to the tests; grading never uses the model's version of such a file.

        >>> one = Instance(instance_id="i", problem_statement="", fail_to_pass=("checks.T.test_x",))
        >>> [one.owns_test(p) for p in ("test_core.py", "tests/data.txt", "checks.py", "core.py")]
        [True, True, True, False]
        """
        parts = PurePosixPath(path).parts
        if any(_TEST_PART.fullmatch(part) for part in parts):
            return True

        # A test of the instance may also be in a file whose name does not look like a test.
        module = ".".join([*parts[:-1], parts[-1].split(".")[0]])
        return any(test.startswith(f"{module}.") for test in self.tests)


def load_instances(setting: str, name: str) -> dict[str, Instance]:
    """Load the instances of one file by id, in the order of the file.

    setting: a path, possibly `shipped:...`; name: the setting that holds it, for messages.
    Raises ValueError with file, line and reason.
    """
    instances: dict[str, Instance] = {}
    first_place: dict[str, str] = {}
    for where, instance in _read(setting, name):
        if instance.instance_id in instances:
            raise ValueError(
                f"{where}: instance_id {instance.instance_id!r} was already on "
                f"{first_place[instance.instance_id]}: ids must be unique."
            )
        instances[instance.instance_id] = instance
        first_place[instance.instance_id] = where

    if not instances:
        raise ValueError(
            f"{name}={setting!r}: the data set {resolve(setting)} is empty. Give at least one instance."
        )

    return instances


def _read(setting: str, name: str) -> Iterator[tuple[str, Instance]]:
    """Yield (location, instance) for each instance of a file. Raises ValueError like `load_instances`."""
    path = resolve(setting)
    if path.suffix not in (".jsonl", ".gz"):
        rows = read_rows(DataConfig(split="test"), name, setting)
        for index in range(len(rows)):
            yield rows.place(index), instance_of(dict(rows[index]), rows.place(index))
        return

    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        # Some editors write a byte order mark at the start.
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{name}={setting!r}: cannot read {path}: {error}. Give a JSONL file.") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", parse_instance(line, f"{path}:{number}")


def parse_instance(line: str, where: str) -> Instance:
    """Parse an instance from one line of JSON. where: "file:line", the start of every message.

    Raises ValueError if the line is invalid.
    """
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: not JSON: {error.msg} at column {error.colno}. Each line must be one JSON object."
        ) from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(record).__name__}.")
    return instance_of(record, where)


def instance_of(record: dict[str, Any], where: str) -> Instance:
    """Convert a row to an instance; other fields become its metadata. Raises ValueError if it is invalid."""
    # Data sets use different columns for the image, and tables have empty cells for omitted texts.
    image = next((record[key] for key in _IMAGE_COLUMNS if record.get(key)), "")
    record = {key: value for key, value in record.items() if value is not None and key not in _IMAGE_COLUMNS}
    record["image"] = image

    # Pop each known field, so that the record keeps only fields that the format does not define.
    text = {
        key: _text(record.pop(key, ""), key, where)
        for key in ("repo", "base_commit", "version", "patch", "test_patch", "image")
    }

    instance = Instance(
        instance_id=_required(record, "instance_id", where),
        problem_statement=_required(record, "problem_statement", where),
        fail_to_pass=_ids(record.pop("FAIL_TO_PASS", None), "FAIL_TO_PASS", where),
        pass_to_pass=_ids(record.pop("PASS_TO_PASS", []), "PASS_TO_PASS", where),
        files=_files(record.pop("files", {}), where),
        graded_in_process=_flag(record.pop("graded_in_process", False), "graded_in_process", where),
        repo=text["repo"],
        base_commit=text["base_commit"],
        version=text["version"],
        patch=text["patch"],
        test_patch=text["test_patch"],
        image=text["image"],
    )

    instance.metadata = {k: v for k, v in record.items() if isinstance(v, str | int | float)}
    if not instance.fail_to_pass:
        raise ValueError(f"{where}: FAIL_TO_PASS is empty: name at least one test that the fix makes pass.")

    # Check the ids at launch: otherwise a misspelt id would give every attempt reward 0.
    for test in instance.tests if instance.files else ():
        if not _has_module(instance.files, test):
            raise ValueError(
                f"{where}: test id {test!r} names no file of the instance; "
                'with "files" an id is "module.Class.test", as unittest names it.'
            )
    return instance


def _required(record: dict[str, Any], key: str, where: str) -> str:
    value = record.pop(key, None)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: {key} must be a text that is not empty, got {value!r}.")
    return value


def _text(value: object, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {key} must be text, got {value!r}.")
    return value


def _flag(value: object, key: str, where: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{where}: {key} must be true or false, got {value!r}.")
    return value


def _ids(value: object, key: str, where: str) -> tuple[str, ...]:
    """Return test ids from a list or, as in SWE-bench, from the JSON text of a list."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: {key} is a string, but not a JSON list: {value!r}.") from error
    if not isinstance(value, list) or not all(isinstance(test, str) and test for test in value):
        raise ValueError(f"{where}: {key} must be a list of test ids, got {value!r}.")
    return tuple(value)


def _files(value: object, where: str) -> dict[str, str]:
    """Return the files of an instance. Raises ValueError for paths outside the repository."""
    if not isinstance(value, dict):
        raise ValueError(f'{where}: files must be an object of "path": "text", got {type(value).__name__}.')
    for path, text in value.items():
        parts = PurePosixPath(path).parts
        if not parts or path != "/".join(parts) or path.startswith("/") or ".." in parts:
            raise ValueError(f"{where}: files: {path!r} must be a plain path inside the repository.")
        if not isinstance(text, str):
            raise ValueError(f"{where}: files: {path!r} must hold text, got {type(text).__name__}.")
        if any(str(parent) in value for parent in PurePosixPath(path).parents):
            raise ValueError(f"{where}: files: {path!r} is inside another file.")
    return value


def _has_module(files: dict[str, str], test: str) -> bool:
    parts = test.split(".")
    return any("/".join(parts[:n]) + ".py" in files for n in range(1, len(parts)))
