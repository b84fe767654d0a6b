"""Settings of environments and of the sandbox that runs the commands of a model. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from rlpipe.config.choice import Choice
from rlpipe.config.data import FunctionTask
from rlpipe.config.limits import at_least, positive
from rlpipe.config.mix import members_of
from rlpipe.config.user_code import absolute, is_user_code

INDEX_STRIDE = 1_000_000  # distance of first indices of generated sets: held-out, then one set per seed


class EnvName(Choice):
    """The environment suite in which a run generates."""

    SWE = "swe"  # repair a repository over several turns, rewarded by its tests
    REASONING = "reasoning"  # single-turn tasks from reasoning-gym
    TOOLS = "tools"  # questions answered with tools over several turns
    GYMNASIUM = "gymnasium"  # environments of Gymnasium, as text
    TEXTARENA = "textarena"  # games of TextArena
    VERIFIERS = "verifiers"  # tasksets and environments of verifiers 0.4
    OPENENV = "openenv"  # an environment on an OpenEnv server
    AGENT = "agent"  # a user's program that sends requests to the model: `agent.run`, `data` and `reward`
    FUNCTION = "function"  # a data set and a reward function: `data` and `reward`
    USER = "user"  # a user's suite, selected by env.suite
    MIX = "mix"  # several environments, selected by env.mix


class ActionMode(Choice):
    """How the text of a turn becomes a shell command."""

    PLAIN = "plain"  # the full text is the command
    FENCED = "fenced"  # the only ```bash block in the text is the command


class ToolParser(Choice):
    """The syntax of tool calls in a turn; see `rlpipe.envs.tools.parsers`."""

    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    JSON = "json"  # the turn is one object {"name": ..., "arguments": {...}}
    PYTHONIC = "pythonic"  # the turn is [name(argument=value)]


class ToolSchema(Choice):
    """Where the model reads the schemas of its tools."""

    TEMPLATE = "template"  # the chat template renders `tools`, as in the model's training
    SYSTEM = "system"  # a system prompt of rlpipe, for templates without tools


class ToolName(Choice):
    """Tools of the environment `tools`."""

    SEARCH = "search"
    READ = "read"
    CALCULATE = "calculate"
    PYTHON = "python"  # runs in the sandbox


class SandboxBackend(Choice):
    """How a command is isolated."""

    BUBBLEWRAP = "bubblewrap"  # namespaces on this machine, for instances that contain their files
    DOCKER = "docker"  # one container for each episode, for instances that are stored in an image
    SINGULARITY = "singularity"  # as docker, but without a daemon


@dataclass(slots=True, kw_only=True)
class SandboxConfig:
    """Limits of one command. A command that exceeds a limit is ended, and the observation reports it."""

    backend: SandboxBackend = SandboxBackend.BUBBLEWRAP
    """See `SandboxBackend`."""

    timeout_s: float = 10.0
    """Maximum wall-clock seconds."""

    cpu_s: int = 10
    """Maximum CPU seconds of each process."""

    memory_mb: int = 512
    """Maximum memory of each process, and of all processes together."""

    processes: int = 64
    """Maximum number of processes at once."""

    file_mb: int = 16
    """Maximum size of a file."""

    tree_mb: int = 64
    """Maximum total size of all files in the work tree and /tmp."""

    tree_files: int = 2000
    """Maximum number of files in the work tree and /tmp."""

    output_kb: int = 256
    """Maximum size of stdout and stderr together."""

    memo: bool = True
    """Reuse the outcome of the same command on the same file tree (bubblewrap only)."""

    image: str = ""
    """Container image for all instances; empty: the image of each instance."""

    def __post_init__(self) -> None:
        names = ("timeout_s", "cpu_s", "memory_mb", "processes", "file_mb", "tree_mb", "tree_files")
        remedy = "model output never runs without this limit"
        positive(self, "env.sandbox", *names, "output_kb", remedy=remedy)


def _check_sizes(settings: ReasoningConfig | ToolsConfig | EnvConfig, section: str) -> None:
    """Refuse empty generated sets, and sizes for which indices of two sets overlap. Raises ValueError."""
    at_least(1, settings, section, "train_size", "held_out_size")
    if max(settings.train_size, settings.held_out_size) > INDEX_STRIDE:
        raise ValueError(
            f"{section}.train_size={settings.train_size} and held_out_size={settings.held_out_size} must be "
            f"at most {INDEX_STRIDE}, so that their seeds stay apart."
        )


@dataclass(slots=True, kw_only=True)
class ReasoningConfig:
    """Settings of the environment `reasoning`."""

    tasks: list[str] = field(default_factory=lambda: ["chain_sum", "basic_arithmetic", "gcd"])
    """Names of reasoning-gym's data sets."""

    options: dict[str, Any] = field(default_factory=dict)
    """Parameters of reasoning-gym's data sets, by task: {chain_sum: {min_terms: 2, max_terms: 3}}."""

    levels: list[int] = field(default_factory=list)
    """Levels of reasoning-gym's curricula, in the order of training, such as [0, 2, 4]; empty: no levels."""

    train_size: int = 2000
    """Number of training instances of each task, at each level."""

    held_out_size: int = 100
    """Number of held-out instances of each task, at each level."""

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("env.reasoning.tasks is empty: name at least one reasoning-gym data set.")
        for task, given in self.options.items():
            if task not in self.tasks or not isinstance(given, Mapping):
                raise ValueError(
                    f"env.reasoning.options.{task}={given!r}: give parameters by task of env.reasoning.tasks="
                    f"{self.tasks}, as in {{{self.tasks[0]}: {{NAME: VALUE}}}}."
                )
        if any(level < 0 for level in self.levels) or len(set(self.levels)) < len(self.levels):
            raise ValueError(
                f"env.reasoning.levels={self.levels}: give different levels from 0, as [0, 2, 4]."
            )
        _check_sizes(self, "env.reasoning")


