"""Four instruction-following tasks with exact scores of 0 or 1. Imports the standard library only.

    start     one sentence about a topic whose first letter is prescribed
    short     one sentence of at most ten words about a topic
    keywords  one short sentence with two prescribed words
    largest   the largest of three numbers (a guess among the three is right in a third of the cases)

A task samples a prompt with the data that its score needs, and scores an answer:

    >>> task = TASKS["largest"]
    >>> prompt, data = task.make(random.Random(0))
    >>> prompt
    'Which number is the largest: 275, 998 or 533?'
    >>> task.score(data, "The largest number is 998."), task.score(data, "It is 533.")
    (1.0, 0.0)

Training and held-out prompts never have the same text: a topic, a word or a set of three numbers belongs to
only one of the two sides (`sides`).

Every sentence must also pass `is_sentence`, so that repetitions, copies of the prompt and strings of letters
earn nothing. Truth and sense are not rewarded: "Honey bees eat the moon at night." passes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypedDict

LETTERS = "ABCDEFGHILMNOPRSTW"
MAX_WORDS = 10  # of `short`
MAX_KEYWORD_WORDS = 20
HELD_OUT_EVERY = 4  # every fourth topic and word
_MAX_REPEATED = 10_000  # draws in a row


def _split(text: str) -> list[str]:
    return text.split(";")


TOPICS = _split(
    "the moon;honey bees;bread;the ocean;winter;friendship;bicycles;a rainy day;libraries;coffee;football;"
    "volcanoes;cats;the internet;trees;music;gardening;ancient Rome;the human heart;trains;chocolate;stars;"
    "whales;sleep;kindness;a city market;computers;paper;money;birds;mathematics;a lost key;fire;rivers;"
    "school;shoes;cooking;space travel;dinosaurs;the colour blue;glass;a birthday party;deserts;lighthouses;"
    "salt;penguins;the violin;rainbows;clocks;a railway station;mountains;butterflies;cheese;telescopes;"
    "dreams;elephants;the telephone;snow;apples;a long journey;dancing;wheat;castles;spiders;the piano;"
    "thunder;maps;soap;a village school;horses;electricity;islands;tea;robots;laughter;the sun;bridges;"
    "gold;painting;wolves;a quiet evening;medicine;ice cream;photographs;farmers;the alphabet;sailing;"
    "mirrors;pottery;frogs;a summer garden;newspapers;candles;memory;airports;owls;the harvest;umbrellas;"
    "silk;neighbours"
)
WORDS = _split(
    "apple;river;stone;cloud;garden;window;mirror;forest;candle;silver;yellow;orange;planet;rocket;bridge;"
    "market;summer;winter;doctor;teacher;farmer;pencil;bottle;basket;kitchen;hammer;ladder;tunnel;castle;"
    "village;island;desert;ocean;valley;mountain;flower;butter;cheese;coffee;pepper;sugar;tomato;carrot;"
    "banana;cherry;lemon;rabbit;monkey;tiger;turtle;eagle;spider;horse;camel;donkey;kitten;puppy;turkey;"
    "table;blanket;button;camera;engine;feather;guitar;jacket;letter;magnet;needle;oven;paper;pillow;"
    "ribbon;saddle;shadow;sailor;ticket;wagon;wallet"
)
REQUESTS = ("What is", "Tell me about", "Explain", "Describe", "Define", "Say something about")
# A sentence of four words or more contains one of these.
FUNCTION_WORDS = frozenset(
    _split(
        "a;an;the;this;that;these;those;is;are;was;were;be;been;am;has;have;had;do;does;did;can;could;"
        "will;would;may;might;must;should;in;on;at;of;to;for;from;with;by;as;into;over;under;between;and;"
        "or;but;so;because;while;when;where;who;which;it;its;they;their;them;he;his;she;her;we;our;us;you;"
        "your;i;my;me;there;not;no;all;some;many;every;each"
    )
)


class Data(TypedDict):
    """Data that a score needs in addition to the answer, as plain JSON; unused fields are empty.

    topic: for the task `short`. letter: for `start`. words: for `keywords`. largest: for `largest`.
    """

    prompt: str
    topic: str
    letter: str
    words: list[str]
    largest: int


def data_of(
    prompt: str, *, topic: str = "", letter: str = "", words: Sequence[str] = (), largest: int = 0
) -> Data:
    """Return the data of a prompt."""
    return Data(prompt=prompt, topic=topic, letter=letter, words=list(words), largest=largest)


@dataclass(slots=True, frozen=True)
class Task:
    """A task. draw: makes a prompt of the training or the held-out set. score: 0 or 1 for an answer."""

    draw: Callable[[random.Random, bool], Data]
    score: Callable[[Data, str], float]

    def make(self, rng: random.Random, *, held_out: bool = False) -> tuple[str, Data]:
        """Return a prompt and the data of its score."""
        data = self.draw(rng, held_out)
        return data["prompt"], data

    def examples(self, count: int, *, held_out: bool = False, seed: int = 0) -> list[tuple[str, Data]]:
        """Return `count` distinct prompts, each with its data; equal arguments give the same prompts.

        Raises ValueError when the task has fewer prompts.
        """
        rng = random.Random(f"{held_out}.{seed}")
        examples: dict[str, Data] = {}

        # The last prompts of a small set are rarely drawn.
        repeated = 0
        while len(examples) < count:
            prompt, data = self.make(rng, held_out=held_out)
            repeated = repeated + 1 if prompt in examples else 0
            examples[prompt] = data
            if repeated == _MAX_REPEATED:
                side = "held-out" if held_out else "training"
                raise ValueError(f"a task has only {len(examples)} {side} prompts, not {count}: use fewer.")
        return list(examples.items())


# --- parts of training and held-out prompts -------------------------------------------------


def sides(names: Sequence[str]) -> dict[bool, list[str]]:
    """Split names into those of training prompts (False) and of held-out prompts (True).

    >>> sides(["a", "b", "c", "d", "e"])
    {False: ['a', 'b', 'c', 'e'], True: ['d']}
    """
    by_side: dict[bool, list[str]] = {False: [], True: []}
    for number, name in enumerate(names, 1):
        by_side[number % HELD_OUT_EVERY == 0].append(name)
    return by_side


_TOPICS, _WORDS = sides(TOPICS), sides(WORDS)


def _held_out_numbers(numbers: Sequence[int]) -> bool:
    """Return whether three numbers are held out; their order does not matter."""
    return sum(numbers) % HELD_OUT_EVERY == 0


def _draw_start(rng: random.Random, held_out: bool) -> Data:
    topic, letter = rng.choice(_TOPICS[held_out]), rng.choice(LETTERS)
    prompt = f"Write one sentence about {topic}. The sentence must start with the letter {letter}."
    return data_of(prompt, letter=letter)


def _draw_short(rng: random.Random, held_out: bool) -> Data:
    topic, request = rng.choice(_TOPICS[held_out]), rng.choice(REQUESTS)
    return data_of(f"{request} {topic} in one short sentence of at most ten words.", topic=topic)


def _draw_keywords(rng: random.Random, held_out: bool) -> Data:
    first, second = rng.sample(_WORDS[held_out], 2)
    prompt = f"Write one short sentence that contains the words '{first}' and '{second}'."
    return data_of(prompt, words=[first, second])


def _draw_largest(rng: random.Random, held_out: bool) -> Data:
    numbers = rng.sample(range(10, 999), 3)
    while _held_out_numbers(numbers) != held_out:
        numbers = rng.sample(range(10, 999), 3)
    first, second, third = numbers
    prompt = f"Which number is the largest: {first}, {second} or {third}?"
    return data_of(prompt, largest=max(numbers))


# --- scores ---------------------------------------------------------------------------------------------


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case.

    >>> words_of("The moon's light, again!")
    ['the', "moon's", 'light', 'again']
    """
    return re.findall(r"[^\W\d_]+(?:['’][^\W\d_]+)*", text.lower())


