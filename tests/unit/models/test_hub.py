"""Models by the id of the Hugging Face hub: downloaded, cached, resumed, or refused with what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlpipe.cli.fetch import main as fetch
from rlpipe.config.paths import resolve_model, shipped
from rlpipe.config.run import Config, ModelConfig
from rlpipe.models import hub as hub_module
from rlpipe.models.hub import hub_directory, hub_id
from rlpipe.preflight.models import prepare_models
from rlpipe.preflight.settings import check
from tests.helpers.hub import TOKEN, hub_server

pytestmark = pytest.mark.unit
REPO = "org/tiny"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The stand-in, an empty cache, and a folder without models to run in."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_HOME", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub_module, "_TIMEOUT_S", 5.0)
    hub_directory.cache_clear()
    with hub_server() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
    hub_directory.cache_clear()


@pytest.fixture
def model(tmp_path):
    """A repository: the shipped model, and files that a run does not read."""
    folder = tmp_path / "repository"
    shutil.copytree(shipped("models/tiny"), folder)
    for name in ("pytorch_model.bin", "README.md", "onnx/model.safetensors", "consolidated.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("not read")
    return folder


def again():
    """Forget what this process knows, as a new one."""
    hub_directory.cache_clear()


def asked(hub, text=""):
    return [request for request in hub.requests if text in request[1]]


def test_a_model_is_downloaded_once_without_the_files_that_no_run_reads(hub, model, capsys):
    commit = hub.add(REPO, model)
    directory = resolve_model(REPO)
    read = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    names = {file.name for file in directory.rglob("*")}
    assert read <= names
    assert not names & {"pytorch_model.bin", "README.md", "onnx", "consolidated.safetensors"}
    assert (directory / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert f"model.path={REPO}: downloading commit {commit}" in capsys.readouterr().err

    again()
    hub.requests.clear()
    assert resolve_model(REPO) == directory
    assert not asked(hub, "/resolve/") and capsys.readouterr().err == ""


def test_a_launch_checks_the_downloaded_model_and_hands_its_directory_to_all_processes(hub, model):
    commit = hub.add(REPO, model)
    config = Config(model=ModelConfig(path=REPO))
    prepare_models(config)
    assert config.model.path.endswith(f"snapshots/{commit}")
    hub.requests.clear()
    check(config)
    assert hub.requests == []


def test_a_revision_is_that_branch_tag_or_commit(hub, model, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    (other / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": 0.5}')
    hub.add(REPO, model)
    commit = hub.add(REPO, other, "v2")
    for revision in ("v2", commit):
        again()
        assert json.loads((resolve_model(f"{REPO}@{revision}") / "generation_config.json").read_text()) == {
            "eos_token_id": 1,
            "temperature": 0.5,
        }
    # The copy of a commit needs no request.
    again()
    hub.requests.clear()
    resolve_model(f"{REPO}@{commit}")
    assert hub.requests == []


def test_an_existing_path_wins_over_the_hub(hub, model, tmp_path):
    hub.add(REPO, model)
    (tmp_path / "here" / "org" / "tiny").mkdir(parents=True)
    assert resolve_model(REPO) == tmp_path / "here" / "org" / "tiny"
    assert hub.requests == []


@pytest.mark.parametrize(
    "path", ["./org/tiny", "/org/tiny", "~/tiny", "org/tiny/hf", "tiny", "org/", "a b/c", ""]
)
def test_paths_are_no_ids(path):
    assert hub_id(path) is None


@pytest.mark.parametrize("offline", ["HF_HUB_OFFLINE", "no network"])
def test_without_a_network_a_filled_cache_works(hub, model, monkeypatch, offline, capsys):
    hub.add(REPO, model)
    directory = resolve_model(REPO)
    again()
    hub.requests.clear()
    if offline == "HF_HUB_OFFLINE":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    else:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert resolve_model(REPO) == directory
    assert hub.requests == []
    assert ("using the copy in the cache" in capsys.readouterr().err) == (offline == "no network")


@pytest.mark.parametrize("offline", ["HF_HUB_OFFLINE", "no network"])
@pytest.mark.parametrize("cached", ["nothing", "all but the weights"])
def test_without_a_network_and_a_complete_copy_it_is_refused_with_what_to_do(
    hub, model, monkeypatch, offline, cached
):
    hub.add(REPO, model)
    if cached != "nothing":
        (resolve_model(REPO) / "model.safetensors").unlink()
        again()
    if offline == "HF_HUB_OFFLINE":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        message = "HF_HUB_OFFLINE is set"
    else:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        message = "http://127.0.0.1:9 does not answer"
    with pytest.raises(ValueError, match=rf"model\.path={REPO}: .*{message}.*hf download {REPO}"):
        resolve_model(REPO)


def test_a_download_that_broke_off_is_resumed(hub, model, monkeypatch):
    hub.add(REPO, model)
    size = (model / "model.safetensors").stat().st_size
    hub.break_after, hub.breaks = size // 2, 1
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)
    directory = resolve_model(REPO)
    assert (directory / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    ranges = {range_ for _, _, range_ in asked(hub, "model.safetensors")}
    starts = [int(range_[6:].partition("-")[0]) for range_ in ranges if range_]
    assert len(starts) == 1 and size // 2 - (1 << 16) <= starts[0] <= size // 2


def test_a_later_launch_downloads_only_the_files_that_are_missing(hub, model):
    hub.add(REPO, model)
    directory = resolve_model(REPO)
    (directory / "model.safetensors").resolve().unlink()
    (directory / "model.safetensors").unlink()
    again()
    hub.requests.clear()
    assert (resolve_model(REPO) / "model.safetensors").is_file()
    assert {path.rpartition("/")[2] for _, path, _ in asked(hub, "/resolve/")} == {"model.safetensors"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("config.json pytorch_model.bin", r"only as pytorch_model\.bin.*refs/pr/N.*save_pretrained"),
        ("README.md model-Q4.gguf", r"llama\.cpp's format only \(model-Q4\.gguf\).*rlpipe fetch"),
        ("adapter_config.json adapter_model.safetensors", "is a PEFT adapter.*merge_and_unload"),
        ("model.safetensors", r"has no config\.json"),
        ("README.md", r"has no \*\.safetensors file"),
    ],
)
def test_a_repository_without_a_model_in_safetensors_is_refused_before_a_download(
    hub, tmp_path, files, message
):
    for name in files.split():
        (tmp_path / "r").mkdir(exist_ok=True)
        (tmp_path / "r" / name).write_text("x")
    hub.add(REPO, tmp_path / "r")
    with pytest.raises(ValueError, match=message):
        resolve_model(REPO)
    assert not asked(hub, "/resolve/")


def test_unknown_ids_revisions_and_gated_models_are_refused_with_what_to_do(hub, model, monkeypatch):
    hub.add(REPO, model)
    with pytest.raises(ValueError, match=r"no folder .*org/tyni, and .* no model org/tyni .*404"):
        resolve_model("org/tyni")
    with pytest.raises(ValueError, match="org/tiny has no branch, tag or commit 'v9': leave out @v9"):
        resolve_model(f"{REPO}@v9")

    hub.gated.add(REPO)
    with pytest.raises(ValueError, match=rf"is gated: accept its conditions at {hub.url}/{REPO}.*HF_TOKEN"):
        resolve_model(REPO)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (resolve_model(REPO) / "model.safetensors").is_file()


@pytest.mark.parametrize("offline", [False, True])
def test_a_name_in_a_folder_that_exists_is_answered_with_the_download_to_it(hub, monkeypatch, offline):
    Path("models").mkdir()
    if offline:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"there is no folder .*models/mine.* download the model") as refused:
        resolve_model("models/mine")
    assert "`hf download ORG/mine --local-dir models/mine`" in str(refused.value)
    assert "hf download models/mine" not in str(refused.value)


def test_rlpipe_fetch_fills_the_cache_or_copies_the_model(hub, model, tmp_path, monkeypatch, capsys):
    hub.add(REPO, model)
    assert fetch([REPO]) == 0
    assert f"model.path={REPO}" in capsys.readouterr().out
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    again()
    assert fetch([REPO, "--out", str(tmp_path / "copy")]) == 0
    assert not (tmp_path / "copy" / "model.safetensors").is_symlink()
    assert fetch([REPO, "--out", str(tmp_path / "copy")]) == 2
    assert fetch(["org/other"]) == 2
    assert "NAME=org/other" in capsys.readouterr().err
