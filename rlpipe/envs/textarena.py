"""Games of TextArena, for one player or against an opponent: `env=textarena env.textarena.id=TicTacToe-v0`.

    the model's turn -> game -> the opponent's turns -> game -> what the model sees next

The first message has the rules and the game before the model's first turn; later ones what is new since.
The reward is the game's for the model's side; a game that refuses a turn allows it another, or has it lost.
The seed, which is the instance, decides the game's luck, the opponent's, and by its parity who begins.
Self-play is not here: a trajectory has one reward, which of both sides of such a game is 0.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from rlpipe.config.env import EnvConfig
from rlpipe.config.limits import did_you_mean
from rlpipe.envs.base import StepResult
from rlpipe.envs.opponents import check_opponent, load_opponent
from rlpipe.envs.seeded import SeededSuite, opening, require

SETTING, _LUCK = "env.textarena.opponent", threading.Lock()  # the games draw from Python's global generator


def check_textarena(config: EnvConfig) -> None:
    """Start a game, with a turn of the opponent. Raises ValueError."""
    require("textarena", extra="textarena")
    _, text = TextArenaEpisode(config, 0).read()
    if opponent := load_opponent(config.textarena.opponent, setting=SETTING):
        check_opponent(opponent, text, f"{SETTING}={config.textarena.opponent!r}")


def make_textarena(config: EnvConfig, seed: int) -> SeededSuite:
    """Make the suite of `env.textarena`. seed: of the run."""
    return SeededSuite(config, seed, partial(TextArenaEpisode, config))


class TextArenaEpisode:
    """One game."""

    def __init__(self, config: EnvConfig, seed: int) -> None:
        self._config, self._opponent = config, load_opponent(config.textarena.opponent, setting=SETTING)
        self._side = seed % 2 if self._opponent else 0
        self._rng, self._luck = random.Random(seed), random.Random(seed).getstate()
        self._done, self._text = False, ""

        players = 2 if self._opponent else 1
        try:
            self._game = _make_game(config)
            self._with_luck(self._game.reset, num_players=players, seed=seed)
        except Exception as error:  # bad kwargs, an assertion about players, a word list that is not there
            reason = next((line for line in str(error).splitlines() if line.strip(" *")), "").strip(" .")
            where = f"env.textarena.id={config.textarena.id!r}, kwargs={config.textarena.kwargs}"
            who = f"{players} player(s), as {SETTING}={config.textarena.opponent!r}"
            raise ValueError(f"{where} does not start for {who}: {reason}.") from error

    def messages(self) -> list[dict[str, str]]:
        """Return the rules and the game so far."""
        self._until_the_models_turn()
        return opening(self._config, self._text)

    def step(self, action: str) -> StepResult:
        """Move, and let the opponent answer."""
        self._move(action)
        self._until_the_models_turn()
        if not self._done:
            return StepResult(observation=self._text)

        rewards, ended = self._game.close()
        info = {"invalid_move": float(ended[self._side]["invalid_move"]), "submitted": True}
        return StepResult(done=True, reward=rewards[self._side], info=info)

    def read(self) -> tuple[int, str]:
        """Return who is to move, and what is new to that player, own moves left out."""
        player, news = self._game.get_observation()
        shown = ((f"[Player {sender}] " if sender >= 0 else "", text) for sender, text, _ in news)
        return player, "\n".join(name + text for name, text in shown if name != f"[Player {player}] ")

    def _until_the_models_turn(self) -> None:
        while not self._done:
            player, self._text = self.read()
            if player == self._side or self._opponent is None:
                return
            self._move(self._opponent(self._text, self._rng))

    def _move(self, action: str) -> None:
        self._done, _ = self._with_luck(self._game.step, action)

    def _with_luck(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the game with Python's generator as this game left it, and give others theirs back."""
        with _LUCK:
            before = random.getstate()
            random.setstate(self._luck)
            try:
                return function(*args, **kwargs)
            finally:
                self._luck = random.getstate()
                random.setstate(before)


def _make_game(config: EnvConfig) -> Any:
    """Make a game that shows each player what is new. Raises ValueError for an unknown id."""
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    name = config.textarena.id
    if name not in ENV_REGISTRY:
        raise ValueError(
            f"no such game.{did_you_mean(name, ENV_REGISTRY, most=3) or ' Give an id like TicTacToe-v0'}"
        )
    game = textarena.make(name, **config.textarena.kwargs)

    # Wrappers of observations repeat the game so far each turn, which a conversation has already.
    while isinstance(game, textarena.Wrapper):
        game = game.env
    for wrapper in ENV_REGISTRY[name].default_wrappers or ():
        game = wrapper(game) if issubclass(wrapper, textarena.ActionWrapper) else game
    return game
