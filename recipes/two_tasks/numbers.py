"""A reward in the form of TRL's GRPOTrainer: does an answer name the right number?"""

import re


def largest(completions, answer, **kwargs):
    """Return 1 for each answer that contains only the right number, and none of the others."""
    pairs = zip(completions, answer, strict=True)
    return [float(set(re.findall(r"\d+", text)) == {str(right)}) for text, right in pairs]
