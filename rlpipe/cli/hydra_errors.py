"""Explains Hydra's errors in a command line or a YAML file: names the setting, its value and a hint."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from rlpipe.cli.suggestions import closest_setting, kind_of, settings, unknown_setting
from rlpipe.config.limits import did_you_mean
from rlpipe.config.paths import shipped

_ALL = "`rlpipe run --cfg job +recipe=NAME` prints every setting"


def explaining(command: Callable[[], int]) -> int:
    """Run a Hydra command; return its exit status. For a wrong command line, print a message and return 2."""
    # This makes Hydra raise its errors instead of printing them.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv[1:] = settings_first(sys.argv[1:])
    try:
        check_arguments(sys.argv[1:])
        return command()
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        return refused(error)


def settings_first(arguments: Sequence[str]) -> list[str]:
    """Return the command line with all settings in one block before the options, as argparse requires."""
    options = get_args_parser()._option_string_actions
    first, rest, value = [], [], False
    for word in arguments:
        # The value of an option, such as a folder, is not a setting, even if it contains "=".
        is_setting = not (value or word.startswith("-")) and ("=" in word or word.startswith("~"))
        (first if is_setting else rest).append(word)
        value = word in options and options[word].nargs is None

    return [*map(_readable_reward, first), *rest]


def _readable_reward(word: str) -> str:
    """Escape the colons of functions in `reward={my.py:score: 0.7}`; Hydra would end the key there.

    >>> _readable_reward("reward={my.py:score: 0.7, exact_match: 0.3}")
    'reward={my.py\\\\:score: 0.7, exact_match: 0.3}'
    """
    if not re.match(r"\+*reward=\s*[{\[]", word):
        return word
    return re.sub(r"([\w./~-]+):(\w+)(?=\s*:)", r"\1\\:\2", word)


def refused(error: Exception) -> int:
    """Print why the command line is wrong; return the exit status."""
    print(f"rlpipe: {explained(error, sys.argv[1:])}", file=sys.stderr)
    return 2


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise ValueError for wrong arguments that Hydra would ignore or explain badly."""
    parser = get_args_parser()
    given, unknown = parser.parse_known_args(list(arguments))

    for flag in unknown:
        flags = parser._option_string_actions
        setting = flag.lstrip("-")
        meant = did_you_mean(flag.partition("=")[0], flags)

        if "=" in setting:
            name, _, value = setting.partition("=")
            raise ValueError(
                f"{flag}: settings have no dashes. Did you mean {closest_setting(name) or name}={value}?"
            )
        raise ValueError(
            f"{flag}: there is no such option.{meant} Remove it; `rlpipe run --help` lists them."
        )

    if given.multirun and (given.cfg or given.info):
        raise ValueError(
            "--multirun with --cfg or --info: a sweep has many configurations, and these show one. Leave one "
            "of the two options out."
        )

    if (given.config_name or "").startswith("recipe/"):
        name = given.config_name.removeprefix("recipe/").removesuffix(".yaml")
        raise ValueError(
            f"--config-name {given.config_name}: a recipe is added to the settings. Leave the option out and "
            f"give +recipe={name}."
        )

    # Hydra would ignore a folder that does not exist.
    if given.config_dir and not Path(given.config_dir).is_dir():
        raise ValueError(
            f"--config-dir {given.config_dir!r} is not a folder: name the one that holds recipe/."
        )

    # Arguments may also select a file of a config group, such as cluster=inline.
    folders = [shipped("configs"), *([Path(given.config_dir)] if given.config_dir else [])]
    groups = {path.name for folder in folders for path in folder.iterdir() if path.is_dir()}
    for word in given.overrides:
        _check_word(word, groups)


def _check_word(word: str, groups: set[str]) -> None:
    """Raise ValueError for a common mistake in one word of the command line."""
    key, equals, value = word.partition("=")
    name = key.lstrip("+~")
    if name.startswith("hydra"):
        return

    # Hydra's messages for these common mistakes are hard to understand.
    if key == "recipe":
        raise ValueError(f"{word}: use +recipe={value or 'NAME'} exactly once.")
    if not equals and not key.startswith("~"):
        raise ValueError(f"{word!r} is neither a setting nor an option: write key=value, without spaces.")
    if not re.fullmatch(r"[\w./@:-]+", name):
        return  # Hydra's own error is clear

    if key.startswith("~"):
        raise ValueError(f"{word}: settings cannot be removed. Give {name}=VALUE, or leave it out.")

    # Hydra checks groups, paths and packages; any other name must be a setting.
    if (
        name not in groups
        and "/" not in name
        and "@" not in name
        and (refusal := unknown_setting(name, value))
    ):
        raise refusal


