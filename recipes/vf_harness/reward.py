"""The reward of recipes/find_function: a search for the right name is worth 0.9, any search 0.1."""

import re


def score(completion, function):
    return 0.9 * bool(re.match(rf"grep -l 'def {function}\b'", completion)) + 0.1 * completion.startswith(
        "grep -l 'def "
    )
