"""Every shell command of README, docs and recipes is run here, or stands on a short list with the reason.

the tutorial                  run as written, in order, in an empty folder
own_environment, your_*, coming_from   run as written by test_newcomer
other runs                    composed, with every check of values that a launch makes
settings in the text          parsed as a shell and Hydra read them; those of your_data.md composed
commands about a run          run on the tutorial's run
NOT_RUN                       what a test machine cannot do; scripts must exist and know the options
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

import rlpipe.cli.run  # noqa: F401  (registers the schema)
from rlpipe.config.data import Weighted, weighted_rewards
from rlpipe.config.paths import resolve, shipped
from rlpipe.config.run import Config
from rlpipe.preflight.settings import check
from tests.helpers.cli import ROOT
from tests.helpers.documents import DOCUMENTS, Command, commands, prose, settings_in
from tests.helpers.processes import run_command

pytestmark = pytest.mark.packaging
HOURS = "hours of runs; its parts are tested with the recipe"
NOT_RUN = {
    "hf download": "needs a network",
    "git clone": "the address is the reader's",
    "cd rlpipe": "follows git clone",
    "git pull": "updates the reader's checkout",
    "rlpipe check +recipe=swe_rl model.path=models/*": "needs a download; test_models_walk estimates it",
    "scripts/quickstart": "installs gigabytes; test_scripts plays it with a prepared environment",
    "scripts/test": "is what runs this test",
    "scripts/install_sglang": "installs 3 GB; scripts/test runs it before the integration tests",
    ".venv/bin/python -m pip install": "installs into the developer's environment",
    "docker": "needs a docker daemon",
    "sbatch": "needs Slurm",
    "kubectl": "needs Kubernetes",
    "rlpipe report RUN --watch": "serves until Ctrl-C; test_report_page plays it",
    "python -m recipes.agent_rl.make_model": "ten minutes; test_agent_rl_recipe runs it at toy size",
    "python -m recipes.tiny_model.generate": "rewrites the shipped data; test_tiny_model_recipe makes some",
    "python -m recipes.tiny_model.make": "an hour; test_tiny_model_recipe runs it at toy size",
    "python -m recipes.tiny_model.make_moe": "minutes; test_tiny_model_recipe runs it at toy size",
    "python recipes/jackpot/simulate.py": "rewrites the shipped figures",
    "python recipes/mtp_adapt/figures.py": "needs longer runs; test_figures_script draws made-up ones",
    "python recipes/mtp_adapt/slopes.py": HOURS,
    "python recipes/mtp_adapt/interventional.py": HOURS,
    "python recipes/eagle3/rl_study.py": HOURS,
    "python recipes/mtp_adapt/speed.py": "a bench, of drafts that were adapted before",
    "python recipes/jackpot/decoupled.py": HOURS,
    "python -m recipes.smollm_adapt.along": "half an hour; test_smollm_along plays its figures",
    "python -m recipes.jackpot.servers": "minutes, with servers; test_jackpot_servers plays its figures",
    "python recipes/drafters/compare.py": "half an hour; test_drafters_compare plays untrained arms",
    "python recipes/*/study.py": HOURS,
    "python recipes/swe_bench/*.py": "half a minute; test_swe_bench runs them as written",
    "python -m recipes.ppow.exact": "an hour; test_exact_studies plays its figures",
    "python -m recipes.ppow.tables": "two minutes; test_exact_studies runs its arms",
    "python -m recipes.ppow.windows": "a minute; test_ppow_windows runs its parts",
    "python -m recipes.mtp_adapt.throughput": "reads results; test_throughput_pairs repeats it",
    "python -m recipes.mtp_adapt.worlds": "a minute; test_draft_worlds runs its parts",
    "python -m recipes.jackpot.smollm": "reads a study; test_smollm_corrections computes it by hand",
    "python -m recipes.jackpot.worlds": "two minutes; test_jackpot_worlds runs arms of it",
    "python scripts/bench/*.py": "a bench; test_benchmarks_page reads what they left",
    "scripts/doctor": "judges this machine; test_scripts plays it",
    "scripts/gpu_check": "needs a GPU; test_gpu_check plays it on a CPU",
    "rlpipe fetch smollm2": "needs the package index; test_real_model runs it",
    "rlpipe certify": "needs a server; test_sglang_engine runs the page on its own",
    "rlpipe draft-vocab": "takes a model and a run; test_draft_vocab_command runs it",
    "python -m recipes.smollm_adapt.*": "minutes; test_smollm_studies, test_linear_drafts play their figures",
    "python -m recipes.smollm_rl.seeds": "half an hour; test_real_model runs two steps",
    "python3 -m venv openenv": "makes an environment of its own",
    "openenv/bin/*": "needs the package index; test_game_recipes serves these walks by the same protocol",
    "python -m recipes.seeds": "minutes for each seed; test_game_recipes plays the runs in short",
    "rlpipe pool": "asks a run that is under way; tests/chaos/test_pool.py does",
}
TUTORIAL = "docs/tutorial.md"
PLAYED = {
    TUTORIAL,
    "docs/your_agent.md",
    "docs/your_data.md",
    "docs/your_environment.md",
    "docs/coming_from.md",
    "docs/own_environment.md",
    "docs/your_algorithm.md",
    "docs/your_model.md",
}
ABOUT_A_RUN = ("report", "analyse", "ledger", "workspace", "export", "runs")
COMMANDS = [command for document in DOCUMENTS for command in commands(document)]


def not_run(command: Command) -> str | None:
    """The entry of NOT_RUN that a command falls under."""
    spoken = " ".join(command.words)
    return next((e for e in NOT_RUN if fnmatch(spoken, e) or fnmatch(spoken, f"{e} *")), None)


def is_run(command: Command) -> bool:
    return command.words[:2] == ("rlpipe", "run")


def about_a_run(command: Command) -> bool:
    return command.words[0] == "rlpipe" and command.words[1] in ABOUT_A_RUN


def execute(words: tuple[str, ...], folder: Path) -> str:
    """Run a command as a newcomer would, with an empty HOME; returns its output."""
    assert words[0] == "rlpipe"
    home = folder / "home"
    home.mkdir(exist_ok=True)
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # Here no run is on Ray.
    done = run_command(words[1:], cwd=folder, environment=env, timeout=300)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str]]]:
    """The folder in which the tutorial was followed from top to bottom, and what each command printed."""
    folder = tmp_path_factory.mktemp("tutorial")
    yield folder, [execute(c.words, folder) for c in COMMANDS if c.document == TUTORIAL]


def test_the_tutorial_works_as_written(tutorial: tuple[Path, list[str]]) -> None:
    folder, printed = tutorial
    first, again, report, ledger, composed, own_model = printed
    assert "step 2/2" in first and "finished after step 2/2" in first
    assert "step 3/3" in again and "step 1/3" not in again
    assert "report:" in report and (folder / "runs/first/report.html").is_file()
    assert "trained" in ledger
    assert "advantage: rloo" in composed
    assert "finished after step 1/1" in own_model
    listed = re.findall(r"```\n(.*?)```", (ROOT / "docs/run_directory.md").read_text(), re.S)[0]
    listed = re.sub(r"step_(N|0+12)", lambda m: "step_3" if m[1] == "N" else "step_000003", listed)
    names = re.findall(r"^([\w./]+)", listed.replace("configs/N", "configs/1"), re.M)
    others = {"dump/", "logs/", "pool/", "tensorboard/", "traceback.txt"}  # of runs with other settings
    assert len(names) > 15
    assert [name for name in set(names) - others if not (folder / "runs/first" / name).exists()] == []


def test_commands_about_a_run_work_on_the_tutorials_run(tutorial: tuple[Path, list[str]], tmp_path) -> None:
    """In the order of the documents: a later one may need what an earlier one wrote."""
    run = str(tutorial[0] / "runs" / "first")
    played = [c for c in COMMANDS if about_a_run(c) and c.document not in PLAYED and not not_run(c)]
    assert len(played) >= 6
    for command in played:
        words = tuple(re.sub(r"^(RUN|runs/mine)(?=/|$)", run, word) for word in command.words)
        assert any(word.startswith(run) for word in words), command.text
        assert execute(words, tmp_path)


def made_before(config: Config) -> bool:
    """Whether the run takes a model or a draft of the reader's, or what an earlier command leaves."""
    named = [config.model.path, *filter(None, [config.spec.draft_path, config.eagle3.start])]
    return not all((resolve(path) / "config.json").is_file() for path in named)


