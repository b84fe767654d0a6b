"""Prompts without a score, for adapting a draft: general chat for training, other domains for measurement.

Each is a `Task` whose score is 0 for every answer; training and held-out prompts share no subject.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from recipes.smollm_rl.tasks import HELD_OUT_EVERY, TOPICS, Data, Task, data_of, sides


def _split(text: str) -> list[str]:
    return text.split(";")


CHAT = _split(
    "Explain {} to a child.;Write two sentences about {}.;Why is {} important?;Give me three facts about {}.;"
    "Write a short poem about {}.;What is {}?;Tell me a joke about {}.;Write a headline about {}.;"
    "List five words related to {}.;Write a short dialogue between two friends about {}.;"
    "What would happen without {}?;Begin a short story about {}.;Write an email to a friend about {}.;"
    "Describe {} in one paragraph.;What are the advantages of {}?;Ask me a question about {}.;"
    "Summarize the history of {} in two sentences.;Write a diary entry that mentions {}."
)
MATHS = _split(
    "{} How many are there now? Explain step by step.;{} What is the total? Show your calculation.;"
    "{} Write an equation for this and solve it."
)
ITEMS = _split("marbles;books;eggs;coins;tickets;apples;pencils;shells;stamps;cards;bricks;buttons")
CODE = _split(
    "Write a Python function that {}.;Write a JavaScript function that {}.;Write a C function that {}.;"
    "Write a unit test in Python for a function that {}."
)
FUNCTIONS = _split(
    "returns the sum of a list;finds the largest number of a list;reverses a string;"
    "counts the vowels of a word;checks whether a number is prime;sorts a list of names;"
    "removes duplicates from a list;"
    "computes the average of a list;returns the n-th Fibonacci number;converts Celsius to Fahrenheit;"
    "merges two sorted lists;tests whether a word is a palindrome;counts the lines of a file;"
    "computes a factorial;returns the longest word of a sentence;finds the index of an element;"
    "rounds a number to two decimals;splits a text into words;counts how often each letter occurs;"
    "checks whether a year is a leap year;removes spaces from a string;returns the even numbers of a list;"
    "joins words with commas;computes the area of a circle"
)
TRANSLATION = _split(
    "Translate to French: '{}';Translate to Spanish: '{}';Translate to German: '{}';"
    "Translate to Italian: '{}'"
)
SENTENCES = _split(
    "The dog is old.;The train is late.;My house is small.;She reads a green book.;We eat bread and cheese.;"
    "Where is the station?;It rains every day.;He plays the piano.;The children are tired.;I like this song.;"
    "The shop is closed today.;They live near the sea.;Open the window, please.;The moon is bright.;"
    "Our teacher is kind.;The water is cold.;My brother lives in Rome.;He has two cats.;The soup is too hot.;"
    "We go to school by bus.;Her coat is blue.;The garden is full of flowers.;I lost my key yesterday.;"
    "This chair is not comfortable."
)
HTML = _split(
    "Create an HTML page with a table of {}.;Create an HTML form that asks for {}.;"
    "Write an HTML list of {}.;Write the CSS for a page about {}."
)
OBJECTS = _split(
    "cars;fruit;cities;books;names and addresses;opening hours;recipes;songs;football results;prices;planets;"
    "holidays;contacts;films;courses;tools;animals;countries;shopping items;birthdays;rivers;sports;"
    "train times;exam results"
)

Draw = Callable[[random.Random, bool], Data]


def _no_score(data: Data, answer: str) -> float:
    return 0.0


def _draw_from(templates: Sequence[str], subjects: Sequence[str]) -> Draw:
    """Return a function that samples a template with a subject; every fourth subject is held out."""
    by_side = sides(subjects)

    def draw(rng: random.Random, held_out: bool) -> Data:
        subject = rng.choice(by_side[held_out])
        return data_of(rng.choice(templates).format(subject))

    return draw


def _draw_maths(rng: random.Random, held_out: bool) -> Data:
    has, gets = rng.randint(3, 40), rng.randint(3, 40)
    while ((has + gets) % HELD_OUT_EVERY == 0) != held_out:
        gets = rng.randint(3, 40)
    story = f"A box has {has} {rng.choice(ITEMS)} and {gets} more are put into it."
    return data_of(rng.choice(MATHS).format(story))


UNSCORED = {
    "chat": Task(_draw_from(CHAT, TOPICS), _no_score),
    "maths": Task(_draw_maths, _no_score),
    "code": Task(_draw_from(CODE, FUNCTIONS), _no_score),
    "translation": Task(_draw_from(TRANSLATION, SENTENCES), _no_score),
    "html": Task(_draw_from(HTML, OBJECTS), _no_score),
}
