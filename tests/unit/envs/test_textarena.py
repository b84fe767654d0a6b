"""Games of TextArena: rules, opponents, whose turn it is, and luck that nobody else shares."""

import asyncio
import random
import threading

import pytest

from rlpipe.config.env import EnvConfig, EnvName, TextArenaConfig
from rlpipe.envs import check_environment, make_suite
from rlpipe.envs.opponents import choose_at_random
from rlpipe.envs.rehearsal import rehearse

pytestmark = pytest.mark.unit
OPPONENTS = '''
def first(text, rng):
    """Take the lowest free cell."""
    return text.rpartition("Available Moves: ")[2].split(",")[0].strip("' ")

def number(text, rng):
    return 4

def crash(text, rng):
    return text.no_such_thing

def cheat(text, rng):
    return "[9]"
'''


@pytest.fixture(autouse=True)
def opponents(tmp_path, monkeypatch):
    (tmp_path / "opponents_of_a_test.py").write_text(OPPONENTS)
    monkeypatch.chdir(tmp_path)


def config(name, opponent="", *, max_turns=20, **kwargs):
    opponent = f"opponents_of_a_test:{opponent}" if opponent not in ("", "random", "gone:x") else opponent
    game = TextArenaConfig(id=name, opponent=opponent, kwargs=kwargs)
    sizes = {"train_size": 8, "held_out_size": 4, "max_turns": max_turns}
    return EnvConfig(name=EnvName.TEXTARENA, textarena=game, **sizes)


def numbers(**kwargs):
    return config("GuessTheNumber-v0-train", max_number=9, **kwargs)


def bisect(episode):
    """The steps of a perfect player."""
    low, high, steps = 1, 9, []
    while not steps or not steps[-1].done:
        guess = (low + high) // 2
        steps.append(episode.step(str(guess)))
        low, high = (guess + 1, high) if "higher" in steps[-1].observation else (low, guess - 1)
    return steps


def test_bisection_always_guesses_the_number_and_each_answer_is_only_what_is_new():
    suite = make_suite(numbers())
    lengths = set()
    for name in [*suite.instance_ids("train"), *suite.instance_ids("held_out")]:
        episode = suite.episode(name)
        assert "between 1 and 9 within" in episode.messages()[0]["content"]
        steps = bisect(episode)
        lengths.add(len(steps))
        assert steps[-1].reward == 1.0 and steps[-1].info["invalid_move"] == 0.0
        assert all(step.observation.startswith("The target number is") for step in steps[:-1])
    assert len(lengths) > 1 and max(lengths) <= 4


def test_a_refused_turn_may_be_repeated_once_and_then_ends_the_game():
    episode = make_suite(numbers()).episode("seed:0")
    assert "invalid move" in episode.step("no idea").observation
    last = episode.step("still none")
    assert last.done and last.info["invalid_move"] == 1.0


def test_the_seeds_parity_decides_who_begins_and_the_reward_is_that_of_the_models_side():
    suite = make_suite(config("TicTacToe-v0", "first"))
    for seed, opened in (("0", False), ("1", True)):
        episode = suite.episode(f"seed:{seed}")
        rules = episode.messages()[0]["content"]
        assert rules.startswith(f"You are Player {seed}") and ("[Player 0] [0]" in rules) is opened

    # The opponent fills cells from the first on; 4, 6, 2 is a diagonal that it never crosses in time.
    episode = suite.episode("seed:0")
    episode.messages()
    won = [episode.step(move) for move in ("[4]", "[6]", "[2]")]
    assert [step.done for step in won] == [False, False, True] and won[-1].reward == 1.0
    assert "[Player 1] [0]" in won[0].observation and "[Player 0]" not in won[0].observation

    episode = suite.episode("seed:1")
    episode.messages()
    lost = [episode.step(move) for move in ("[8]", "[7]")]
    assert lost[-1].done and lost[-1].reward == -1.0


def test_an_opponent_that_breaks_the_rules_loses():
    episode = make_suite(config("TicTacToe-v0", "cheat")).episode("seed:0")
    episode.messages()
    assert episode.step("[4]").reward == 1.0


def test_the_random_opponent_plays_any_legal_move_and_repeats_its_moves_with_the_seed():
    suite = make_suite(config("TicTacToe-v0", "random"))
    answers = {seed: _first_answer(suite, seed) for seed in map(str, range(0, 60, 2))}
    assert answers == {seed: _first_answer(suite, seed) for seed in answers}
    assert len(set(answers.values())) == 8
    assert choose_at_random("Available Moves: [1]\nAvailable Moves: '[2]'", random.Random(0)) == "[2]"


