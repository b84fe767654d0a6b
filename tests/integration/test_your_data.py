"""Two files and one command: TRL's and verl's own reward functions train the shipped model, unchanged."""

from __future__ import annotations

import json
import resource
import time

import pytest

from rlpipe.metrics.jsonl import read_jsonl
from tests.helpers.cli import run
from tests.helpers.hub import hub_server
from tests.helpers.reward_examples import TRL, VERL, verl_rows

pytestmark = pytest.mark.integration
TWO_MINUTES = 120


def trained(folder, *overrides):
    """Two steps of the one command; returns what it printed and its records."""
    started = time.monotonic()
    sizes = ["cluster=inline", "run.steps=2", "metrics.wandb=off"]
    result = run("+recipe=function", *sizes, *overrides, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert time.monotonic() - started < TWO_MINUTES
    (directory,) = (folder / "runs" / "function").iterdir()
    records, _ = read_jsonl(directory / "metrics.jsonl")
    return result.stdout, records, directory


def test_trls_examples_train_on_a_jsonl_file(tmp_path):
    rows = [{"prompt": f"What is {n} + 1?", "ground_truth": str(n + 1), "task": "math"} for n in range(60)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(TRL)
    functions = (
        "reward_func",
        "length_in_characters",
        "length_in_tokens",
        "math_reward_func",
        "coding_reward_func",
    )
    named = ", ".join(f"rewards.py:{name}: 0.1" for name in (*functions, "async_reward_func"))
    printed, records, _ = trained(tmp_path, "data.train=train.jsonl", f"reward={{{named}}}")

    assert "54 rows to train on and 6 held out (prompt: prompt, answer: ground_truth)" in printed
    assert "finished after step 2/2" in printed
    steps = [r for r in records if "critic/rewards/mean" in r]
    assert len(steps) == 2
    assert all(r["critic/rewards/mean"] > 0 for r in steps)


def test_verls_example_trains_on_a_parquet_file(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(verl_rows(60)), tmp_path / "train.parquet")
    (tmp_path / "my_reward.py").write_text(VERL)
    printed, records, _ = trained(tmp_path, "data.train=train.parquet", "reward=my_reward.py:my_reward_fn")

    assert "54 rows to train on and 6 held out" in printed
    steps = [r for r in records if "critic/rewards/mean" in r]
    assert len(steps) == 2
    assert all(r["critic/rewards/mean"] > 0 for r in steps)


def test_a_wrong_file_is_refused_within_ten_seconds(tmp_path):
    """Seconds of the processor, so that a busy machine fails nothing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = run("+recipe=function", "data.train=gone.jsonl", "reward=exact_match", cwd=tmp_path, fresh=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (result.returncode, "there is no file" in result.stderr) == (2, True)
    assert after.ru_utime - before.ru_utime < 10


def test_a_data_set_of_the_hub_is_downloaded_once_and_then_read_without_a_network(tmp_path):
    """A stand-in for the hub; the library reads its address when it is imported, so each is a new process."""
    (repository := tmp_path / "repository").mkdir()
    for split, word in (("train", "Say"), ("test", "Tell")):
        rows = [{"prompt": f"{word} {n}.", "answer": str(n)} for n in range(30)]
        (repository / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    given = ["data.train=org/sums", "data.held_out=split:test", "reward=exact_match", "run.steps=1"]
    small = ["cluster=inline", "val.every=0", "pipeline.prompts_per_step=2", "pipeline.group_size=2"]
    small += ["metrics.wandb=off"]
    with hub_server() as hub:
        hub.add("datasets/org/sums", repository)
        for number, variables in enumerate(({}, {"HF_HUB_OFFLINE": "1"})):
            result = run(
                *["+recipe=function", *given, *small, f"run.dir=out{number}"],
                cwd=tmp_path,
                fresh=True,
                **{"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")} | variables,
            )
            assert result.returncode == 0, result.stdout + result.stderr
            assert "30 rows to train on and 30 held out" in result.stdout
            assert bool(hub.requests) is (number == 0)
            hub.requests.clear()