@dataclass(slots=True, kw_only=True)
class ToolsConfig:
    """Settings of the environment `tools`."""

    names: list[ToolName] = field(default_factory=lambda: list(ToolName))
    """Tools that the model may call."""

    parser: ToolParser = ToolParser.HERMES
    """Syntax in which calls are written."""

    schema: ToolSchema = ToolSchema.TEMPLATE
    """Where the model reads the schemas of the tools. See `ToolSchema`."""

    families: list[str] = field(default_factory=lambda: ["value", "times", "sum", "difference"])
    """Kinds of questions in training and in held_instances; see `rlpipe.envs.tools.generate`."""

    max_calls: int = 4
    """Maximum number of calls in one turn that are executed."""

    train_size: int = 4000
    """Number of training instances."""

    held_out_size: int = 200
    """Number of instances of each held-out set."""

    def __post_init__(self) -> None:
        self.names = [ToolName(name) for name in self.names]
        self.parser, self.schema = ToolParser(self.parser), ToolSchema(self.schema)

        if not self.names or len(set(self.names)) < len(self.names):
            raise ValueError(
                f"env.tools.names={[str(n) for n in self.names]} must name at least one tool, each once, of "
                f"{', '.join(ToolName)}."
            )
        at_least(1, self, "env.tools", "max_calls")
        _check_sizes(self, "env.tools")

    @property
    def in_template(self) -> bool:
        """Whether the chat template displays the tools."""
        return self.schema is ToolSchema.TEMPLATE


@dataclass(slots=True, kw_only=True)
class GymnasiumConfig:
    """Settings of the environment `gymnasium`."""

    id: str = ""
    """Id in Gymnasium's registry, such as FrozenLake-v1 ("module:Id-v0" imports the module first), or a
    custom class, as module:Class or file.py:Class."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment's constructor. With `render_mode: ansi` the model reads the environment's
    drawing instead of the observation. Colours are removed, so it is not useful for Taxi-v4, which needs
    them."""

    actions: list[str] = field(default_factory=list)
    """Names of the actions of a Discrete space, in order. Empty: the known names of the environment, if any,
    otherwise numbers."""

    invalid_reward: float = 0.0
    """Reward of a turn that names no valid action; 0 or negative."""

    def __post_init__(self) -> None:
        if self.invalid_reward > 0:
            raise ValueError(
                f"env.gymnasium.invalid_reward={self.invalid_reward} would reward answers that name no "
                "action: set it to 0 or below."
            )


@dataclass(slots=True, kw_only=True)
class TextArenaConfig:
    """Settings of the environment `textarena`."""

    id: str = ""
    """Id of a game, such as GuessTheNumber-v0. Games with an id that ends in -train add missing brackets to
    answers."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the game's constructor."""

    opponent: str = ""
    """The opponent in a game for two players: "random" (a random one of the moves that the game lists), or
    module:function, which is called with (text, rng). Here text is what the opponent sees. Empty in a game
    for one player."""

    self_play: bool = False
    """Train on games of the policy against itself: the attempts at an instance play in pairs against each
    other. The opponent plays only in held-out games."""

    def __post_init__(self) -> None:
        if self.self_play and not self.opponent:
            raise ValueError(
                "env.textarena.self_play=true needs an opponent for the held-out games, since on average a "
                "policy draws with itself: set env.textarena.opponent=random, or a function."
            )


