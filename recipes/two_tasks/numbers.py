"""Is the number that an answer names the right one? A reward in the form of TRL's GRPOTrainer."""

import re


def largest(completions, answer, **kwargs):
    """Return 1 for each answer whose numbers are all the right one: who repeats the others has not chosen."""
    pairs = zip(completions, answer, strict=True)
    return [float(set(re.findall(r"\d+", text)) == {str(right)}) for text, right in pairs]
