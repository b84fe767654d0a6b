"""model.chat_template: the model with another template, in all processes and in checkpoints of the run."""

import json

import pytest

from rlpipe.config.paths import shipped
from rlpipe.config.run import Config, ModelConfig
from rlpipe.models.checkpoint import write_checkpoint
from rlpipe.preflight.checkpoint_and_machine import check_checkpoint
from rlpipe.preflight.models import prepare_models
from rlpipe.rollout.chat import ChatFormat

pytestmark = pytest.mark.unit
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} says {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant says{% endif %}"
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    return tmp_path


def prepared(template="mine.jinja"):
    config = Config(model=ModelConfig(path="shipped:models/tiny", chat_template=template))
    prepare_models(config)
    return config


def test_the_model_has_the_files_of_the_checkpoint_and_the_template(folder):
    config = prepared()
    check_checkpoint("model.path", config.model.path, config)
    tokens = ChatFormat.from_pretrained(config.model.path)
    shown = tokens.decode(tokens.initial([{"role": "user", "content": "hello"}]))
    assert "user says hello" in shown
    assert prepared().model.path == config.model.path
    write_checkpoint(folder / "hf", {}, like=config.model.path)
    assert (folder / "hf" / "chat_template.jinja").read_text() == TEMPLATE
    assert json.loads((folder / "hf" / "config.json").read_text()) == json.loads(
        (shipped("models/tiny") / "config.json").read_text()
    )


def test_an_edited_template_counts_from_the_next_launch_and_running_ones_keep_theirs(folder):
    before = prepared().model.path
    (folder / "mine.jinja").write_text(TEMPLATE.replace("says", "said"))
    assert prepared().model.path != before
    assert "says" in (shipped("models/tiny").parent / before / "chat_template.jinja").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\n{% for m in %}", r"mine\.jinja:2: the chat template fails with TemplateSyntaxError"),
        ("hello", r"mine\.jinja: the chat template does not show the text of the user"),
    ],
)
def test_a_template_that_fails_is_refused_by_its_own_file(folder, text, message):
    (folder / "mine.jinja").write_text(text)
    with pytest.raises(ValueError, match=message):
        prepared()
    with pytest.raises(ValueError, match=r"model\.chat_template='none\.jinja' cannot be read"):
        prepared("none.jinja")