def test_every_run_composes_and_its_values_are_possible(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong, seen = [], 0
    with initialize_config_dir(config_dir=str(shipped("configs")), version_base="1.3"):
        for command in (c for c in COMMANDS if is_run(c) and "--config-dir" not in c.words):
            given = [word for word in command.words[2:] if word not in ("--cfg", "job")]
            try:
                config: Config = OmegaConf.to_object(compose(config_name="config", overrides=given))
                if not made_before(config):
                    check(config)
                seen += 1
            except Exception as error:  # whatever Hydra, OmegaConf or our checks raise
                wrong.append(f"{command.document}: {command.text}\n    {error}")
    assert not wrong, "\n".join(wrong)
    assert seen > 30


def test_a_run_that_cannot_work_is_found(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with initialize_config_dir(config_dir=str(shipped("configs")), version_base="1.3"):
        for bad in ("spec.gama=2", "run.steps=0", "spec.mode=sometimes"):
            with pytest.raises(Exception, match=r"gama|steps|sometimes"):
                OmegaConf.to_object(compose(config_name="config", overrides=["+recipe=swe_rl", bad]))


def unreadable(text: str, *, sweep: bool) -> str:
    """Why settings cannot be pasted after `rlpipe run`; empty if they can. sweep: with several values."""
    try:
        overrides = OverridesParser.create().parse_overrides(shlex.split(text))
    except Exception as error:  # whatever shlex or Hydra's grammar raise
        return f"{text}: {error}"
    swept = any(override.is_sweep_override() for override in overrides)
    return f"{text}: has several values" if swept and not sweep else ""


def test_settings_in_the_text_of_documents_can_be_pasted() -> None:
    named = [
        (document, text, "--multirun" in line)
        for document in DOCUMENTS
        if document.name != "troubleshooting.md"  # quotes messages that begin with a setting
        for line, text in settings_in(document)
    ]
    wrong = [f"{d.name}: {why}" for d, text, sweep in named if (why := unreadable(text, sweep=sweep))]
    assert not wrong, "\n".join(wrong)
    assert len(named) > 200


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("'data.template=Question: {question}'", "mismatched input"),
        ("'data.system=Think first, then answer.'", "several values"),
        ("reward=[my_reward.py:score, exact_match]", "my_reward"),
        ("data.system='Think", "quotation"),
    ],
)
def test_a_setting_that_cannot_be_pasted_is_found(text: str, why: str) -> None:
    assert why in unreadable(text, sweep=False)


