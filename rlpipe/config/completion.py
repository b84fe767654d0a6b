"""The shell's completion of `rlpipe`: commands, recipes, settings and their choices. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import is_dataclass
from enum import Enum

from rlpipe.config.hints import settings
from rlpipe.config.paths import shipped

_BASH = """\
_rlpipe() {
  local line="${COMP_LINE:0:COMP_POINT}" words
  local current="${line##* }"
  if [[ $line =~ ^[^[:space:]]+[[:space:]]+[^[:space:]]*$ ]]; then words="COMMANDS"
  elif [[ $line =~ ^[^[:space:]]+[[:space:]]+(run|check)[[:space:]] ]]; then words="SETTINGS"
  else COMPREPLY=($(compgen -f -- "$current")); return; fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2> /dev/null
  if [[ $current == *=* && $COMP_WORDBREAKS == *=* ]]; then
    COMPREPLY=("${COMPREPLY[@]#"${current%%=*}="}")  # bash has broken the word behind its =
  fi
}
complete -F _rlpipe rlpipe
"""
SHELLS = {"bash": _BASH, "zsh": "autoload -U +X bashcompinit && bashcompinit\n" + _BASH}


def setting_words() -> list[str]:
    """What may follow `rlpipe run`: `+recipe=swe_rl`, `spec.mode=none`, `spec.gamma=`, ..."""
    found = []
    for folder in sorted(path for path in shipped("configs").iterdir() if path.is_dir()):
        sign = "+" if folder.name == "recipe" else ""
        found += [f"{sign}{folder.name}={path.stem}" for path in sorted(folder.glob("*.yaml"))]
    for name, value in settings():
        if is_dataclass(value) or name == "recipe":
            continue
        choices = type(value).__members__ if isinstance(value, Enum) else [""]
        choices = ["true", "false"] if isinstance(value, bool) else choices
        found += [f"{name}={choice}" for choice in choices]
    return found


def script(shell: str, commands: Iterable[str]) -> str:
    """What a shell evaluates. Raises ValueError for a shell that is not known."""
    if shell not in SHELLS:
        raise ValueError(f"completion of {shell!r}: give one of {', '.join(SHELLS)}.")
    words = {"COMMANDS": " ".join(commands), "SETTINGS": " ".join(setting_words())}
    text = SHELLS[shell]
    for name, listed in words.items():
        text = text.replace(f'"{name}"', f'"{listed}"')
    return text