@dataclass(slots=True, kw_only=True)
class VerifiersConfig:
    """Settings of the environment `verifiers`."""

    taskset: str = ""
    """Id of an installed taskset, or a class: module:Taskset or file.py:Taskset."""

    config: dict[str, Any] = field(default_factory=dict)
    """Fields of the taskset's config."""

    env: str = ""
    """A verifiers `Env` with one agent that runs the tasks over several turns, as module:Class or
    file.py:Class. Empty: the `Env` of the installed package if it has one; otherwise each task is one
    turn."""


@dataclass(slots=True, kw_only=True)
class OpenEnvConfig:
    """Settings of the environment `openenv`."""

    url: str = ""
    """Address of the environment's server, such as http://127.0.0.1:8000."""

    reset: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment's `reset`; its `seed` is the instance."""

    action: str = ""
    """The field of an action that an answer fills. Empty: the only required field; if several fields are
    required, answers must be JSON."""

    observation: str = ""
    """The field of an observation that the model reads. Empty: the only field, or all fields as JSON."""

    timeout_s: float = 60.0
    """Maximum seconds in which the server must answer a request."""

    def __post_init__(self) -> None:
        positive(self, "env.openenv", "timeout_s")


@dataclass(slots=True, kw_only=True)
class AgentConfig:
    """Settings of the environment `agent`."""

    run: str = ""
    """The agent: a command line that runs in the sandbox, with the variables OPENAI_BASE_URL, OPENAI_API_KEY
    and RLPIPE_TASK (path of a JSON file); or, for trusted code, a function of (base_url, api_key, task), as
    file.py:NAME or module:NAME, sync or async. The command prints the answer, or the function returns it.
    Without such an answer, the model's last turn is the answer."""

    files: list[str] = field(default_factory=list)
    """Files and folders that a command needs besides the ones in its command line; in the sandbox, all of
    them are in /agent."""

    host: str = "127.0.0.1"
    """Address on which the endpoint for agents listens. The default accepts only this machine; agents in
    containers or on other machines need another address. Each attempt has a separate API key."""

    def __post_init__(self) -> None:
        if self.is_function:
            self.run = absolute(self.run)
        self.files = [str(Path(name).expanduser().resolve()) for name in self.files]

    @property
    def is_function(self) -> bool:
        """Whether `run` names a function, and not a command."""
        return is_user_code(self.run) and len(self.run.split()) == 1


def _shipped_held_out() -> list[str]:
    """Return the default held-out files."""
    return ["shipped:data/swe/held_instances.jsonl", "shipped:data/swe/held_families.jsonl"]