def explained(error: Exception, arguments: Sequence[str]) -> str:
    """Return a message for an error of Hydra, OmegaConf or YAML; for a ValueError, its own message."""
    text = str(error.__cause__ or error)
    first = next(line for line in [*text.splitlines(), ""] if not line.startswith("In '")).strip()

    # Handle known errors: YAML, a missing file, the grammar, a repeated group, a misplaced file.
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
        return (
            f"{mark.name}:{mark.line + 1}: not YAML at column {mark.column + 1}: {error.problem}. Check the "
            "indentation, brackets and quotes around that line."
        )
    if isinstance(error, MissingConfigException):
        return _missing(error, arguments)
    if isinstance(error, OverrideParseException):
        lines = [line for line in str(error).splitlines() if not line.startswith(("Error parsing", "See "))]
        why = "".join(lines[:1]).partition("expecting")[0].strip()
        key, equals, value = (error.override or "").partition("=")
        hint = "write key=value, a list as [a,b], and quote what holds brackets or commas: key=\"'a, b'\""
        if equals and _is_text(key):
            hint = f"write {_quoted(key, value)}"
        return f"{error.override!r} cannot be read ({why}): {hint}."
    if named := re.match(r"Ambiguous value for argument '([^=]+)=(.*?)'", first):
        hint = f"write a list as {named[1]}=[{named[2]}]"
        if _is_text(named[1]):
            hint = f"write a text with a comma as {_quoted(named[1], named[2])}"
        return (
            f"{named[1]}={named[2]} has several values: add --multirun for one run with each of them, or "
            f"{hint}."
        )
    if named := re.search(r"Multiple values for (\S+?)\.", str(error)):
        given = [word for word in arguments if word.lstrip("+").startswith(f"{named[1]}=")]
        return f"{' '.join(given)}: {named[1]} is chosen twice. Keep one of them."
    if "DictConfig" in text and "full_key: recipe" in text + str(error):
        return (
            f"{_place(error)}its settings are under `recipe`, which is a name. Make "
            "`# @package _global_` the first line of the file."
        )

    # Handle errors on a setting, by its name.
    key = _key(error, text)
    word = next((w for w in arguments if w.lstrip("+").startswith(f"{key}=")), "")
    value = word.partition("=")[2]
    if "not in" in first and key and (refusal := unknown_setting(key, value or "...")):
        return f"{_place(error)}{refusal}"

    # Hydra changes existing keys of a mapping, but adds a new key only with `+`.
    mapping = next(
        (
            name
            for name, default in settings()
            if isinstance(default, dict) and f"{key}.".startswith(f"{name}.")
        ),
        "",
    )
    if "not in struct" in first and mapping:
        setting = word or next((w for w in arguments if w.startswith(mapping)), f"{key}=VALUE")
        return f"{_place(error)}{setting}: {mapping} has no such key, and a plus adds one: give +{setting}."

    if key in dict(settings()):
        wrong = re.search(r"[Vv]alue '(.*?)'", first)
        names = re.search(r"expected one of \[(.*)\]", first)
        meant = did_you_mean(wrong[1], names[1].split(", ")) if wrong and names else ""
        return f"{_place(error)}{word or key}: {first.rstrip('.')}.{meant} Instead {kind_of(key)}."

    return (
        f"{_place(error)}{first.rstrip('.')}. Correct it; {_ALL}." if type(error) is not ValueError else text
    )


def _is_text(key: str) -> bool:
    """Return whether a setting is a text, not a choice among names."""
    return type(dict(settings()).get(key.lstrip("+"))) is str


def _quoted(key: str, value: str) -> str:
    """Return an argument for the shell that Hydra reads as one text.

    >>> print(_quoted("data.system", "Think first, then answer."))
    'data.system="Think first, then answer."'
    """
    text = value.replace("\\", "\\\\").replace('"', '\\"')
    return shlex.quote(f'{key}="{text}"')


def _place(error: Exception) -> str:
    """Return the YAML file named in an error, as the beginning of a sentence."""
    match = re.match(r"In '(\S+?)'", str(error))
    return f"{match[1]}.yaml: " if match else ""


def _key(error: Exception, text: str) -> str:
    """Return the dotted name of the setting that caused an error; "" if there is none."""
    both = f"{text}\n{error}"

    patterns = (
        r"full_key: ([^\s\[]+)",
        r"Could not override '(\S+?)'",
        r"override \+*([\w.]+)=",
        r"at '(\S+?)'",
    )
    return next((match[1] for pattern in patterns if (match := re.search(pattern, both))), "")


def _missing(error: MissingConfigException, arguments: Sequence[str]) -> str:
    """Return the message for a recipe or group file that does not exist."""
    group, _, name = (error.missing_cfg_file or "").removesuffix(".yaml").rpartition("/")
    given = get_args_parser().parse_known_args(list(arguments))[0].config_name or ""
    if not group or given.removesuffix(".yaml") == f"{group}/{name}":
        return (
            f"--config-name {given or name!r}: there is no such file. Leave the option out and choose "
            "+recipe=NAME."
        )

    options = list(error.options or ())
    return (
        f"{group}={name}: there is no {group} {name!r}.{did_you_mean(name, options)} Choose one of "
        f"{', '.join(options)}; --config-dir FOLDER adds FOLDER/{group}/{name or 'NAME'}.yaml."
    )