def is_sentence(answer: str, prompt: str) -> bool:
    """Return whether an answer is one line of running text that the model wrote itself.

    That is: it has four words or more, one of them a function word; long words have a vowel; no word occurs
    twice in a row; three of four words are distinct, and no long word is repeated; at least three words are
    not in the prompt; it ends with a full stop, "!" or "?".

    >>> is_sentence("Winter is the coldest season of the year.", "What is winter?")
    True
    >>> is_sentence("A candle is a candle and a kitchen is a kitchen.", "Use candle and kitchen.")
    False
    >>> is_sentence("NNN NNN NNN.", "What is winter?")
    False
    """
    text, words = answer.strip(), words_of(answer)
    one_line = "\n" not in text and text.rstrip("\"'”*").endswith((".", "!", "?"))
    if not one_line or len(words) < 4 or not FUNCTION_WORDS.intersection(words):
        return False

    pronounceable = all(len(word) < 3 or re.search(r"[aeiouy]|[^\x00-\x7f]", word) for word in words)
    long_words = [word for word in words if len(word) > 4]
    varied = len(set(words)) >= 0.75 * len(words) and len(set(long_words)) == len(long_words)
    stutters = any(one == next_one for one, next_one in pairwise(words))
    added = set(words) - set(words_of(prompt))
    return pronounceable and varied and not stutters and len(added) >= 3


def names_topic(answer: str, topic: str) -> bool:
    """Return whether an answer has a content word of the topic, in any inflected form.

    >>> names_topic("A bee is an insect.", "honey bees"), names_topic("It is an insect.", "honey bees")
    (True, False)
    >>> names_topic("Rome's library burnt.", "libraries"), names_topic("We cook in volcanic ash.", "cooking")
    (True, True)
    """
    content = [word for word in words_of(topic) if word not in FUNCTION_WORDS]
    # The ending of a long word is its inflection.
    stems = tuple(word[:-3] if len(word) >= 7 else word.rstrip("s") for word in content)
    longest = max(map(len, content)) + 3
    return any(word.startswith(stems) and len(word) <= longest for word in words_of(answer))


def _score_start(data: Data, answer: str) -> float:
    text = answer.strip().lstrip("\"'“*")
    return float(text[:1].upper() == data["letter"] and is_sentence(answer, data["prompt"]))


def _score_short(data: Data, answer: str) -> float:
    right = len(answer.split()) <= MAX_WORDS and names_topic(answer, data["topic"])
    return float(right and is_sentence(answer, data["prompt"]))


def _score_keywords(data: Data, answer: str) -> float:
    words = words_of(answer)
    right = set(data["words"]).issubset(words) and len(words) <= MAX_KEYWORD_WORDS
    return float(right and is_sentence(answer, data["prompt"]))


def _score_largest(data: Data, answer: str) -> float:
    numbers = [int(digits.replace(",", "")) for digits in re.findall(r"\d[\d,]*", answer)]

    # An answer that repeats all three numbers has not chosen.
    return float(bool(numbers) and numbers[-1] == data["largest"] and len(set(numbers)) < 3)


TASKS = {
    "start": Task(_draw_start, _score_start),
    "short": Task(_draw_short, _score_short),
    "keywords": Task(_draw_keywords, _score_keywords),
    "largest": Task(_draw_largest, _score_largest),
}
