"""A reward in rlpipe's own form: does a sentence begin with the letter that the prompt requests?"""

import re


def score(completion, letter):
    """Return 1 for a sentence of six to thirty words, with few repeats, that begins with the letter."""
    text = completion.strip()
    words = re.findall(r"[a-z']+", text.lower())

    # Without this check, "Big big big." would earn the reward.
    sentence = text.endswith(".") and "\n" not in text and 6 <= len(words) <= 30
    return float(sentence and text.startswith(letter) and len(set(words)) >= 0.75 * len(words))