def test_every_setting_of_the_page_on_data_composes_with_its_value() -> None:
    page = ROOT / "docs" / "your_data.md"
    composed = {}
    with initialize_config_dir(config_dir=str(shipped("configs")), version_base="1.3"):
        for _, text in settings_in(page):
            config = compose(config_name="config", overrides=["+recipe=function", *shlex.split(text)])
            composed[text] = config
    (template,) = (c.data.template for text, c in composed.items() if "{question}" in text)
    (system,) = (c.data.system for text, c in composed.items() if "data.system" in text)
    (regex,) = (
        weighted_rewards(OmegaConf.to_container(c.reward)) for text, c in composed.items() if "regex" in text
    )
    assert template == "Question: {question}"
    assert system == "Think first, then answer."
    assert regex == [Weighted(name="regex", weight=0.5, options={"pattern": "answer is (.+)"})]
    assert len(composed) > 12


@pytest.mark.parametrize("document", DOCUMENTS, ids=[str(d.relative_to(ROOT)) for d in DOCUMENTS])
def test_every_command_is_run_or_listed(document: Path) -> None:
    for command in commands(document):
        played = is_run(command) or about_a_run(command) or command.document in PLAYED
        assert played or not_run(command), command.text


def test_the_list_of_what_is_not_run_is_in_use_and_its_scripts_exist() -> None:
    recipes = "".join(path.read_text() for path in (ROOT / "recipes").glob("*/*.py"))  # they share options
    used = {entry: [c for c in COMMANDS if not_run(c) == entry] for entry in NOT_RUN}
    assert [entry for entry, found in used.items() if not found] == []
    for command in (c for found in used.values() for c in found):
        script = command.words[1] if command.words[0] == "python" else command.words[0]
        if script == "-m":
            script = command.words[2].replace(".", "/") + ".py"
        if script.startswith(("recipes/", "scripts/")):
            source = (ROOT / script).read_text() + recipes
            assert command.words[0] == "python" or os.access(ROOT / script, os.X_OK)
            for option in (word for word in command.words if word.startswith("--")):
                assert f'"{option}"' in source, command.text


@pytest.mark.parametrize("document", DOCUMENTS, ids=[str(d.relative_to(ROOT)) for d in DOCUMENTS])
def test_no_command_hides_outside_a_bash_block(document: Path) -> None:
    hidden = re.findall(
        r"^ *(?:\$ )?(?:rlpipe run|python -m (?:rlpipe|recipes)|scripts/\w|sbatch |docker run).*$",
        prose(document),
        re.M,
    )
    assert hidden == []


@pytest.mark.parametrize(
    "preset", sorted(path.stem for path in (ROOT / "configs" / "cluster").glob("*.yaml"))
)
def test_every_cluster_composes_and_those_of_gpus_train_in_half_precision(preset):
    with initialize_config_dir(config_dir=str(ROOT / "configs"), version_base="1.3"):
        given = ["+recipe=swe_rl", f"cluster={preset}", "rollout=sglang"]
        config: Config = OmegaConf.to_object(compose(config_name="config", overrides=given))
    trainer = config.trainer
    if config.rollout.device == "cuda":
        assert (trainer.precision, trainer.recompute) == ("bf16", "full")
        assert trainer.distributed_optimizer == (trainer.dp > 1)
        assert trainer.micro_batch_tokens >= config.rollout.prefill_tokens
