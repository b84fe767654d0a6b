"""Reading SWE-bench style JSONL: what is read, and what is refused with file and line."""

import gzip
import json

import pytest

from rlpipe.config.env import EnvConfig, SandboxBackend, SandboxConfig
from rlpipe.envs.swe.instances import load_instances, parse_instance
from rlpipe.envs.swe.suite import load_splits

pytestmark = pytest.mark.unit

GOOD = {
    "instance_id": "one",
    "repo": "tiny/core",
    "base_commit": "abc",
    "version": "1",
    "problem_statement": "f is broken.",
    "patch": "",
    "test_patch": "",
    "FAIL_TO_PASS": ["test_core.T.test_f"],
    "PASS_TO_PASS": [],
    "files": {"core.py": "x = 1\n", "test_core.py": "", "tests/test_deep.py": ""},
    "family": "sum",
    "line": 3,
}


def write(tmp_path, *records, name="data.jsonl"):
    path = tmp_path / name
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines))
    return path


def test_fields_are_read_and_facts_kept(tmp_path):
    path = write(tmp_path, GOOD, "", GOOD | {"instance_id": "two"})
    instances = load_instances(str(path), "env.train_file")
    assert list(instances) == ["one", "two"]
    one = instances["one"]
    assert one.problem_statement == "f is broken." and one.files["core.py"] == "x = 1\n"
    assert one.tests == ("test_core.T.test_f",) and one.metadata == {"family": "sum", "line": 3}


def test_test_lists_may_be_json_strings_as_in_swe_bench():
    record = GOOD | {"FAIL_TO_PASS": '["test_core.T.test_f"]', "PASS_TO_PASS": '["tests.test_deep.T.test_a"]'}
    instance = parse_instance(json.dumps(record), "f:1")
    assert instance.tests == ("test_core.T.test_f", "tests.test_deep.T.test_a")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"instance_id": None}, ["instance_id", "None"]),
        ({"problem_statement": "  "}, ["problem_statement"]),
        ({"FAIL_TO_PASS": []}, ["FAIL_TO_PASS is empty"]),
        ({"FAIL_TO_PASS": "test_a"}, ["FAIL_TO_PASS", "JSON list"]),
        ({"PASS_TO_PASS": [1]}, ["PASS_TO_PASS", "[1]"]),
        ({"FAIL_TO_PASS": ["test_other.T.test_f"]}, ["test_other.T.test_f", "names no file"]),
        ({"files": ["core.py"]}, ["files", "list"]),
        ({"files": {"/etc/passwd": ""}}, ["/etc/passwd", "inside the repository"]),
        ({"files": {"a/../../b": ""}}, ["a/../../b", "inside the repository"]),
        ({"files": {"a": "", "a/b": ""}}, ["a/b", "inside another file"]),
        ({"files": {"a": 1}}, ["'a'", "text", "int"]),
        ({"repo": 5}, ["repo", "5"]),
    ],
)
def test_a_bad_field_is_located_and_named(tmp_path, change, words):
    path = write(tmp_path, GOOD | {"instance_id": "zero"}, GOOD | change)
    with pytest.raises(ValueError) as refused:
        load_instances(str(path), "env.train_file")
    message = str(refused.value)
    assert f"{path}:2" in message and all(word in message for word in words), message


@pytest.mark.parametrize("line", ['{"instance_id": "x"', "[1]", "nonsense"])
def test_a_line_that_is_no_json_object_is_located(tmp_path, line):
    path = write(tmp_path, GOOD, "", line)
    with pytest.raises(ValueError, match=f"{path}:3: "):
        load_instances(str(path), "env.train_file")


def test_unicode_line_separators_inside_a_record_do_not_split_it(tmp_path):
    record = json.dumps(GOOD | {"problem_statement": "a\u2028b\x85c"}, ensure_ascii=False)
    path = write(tmp_path, record)
    assert load_instances(str(path), "x")["one"].problem_statement == "a\u2028b\x85c"


def test_a_byte_order_mark_windows_lines_and_gzip_are_read(tmp_path):
    lines = "\r\n".join(json.dumps(GOOD | {"instance_id": name}) for name in ("one", "two"))
    marked = lines.encode("utf-8-sig")
    (tmp_path / "marked.jsonl").write_bytes(marked)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(marked))
    for name in ("marked.jsonl", "packed.jsonl.gz"):
        assert list(load_instances(str(tmp_path / name), "x")) == ["one", "two"]


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(b"x" * 99)[:-9], gzip.compress(b"x" * 99)[:12]],
    # Names of their own: gzip writes the second of compression, and pytest would print it.
    ids=["no_gzip", "tail_missing", "body_missing"],
)
def test_a_broken_gzip_file_is_refused(tmp_path, content):
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"env.train_file=.*cannot read .*a\.jsonl\.gz"):
        load_instances(str(tmp_path / "a.jsonl.gz"), "env.train_file")


def test_an_empty_data_set_and_a_missing_file_name_the_setting(tmp_path):
    empty = write(tmp_path, "")
    with pytest.raises(ValueError, match=rf"env.train_file=.*{empty} is empty"):
        load_instances(str(empty), "env.train_file")
    with pytest.raises(ValueError, match=r"env.train_file=.*cannot read"):
        load_instances(str(tmp_path / "none.jsonl"), "env.train_file")


def test_a_duplicate_names_both_lines(tmp_path):
    path = write(tmp_path, GOOD, GOOD)
    with pytest.raises(ValueError, match=f"{path}:2.*'one'.*{path}:1"):
        load_instances(str(path), "x")


def splits(tmp_path, train, held, backend=SandboxBackend.BUBBLEWRAP):
    config = EnvConfig(
        train_file=str(write(tmp_path, train, name="train.jsonl")),
        held_out_files=[str(write(tmp_path, held, name="held.jsonl"))],
        sandbox=SandboxConfig(backend=backend),
    )
    return load_splits(config)


def test_held_out_sets_are_named_by_their_files_and_replace_the_shipped_ones(tmp_path):
    held = GOOD | {"instance_id": "two"}
    assert list(splits(tmp_path, GOOD, held)) == ["train", "held"]


def test_a_held_out_instance_that_is_also_trained_on_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'one' is in both 'train' and 'held'"):
        splits(tmp_path, GOOD, GOOD)


def test_a_backend_that_cannot_play_the_instances_is_refused(tmp_path):
    image = GOOD | {"instance_id": "a__b-1", "files": {}}
    with pytest.raises(ValueError, match=r"'a__b-1'.*container image.*docker or singularity"):
        splits(tmp_path, GOOD, image)
    with pytest.raises(ValueError, match=r"'one'.*brings its files.*set it to bubblewrap"):
        splits(tmp_path, GOOD, image, SandboxBackend.DOCKER)
