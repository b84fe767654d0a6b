"""Games of TextArena: for one player, against an opponent, or of the policy against itself.

    the model's turn -> game -> the opponent's turns -> game -> what the model sees next

The first message has the rules and the events before the model's first turn; each later message has the
events since the last turn. The reward is the game's reward for the model's side. After an invalid move, the
game either allows another move or is lost. An instance is a seed: it determines the random choices of game
and opponent, and its parity determines who begins. In self-play, the attempts at an instance play in pairs;
each attempt has a trajectory and a reward (`envs.seats`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from rlpipe.config.env import INDEX_STRIDE, EnvConfig
from rlpipe.config.limits import did_you_mean
from rlpipe.envs.base import StepResult
from rlpipe.envs.opponents import check_opponent, load_opponent
from rlpipe.envs.seats import OneSide, Seats
from rlpipe.envs.seeded import Luck, SeededSuite, opening, require, seed_of

SETTING = "env.textarena.opponent"


def check_textarena(config: EnvConfig) -> None:
    """Start a game and let the opponent move once. Raises ValueError if either fails."""
    require("textarena", extra="textarena")
    game = TextArenaGame(config, 0)
    if opponent := load_opponent(config.textarena.opponent, setting=SETTING):
        check_opponent(opponent, game.text, f"{SETTING}={config.textarena.opponent!r}")


class TextArenaSuite(SeededSuite):
    """Games, one for each seed. With self-play, the policy plays training games against itself."""

    def __init__(self, config: EnvConfig, seed: int) -> None:
        super().__init__(config, seed, partial(TextArenaGame, config))
        self._opening, self._self_play = partial(opening, config), config.textarena.self_play
        self._opponent = load_opponent(config.textarena.opponent, setting=SETTING)

    def players(self, instance_id: str) -> int:
        """Return the number of attempts in a game; held-out games are always against the opponent."""
        return 2 if self._self_play and seed_of(instance_id) >= INDEX_STRIDE else 1

    def episode(self, instance_id: str) -> OneSide | Seats:
        """Start a game."""
        game, seed = self._make(seed_of(instance_id)), seed_of(instance_id)
        if self.players(instance_id) == 2:
            return Seats(game, 2, self._opening)
        return OneSide(game, self._opening, self._opponent, seed)


class TextArenaGame:
    """One game; see `envs.seats.TurnGame`."""

    def __init__(self, config: EnvConfig, seed: int) -> None:
        self._luck, self.done = Luck(seed), False
        players = 2 if config.textarena.opponent else 1
        try:
            self._game = _make_game(config)
            self._luck.call(self._game.reset, num_players=players, seed=seed)
        except Exception as error:  # bad kwargs, a failed assertion on players, a missing word list
            reason = next((line for line in str(error).splitlines() if line.strip(" *")), "").strip(" .")
            where = f"env.textarena.id={config.textarena.id!r}, kwargs={config.textarena.kwargs}"
            who = f"{players} player(s), as {SETTING}={config.textarena.opponent!r}"
            raise ValueError(f"{where} does not start for {who}: {reason}.") from error
        self._read()

    def move(self, action: str) -> None:
        """Move for the player whose turn it is."""
        self.done, _ = self._luck.call(self._game.step, action)
        if not self.done:
            self._read()

    def result(self, player: int) -> StepResult:
        """Return a player's final result."""
        rewards, ended = self._game.close()
        info = {"invalid_move": float(ended[player]["invalid_move"]), "submitted": True}
        return StepResult(done=True, reward=rewards[player], info=info)

    def _read(self) -> None:
        """Read the new events for the player whose turn it is, without that player's own moves."""
        self.player, news = self._game.get_observation()
        shown = ((f"[Player {sender}] " if sender >= 0 else "", text) for sender, text, _ in news)
        self.text = "\n".join(name + text for name, text in shown if name != f"[Player {self.player}] ")


def _make_game(config: EnvConfig) -> Any:
    """Make a game that shows each player only the new events. Raises ValueError for an unknown id."""
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    name = config.textarena.id
    if name not in ENV_REGISTRY:
        raise ValueError(
            f"no such game.{did_you_mean(name, ENV_REGISTRY, most=3) or ' Give an id like TicTacToe-v0'}"
        )
    game = textarena.make(name, **config.textarena.kwargs)

    # Observation wrappers repeat the whole game each turn; the conversation already has it, so remove them.
    while isinstance(game, textarena.Wrapper):
        game = game.env
    for wrapper in ENV_REGISTRY[name].default_wrappers or ():
        game = wrapper(game) if issubclass(wrapper, textarena.ActionWrapper) else game
    return game
