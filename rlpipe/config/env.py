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

INDEX_STRIDE = 1_000_000  # between the first indices of generated sets: held-out ones, then one for each seed


class EnvName(Choice):
    """The environment suite that a run generates in."""

    SWE = "swe"  # repair a repository over several turns, rewarded by its tests
    REASONING = "reasoning"  # single-turn tasks from reasoning-gym
    TOOLS = "tools"  # questions answered with tools over several turns
    GYMNASIUM = "gymnasium"  # Gymnasium's, as text
    TEXTARENA = "textarena"  # games of TextArena
    VERIFIERS = "verifiers"  # tasksets and environments of verifiers 0.4
    OPENENV = "openenv"  # behind an OpenEnv server
    AGENT = "agent"  # a program of yours that talks to the model: `agent.run`, `data` and `reward`
    FUNCTION = "function"  # a data set and a reward function: `data` and `reward`
    USER = "user"  # a user's suite, selected by naming it in env.suite
    MIX = "mix"  # several of them, selected by env.mix


class ActionMode(Choice):
    """How a turn's text becomes a shell command."""

    PLAIN = "plain"  # the full text is the command
    FENCED = "fenced"  # the one ```bash block in the text is the command


class ToolParser(Choice):
    """The syntax of tool calls in a turn; see `rlpipe.envs.tools.parsers`."""

    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    JSON = "json"  # the turn is one such object
    PYTHONIC = "pythonic"  # the turn is [name(argument=value)]


class ToolSchema(Choice):
    """Where the model reads the schemas of its tools."""

    TEMPLATE = "template"  # the chat template renders `tools`, as the model was trained
    SYSTEM = "system"  # a system prompt of rlpipe's, for templates without tools


class ToolName(Choice):
    """Tools of the environment `tools`."""

    SEARCH = "search"
    READ = "read"
    CALCULATE = "calculate"
    PYTHON = "python"  # runs in the sandbox


class SandboxBackend(Choice):
    """The isolation of a command."""

    BUBBLEWRAP = "bubblewrap"  # namespaces on this machine; for instances that bring their files
    DOCKER = "docker"  # one container for each episode; for instances that are stored in an image
    SINGULARITY = "singularity"  # the same without a daemon


@dataclass(slots=True, kw_only=True)
class SandboxConfig:
    """Limits of one command. A command that exceeds a limit is ended, and the observation reports it."""

    backend: SandboxBackend = SandboxBackend.BUBBLEWRAP
    """See `SandboxBackend`."""

    timeout_s: float = 10.0
    """Wall-clock seconds."""

    cpu_s: int = 10
    """CPU seconds of each process."""

    memory_mb: int = 512
    """Memory of each process, and of all processes together."""

    processes: int = 64
    """Processes alive at once."""

    file_mb: int = 16
    """Size of the largest file."""

    tree_mb: int = 64
    """Total size of all files in the work tree and /tmp."""

    tree_files: int = 2000
    """Number of files in the work tree and /tmp."""

    output_kb: int = 256
    """Size of stdout and stderr together."""

    memo: bool = True
    """Reuse the outcome of the same command on the same file tree (bubblewrap only)."""

    image: str = ""
    """Container image for all instances; empty: the image of each instance."""

    def __post_init__(self) -> None:
        names = ("timeout_s", "cpu_s", "memory_mb", "processes", "file_mb", "tree_mb", "tree_files")
        remedy = "model output never runs without this limit"
        positive(self, "env.sandbox", *names, "output_kb", remedy=remedy)


def _check_sizes(settings: ReasoningConfig | ToolsConfig | EnvConfig, section: str) -> None:
    """Refuse empty generated sets, and sizes at which the indices of two sets overlap. Raises ValueError."""
    at_least(1, settings, section, "train_size", "held_out_size")
    if max(settings.train_size, settings.held_out_size) > INDEX_STRIDE:
        raise ValueError(
            f"{section}.train_size={settings.train_size} and held_out_size={settings.held_out_size} must be "
            f"at most {INDEX_STRIDE}, so that their seeds stay apart."
        )


@dataclass(slots=True, kw_only=True)
class ReasoningConfig:
    """Tasks of reasoning-gym."""

    tasks: list[str] = field(default_factory=lambda: ["chain_sum", "basic_arithmetic", "gcd"])
    """Names of datasets."""

    options: dict[str, Any] = field(default_factory=dict)
    """Parameters of reasoning-gym's data sets, by task: {chain_sum: {min_terms: 2, max_terms: 3}}."""

    levels: list[int] = field(default_factory=list)
    """Levels of reasoning-gym's curricula, in the order of training, such as [0, 2, 4]; empty: no levels."""

    train_size: int = 2000
    """Training instances of each task, at each level."""

    held_out_size: int = 100
    """Held-out instances of each task, at each level."""

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
    """Where the schemas of the tools are displayed."""

    families: list[str] = field(default_factory=lambda: ["value", "times", "sum", "difference"])
    """Kinds of question in training and held_instances; see `rlpipe.envs.tools.generate`."""

    max_calls: int = 4
    """Maximum number of calls in one turn that are executed."""

    train_size: int = 4000
    """Training instances."""

    held_out_size: int = 200
    """Instances of each held-out set."""

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
    """Arguments of its constructor. With `render_mode: ansi` the model reads the environment's drawing
    instead of the observation. Colours are removed, so it does not suit Taxi-v4, whose drawing needs them."""

    actions: list[str] = field(default_factory=list)
    """Names of the actions of a Discrete space, in order; empty: names that are known, otherwise numbers."""

    invalid_reward: float = 0.0
    """Reward of a turn that names no action; 0 or negative."""

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
    """Id of a game, such as GuessTheNumber-v0. Games with ids that end in -train add missing brackets to an
    answer."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the game's constructor."""

    opponent: str = ""
    """The opponent in a game for two: "random" (any move that the game lists), or module:function, called
    with (text, rng), where text is what that player sees. Empty in a game for one."""

    self_play: bool = False
    """Train on games of the policy against itself: the attempts at an instance play each other in pairs. The
    opponent plays in held-out games only."""

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
    file.py:Class. Empty: that of the installed package if it has one, otherwise tasks of one answer."""


@dataclass(slots=True, kw_only=True)
class OpenEnvConfig:
    """Settings of the environment `openenv`."""

    url: str = ""
    """Address of the environment's server, such as http://127.0.0.1:8000."""

    reset: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment's `reset`; its `seed` is the instance."""

    action: str = ""
    """The field of an action that an answer fills; empty: the only required one, or, if there are several,
    answers are JSON."""

    observation: str = ""
    """The field of an observation that the model reads; empty: the only one, or all of them as JSON."""

    timeout_s: float = 60.0
    """Seconds that the server may take for one answer."""

    def __post_init__(self) -> None:
        positive(self, "env.openenv", "timeout_s")


