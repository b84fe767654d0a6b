"""Environments behind an OpenEnv server: sessions, actions by its schema, failures that are the server's."""

import pytest

from rlpipe.config.env import EnvConfig, EnvName, OpenEnvConfig
from rlpipe.envs import check_environment, make_suite, seeded
from rlpipe.envs.base import InfrastructureError
from rlpipe.envs.rehearsal import rehearse
from tests.helpers.openenv_server import openenv_server

pytestmark = pytest.mark.unit


def config(url, **settings):
    settings = OpenEnvConfig(url=url, **{"timeout_s": 5.0} | settings)
    return EnvConfig(name=EnvName.OPENENV, openenv=settings, train_size=4, held_out_size=2)


@pytest.fixture(scope="module")
def url():
    with openenv_server() as address:
        yield address


def test_sessions_are_apart_and_the_rewards_of_steps_and_numbers_of_metadata_arrive(url):
    check_environment(config(url))
    suite = make_suite(config(url, reset={"plus": 1}))
    one, other = suite.episode("seed:3"), suite.episode("seed:1")
    for episode in (one, other):
        assert episode.messages() == [{"role": "user", "content": "Guess.\nAnswer with number (integer)."}]

    steps = [one.step(" 1"), one.step("9"), other.step("2"), one.step("4")]
    assert [step.observation for step in steps] == ["higher", "lower", "", ""]
    assert [step.reward for step in steps] == [-0.1, -0.1, 1.0, 1.0]
    assert [step.info["steps"] for step in steps] == [1, 2, 1, 3] and steps[-1].done
    one.close()
    other.close()


@pytest.mark.parametrize("text", ["four", "[1]", '"x"', ""])
def test_a_text_that_is_no_action_is_answered_by_the_reason_and_the_session_goes_on(url, text):
    episode = make_suite(config(url)).episode("seed:2")
    episode.messages()
    refused = episode.step(text)
    assert refused.observation.startswith("error: ") and not refused.done and not refused.reward
    assert refused.observation.endswith("Answer with number (integer).")
    assert episode.step("2").reward == 1.0
    episode.close()


@pytest.mark.parametrize(
    "guess, named", [("99", "EXECUTION_ERROR: boom"), ("98", "Closed"), ("97", "Timeout")]
)
def test_whatever_the_server_fails_at_is_a_failure_of_infrastructure(url, guess, named):
    settings = config(url)
    episode = make_suite(settings).episode("seed:2")
    episode.messages()
    settings.openenv.timeout_s = 0.5
    with pytest.raises(InfrastructureError, match=named):
        episode.step(guess)
    episode.close()


def test_a_server_without_a_free_session_fails_that_attempt_and_a_closed_one_frees_its_place():
    with openenv_server(sessions=1) as address:
        suite = make_suite(config(address))
        first = suite.episode("seed:1")
        first.messages()
        with pytest.raises(InfrastructureError, match="CAPACITY_REACHED"):
            suite.episode("seed:2").messages()
        first.close()
        assert _eventually_opens(suite)


def _eventually_opens(suite):
    for _ in range(50):
        try:
            return suite.episode("seed:2").messages()
        except InfrastructureError:
            continue
    return None


def test_an_action_of_several_fields_is_a_json_object_and_a_field_of_text_is_the_answer():
    two = {
        "properties": {"number": {"type": "integer"}, "why": {"type": "string"}},
        "required": ["number", "why"],
    }
    with openenv_server(two) as address:
        episode = make_suite(config(address)).episode("seed:2")
        assert "Answer with a JSON object: " in episode.messages()[0]["content"]
        assert episode.step('{"number": 2, "why": "it is"}').reward == 1.0
        episode.close()
    with openenv_server({"properties": {"text": {"type": "string"}}, "required": ["text"]}) as address:
        episode = make_suite(config(address)).episode("seed:2")
        assert episode.messages()[0]["content"].endswith("Answer with text (string).")
        assert episode.step("two").observation.startswith("error: Invalid message")  # sent as it is
        episode.close()


def test_all_fields_of_an_observation_are_json_and_one_of_them_can_be_chosen(url):
    episode = make_suite(config(url, observation="text")).episode("seed:2")
    assert episode.messages()[0]["content"].startswith("Guess.")
    assert episode._text({"a": 1, "b": "x", "metadata": {}}) == '{"a": 1, "b": "x"}'
    episode.close()


def test_a_rehearsal_with_random_answers_passes(url):
    assert rehearse(make_suite(config(url)), url, episodes=2).steps > 0


def test_a_server_that_is_not_there_is_told_at_launch():
    with openenv_server() as gone:
        pass
    with pytest.raises(
        ValueError, match=r"Connection refused.*Start the server, or correct env\.openenv\.url"
    ):
        check_environment(config(gone))


def test_an_address_is_required():
    with pytest.raises(ValueError, match=r"env\.openenv\.url='' must be the address of a server"):
        config("")


def test_a_missing_package_is_told_with_the_command_that_installs_it(monkeypatch, url):
    monkeypatch.setattr(seeded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install websockets, in a checkout .*\.\[openenv\]"):
        check_environment(config(url))