def _first_answer(suite, seed):
    episode = suite.episode(f"seed:{seed}")
    episode.messages()
    return episode.step("[4]").observation.split("[Player 1] ")[1][:3]


def test_games_at_once_have_their_own_luck_and_leave_pythons_generator_alone():
    suite = make_suite(config("PigDice-v0", "random"))

    def play(seed, out):
        episode = suite.episode(f"seed:{seed}")
        out[seed] = [
            episode.messages()[0]["content"],
            *(episode.step("[roll]").observation for _ in range(3)),
        ]

    random.seed(7)
    expected, one_by_one, at_once = random.Random(7).random(), {}, {}
    for seed in "246":
        play(seed, one_by_one)
    threads = [threading.Thread(target=play, args=(seed, at_once)) for seed in "246"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert at_once == one_by_one and len({str(game) for game in at_once.values()}) > 1
    assert random.random() == expected


def test_in_self_play_both_sides_read_their_rules_and_the_others_moves_and_have_their_own_reward():
    settings = config("TicTacToe-v0", "random")
    settings.textarena.self_play = True
    check_environment(settings)
    suite = make_suite(settings)
    trained, held_out = suite.instance_ids("train")[0], suite.instance_ids("held_out")[0]
    assert suite.players(trained) == 2 and suite.players(held_out) == 1
    assert suite.episode(held_out).messages()[0]["content"].startswith("You are Player 0")

    async def play(seat, moves):
        seen = [(await seat.messages())[0]["content"]]
        for move in moves:
            seen.append(step := await seat.step(move))
        return seen, step

    async def both(game):
        return await asyncio.gather(
            play(game.seats[0], ["[4]", "[6]", "[2]"]), play(game.seats[1], ["[0]", "[1]"])
        )

    (first, won), (second, lost) = asyncio.run(both(suite.episode(trained)))
    assert (won.reward, lost.reward) == (1.0, -1.0) and won.done and lost.done
    assert first[0].startswith("You are Player 0") and second[0].startswith("You are Player 1")
    assert "[Player 1] [0]" in first[1].observation and "[Player 0] [6]" in second[1].observation


def test_self_play_without_an_opponent_for_the_held_out_games_is_refused():
    with pytest.raises(ValueError, match=r"self_play=true needs an opponent .*opponent=random"):
        TextArenaConfig(id="TicTacToe-v0", self_play=True)


@pytest.mark.parametrize(
    "name", ["KuhnPoker-v0", "Othello-v0", "ConnectFour-v0-raw", "Mastermind-v0", "TowerOfHanoi-v0"]
)
def test_other_games_pass_the_check_and_a_rehearsal(name):
    alone = name.split("-")[0] in ("Mastermind", "TowerOfHanoi")
    settings = config(name, "" if alone else "first" if "Four" in name else "random")
    check_environment(settings)
    assert rehearse(make_suite(settings), name, episodes=2).steps > 0


@pytest.mark.parametrize(
    "settings, named",
    [
        (config("TicTacTo-v0"), r"Did you mean TicTacToe-v0"),
        (config(""), "Give an id like TicTacToe-v0"),
        (config("TicTacToe-v0"), r"for 1 player\(s\), as env.textarena.opponent=''"),
        (
            EnvConfig(name="textarena", textarena=TextArenaConfig(id="GuessTheNumber-v0", opponent="random")),
            r"for 2 player",
        ),
        (config("TicTacToe-v0", "random", cells=3), "unexpected keyword argument 'cells'"),
        (config("Nim-v0", "random"), "lists no legal moves"),
        (config("TicTacToe-v0", "gone:x"), "No module named 'gone'"),
        (
            config("TicTacToe-v0", "number"),
            r"opponents_of_a_test.py:7: the opponent returned 4: return its move",
        ),
        (config("TicTacToe-v0", "crash"), r"opponents_of_a_test.py:10: crash\(\) raised AttributeError"),
    ],
    ids=["misspelt", "none", "needs two", "needs one", "kwargs", "no moves", "module", "no text", "raises"],
)
def test_a_mistake_in_the_settings_or_the_opponent_is_told_at_launch(settings, named):
    with pytest.raises(ValueError, match=named):
        check_environment(settings)