@dataclass(slots=True, kw_only=True)
class EnvConfig:
    """Settings of the environment."""

    name: EnvName = EnvName.SWE
    """Name of the environment. See `EnvName`."""

    train_file: str = "shipped:data/swe/train.jsonl"
    """SWE instances to train on: JSONL, or parquet as SWE-bench and SWE-Gym are published."""

    held_out_files: list[str] = field(default_factory=_shipped_held_out)
    """Files of held-out SWE instances. Each file is a set, named like the file without its ending; the first
    set is the primary one."""

    repos: str = ""
    """Folder with a git mirror of each repository, as OWNER/NAME.git. `env.sandbox.backend=bubblewrap` has no
    containers, so instances without files are checked out from this folder into the sandbox."""

    action_mode: ActionMode = ActionMode.PLAIN
    """See `ActionMode`."""

    max_turns: int = 8
    """Maximum number of actions in an episode."""

    max_observation_chars: int = 400
    """Maximum number of characters of one observation, before the truncation marker."""

    system_prompt: str = ""
    """Replaces the system prompt of the action mode (plain mode has none)."""

    test_command: str = "python {runner}"
    """Command that runs the tests with the Python of an image. `{runner}` is replaced by the grader's
    program; pytest receives the arguments after it."""

    test_timeout_s: float = 10.0
    """Maximum seconds for the complete test run."""

    retries: int = 2
    """Number of further attempts after a failure of the sandbox; if all fail, the trajectory is masked."""

    threads: int = 2
    """Number of commands that one rollout worker runs at once."""

    step_timeout_s: float = 600.0
    """Maximum seconds of one call of an episode (messages, step, finish, close); 0: no limit. A longer call
    is a failure of the environment: the attempt is repeated, and masked if all `retries` fail."""

    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """Limits of one command."""

    reasoning: ReasoningConfig = field(default_factory=ReasoningConfig)
    """Settings of the environment `reasoning`."""

    tools: ToolsConfig = field(default_factory=ToolsConfig)
    """Settings of the environment `tools`."""

    gymnasium: GymnasiumConfig = field(default_factory=GymnasiumConfig)
    """Settings of the environment `gymnasium`."""

    textarena: TextArenaConfig = field(default_factory=TextArenaConfig)
    """Settings of the environment `textarena`."""

    verifiers: VerifiersConfig = field(default_factory=VerifiersConfig)
    """Settings of the environment `verifiers`."""

    openenv: OpenEnvConfig = field(default_factory=OpenEnvConfig)
    """Settings of the environment `openenv`."""

    agent: AgentConfig = field(default_factory=AgentConfig)
    """Settings of the environment `agent`."""

    suite: str = ""
    """A user's environment that replaces `name`, as module:NAME or path/to/file.py:NAME. NAME is a class with
    the methods `messages` and `step`, or a function NAME(config, seed) -> Suite, see `rlpipe.envs.base`. A
    module is imported from the folder where the run was started, or from the installed packages."""

    train_size: int = 1000
    """Number of training instances (seeds) of a class named by `suite`, or of a library's environment."""

    held_out_size: int = 100
    """Number of held-out instances of these environments, which training never uses."""

    options: dict[str, Any] = field(default_factory=dict)
    """Values for a user's suite, in any form that the suite reads."""

    function: FunctionTask = field(default_factory=FunctionTask, metadata={"omegaconf_ignore": True})
    """Not a setting: `Config` copies `data` and `reward` to this field, for environments of data sets."""

    mix: dict[str, Any] = field(default_factory=dict)
    """Environments to train on together, by name: {arith: {share: 0.5, name: reasoning, reasoning: {tasks:
    [gcd]}}, files: {share: 0.5, suite: my_env.py:Files}}. `share` is the member's share of the prompts. A
    member may set any setting of `env`."""

    def __post_init__(self) -> None:
        self.name = EnvName(self.name)
        # A user's suite takes precedence over the named environment.
        if self.mix:
            if self.suite:
                raise ValueError(
                    f"env.suite={self.suite!r} and env.mix: name the suite in a member of env.mix."
                )
            self.name = EnvName.MIX
            members_of(self)
        elif self.name is EnvName.MIX:
            raise ValueError(
                "env.name=mix needs members: env.mix={NAME: {share: 0.5, name: reasoning}, ...}."
            )
        elif self.suite:
            self.name, self.suite = EnvName.USER, absolute(self.suite)
        elif self.name is EnvName.OPENENV and not self.openenv.url.startswith(("http://", "https://")):
            raise ValueError(
                f"env.openenv.url={self.openenv.url!r} must be the address of a server, such as "
                "http://127.0.0.1:8000."
            )
        elif self.name is EnvName.USER:
            raise ValueError("env.name=user runs your suite: name it by env.suite=my_env.py:NAME.")
        positive(self, "env", "max_turns", "max_observation_chars", "threads", "test_timeout_s")
        at_least(0, self, "env", "retries", "step_timeout_s")
        _check_sizes(self, "env")

        if not self.held_out_files:
            raise ValueError(
                "env.held_out_files names no file: give at least one held-out set, "
                "validation needs instances that training never sees."
            )

        # Metrics and domains refer to sets by name, so names must differ.
        names = self.held_out_names
        if len(set(names)) < len(names) or "train" in names:
            raise ValueError(
                f"env.held_out_files={self.held_out_files} gives the set names {names}: rename the files, "
                "each set needs a name of its own, and 'train' is env.train_file."
            )

        if "{runner}" not in self.test_command:
            raise ValueError(
                f"env.test_command={self.test_command!r} must contain {{runner}}, where the grader's "
                "program goes, e.g. '. /opt/miniconda3/bin/activate testbed && python {runner}'."
            )

    @property
    def instance_files(self) -> list[str]:
        """Files of SWE instances on this machine, which contain the right answers."""
        return [f for f in (self.train_file, *self.held_out_files) if not f.startswith("shipped:")]

    @property
    def held_out_names(self) -> list[str]:
        """Names of the held-out sets, in the order of the files.

        >>> EnvConfig().held_out_names
        ['held_instances', 'held_families']
        """
        return [PurePath(file.removeprefix("shipped:")).stem for file in self.held_out_files]