@dataclass(slots=True, kw_only=True)
class AgentConfig:
    """Settings of the environment `agent`."""

    run: str = ""
    """The agent: a command line, which runs in the sandbox and gets OPENAI_BASE_URL, OPENAI_API_KEY and
    RLPIPE_TASK (a JSON file); or, for code that you trust, a function of (base_url, api_key, task), as
    file.py:NAME or module:NAME, plain or async. The command prints the answer, or the function returns it; if
    there is none, it is the model's last turn."""

    files: list[str] = field(default_factory=list)
    """Files and folders that a command needs in addition to those that its command line names; all of them
    are in /agent."""

    host: str = "127.0.0.1"
    """Address on which the endpoint listens. The default accepts only this machine; agents in containers or
    on other machines need another address. Each attempt has a separate key."""

    def __post_init__(self) -> None:
        if self.is_function:
            self.run = absolute(self.run)
        self.files = [str(Path(name).expanduser().resolve()) for name in self.files]

    @property
    def is_function(self) -> bool:
        """Whether `run` names a function rather than a command."""
        return is_user_code(self.run) and len(self.run.split()) == 1


def _shipped_held_out() -> list[str]:
    """Return the default held-out files."""
    return ["shipped:data/swe/held_instances.jsonl", "shipped:data/swe/held_families.jsonl"]


@dataclass(slots=True, kw_only=True)
class EnvConfig:
    """Settings of the environment."""

    name: EnvName = EnvName.SWE
    """The environment; see `EnvName`."""

    train_file: str = "shipped:data/swe/train.jsonl"
    """SWE instances to train on: JSONL, or parquet as SWE-bench and SWE-Gym are published."""

    held_out_files: list[str] = field(default_factory=_shipped_held_out)
    """Files of held-out SWE instances. A set is named by its file (without its ending); the first is the
    primary one."""

    repos: str = ""
    """Folder with a git mirror of each repository, as OWNER/NAME.git. With `env.sandbox.backend=bubblewrap`,
    which has no containers, instances without files are checked out of it into the sandbox."""

    action_mode: ActionMode = ActionMode.PLAIN
    """See `ActionMode`."""

    max_turns: int = 8
    """Maximum number of actions in an episode."""

    max_observation_chars: int = 400
    """Maximum number of characters of one observation, before the truncation marker."""

    system_prompt: str = ""
    """Replaces the system prompt of the action mode (plain mode has none)."""

    test_command: str = "python {runner}"
    """Command that starts an image's Python on its tests. `{runner}` becomes the grader's program; pytest
    receives the arguments after it."""

    test_timeout_s: float = 10.0
    """Seconds for the complete test run."""

    retries: int = 2
    """Number of further attempts after a failure of the sandbox; then the trajectory is masked."""

    threads: int = 2
    """Number of commands that run at once in one rollout worker."""

    step_timeout_s: float = 600.0
    """Seconds that one call of an episode (messages, step, finish, close) may take; 0 sets no limit. A call
    that takes longer is a failure of the environment: the attempt is repeated, then masked."""

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
    """A user's environment, as module:NAME or path/to/file.py:NAME, instead of what `name` selects: a class
    with the methods `messages` and `step`, or NAME(config, seed) -> Suite, see `rlpipe.envs.base`. A module
    is imported from the folder where the run was started, or as installed."""

    train_size: int = 1000
    """Number of training instances, each a seed, of a class named by `suite` or of a library's
    environment."""

    held_out_size: int = 100
    """Number of held-out instances of these environments, which training never uses."""

    options: dict[str, Any] = field(default_factory=dict)
    """Values for a user's suite, in any form that the suite understands."""

    function: FunctionTask = field(default_factory=FunctionTask, metadata={"omegaconf_ignore": True})
    """Not a setting: `data` and `reward`, which `Config` puts here for the environments of data sets."""

    mix: dict[str, Any] = field(default_factory=dict)
    """Environments to train on together, by name: {arith: {share: 0.5, name: reasoning, reasoning: {tasks:
    [gcd]}}, files: {share: 0.5, suite: my_env.py:Files}}. Shares are shares of the prompts. A member may also
    set any setting of `env`."""

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
        """Files of SWE instances on this machine, with their right answers."""
        return [f for f in (self.train_file, *self.held_out_files) if not f.startswith("shipped:")]

    @property
    def held_out_names(self) -> list[str]:
        """Names of the held-out sets, in the order of the files.

        >>> EnvConfig().held_out_names
        ['held_instances', 'held_families']
        """
        return [PurePath(file.removeprefix("shipped:")).stem for file in self.held_out_files]
