"""Makes tool-use instances: a question about numbers in a small library of documents.

An instance is determined by its id, "family:index". Each document in its library has the values of one
attribute for a few things ("weight of coin, fish"). Other documents share the attribute or a thing, so that a
search by only one of them can return the wrong document. A family is a form of question; answers are computed
from the values.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from rlpipe.envs.tools.calculator import calculate


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ATTRIBUTES = _words("age cost count depth height level rank rate score size speed weight width")
THINGS = _words(
    "ball band bank bill book card cart coin desk door farm fish game lamp note page plan ring road seat "
    "ship shop song team tree trip wall"
)
NAMES = _words(
    "base basic city common core data helper items list logic marks model parts scores store text title "
    "tools utils values"
)
Fact = tuple[str, str]  # (attribute, thing)


@dataclass(slots=True, kw_only=True, frozen=True)
class Family:
    """A form of question. facts: number of values that it needs. terms: see `Instance.terms`."""

    facts: int
    question: str
    terms: tuple[str, ...]


TRAIN_FAMILIES = {
    "value": Family(facts=1, question="What is {0}?", terms=("{0}",)),
    "times": Family(facts=1, question="What is {n} times {0}?", terms=("{n}", "*", "{0}")),
    "sum": Family(facts=2, question="What is {0} plus {1}?", terms=("{0}", "+", "{1}")),
    "difference": Family(facts=2, question="What is {0} minus {1}?", terms=("{0}", "-", "{1}")),
}
HELD_OUT_FAMILIES = {
    "product": Family(facts=2, question="What is {0} times {1}?", terms=("{0}", "*", "{1}")),
    "times_plus": Family(
        facts=2, question="What is {n} times {0} plus {1}?", terms=("{n}", "*", "{0}", "+", "{1}")
    ),
}
FAMILIES = TRAIN_FAMILIES | HELD_OUT_FAMILIES


@dataclass(slots=True, kw_only=True, frozen=True)
class Document:
    """A document with the values of one attribute. values: value of each thing."""

    attribute: str
    values: dict[str, int]

    @property
    def header(self) -> str:
        """Return the line that a search displays for the document.

        >>> Document(attribute="age", values={"fish": 3, "tree": 40}).header
        'age of fish, tree'
        """
        return f"{self.attribute} of {', '.join(self.values)}"

    @property
    def text(self) -> str:
        """Return the full text of the document."""
        return "\n".join([self.attribute, *(f"- {thing}: {value}" for thing, value in self.values.items())])


@dataclass(slots=True, kw_only=True, frozen=True)
class Instance:
    """One question. documents: documents by name. facts: the values that the question needs, in order.

    terms: numbers and operators, alternating, of the expression whose value is the answer.
    """

    instance_id: str
    family: str
    question: str
    documents: dict[str, Document]
    facts: tuple[Fact, ...]
    terms: tuple[str, ...]
    answer: str


def make_instance(instance_id: str) -> Instance:
    """Make the instance with this id. Raises ValueError for an unknown family.

    >>> one = make_instance("times:0")
    >>> one.question, one.terms, one.answer
    ('What is 4 times the count of tree?', ('4', '*', '49'), '196')
    """
    name, _, index = instance_id.partition(":")
    if name not in FAMILIES or not index.isdecimal():
        raise ValueError(f"no tool-use instance {instance_id!r}: an id is FAMILY:INDEX, of {list(FAMILIES)}.")

    # The id is the only seed: the same id gives the same instance in every run.
    family, rng = FAMILIES[name], random.Random(f"tools/{instance_id}")
    facts = _facts(rng, family.facts)
    documents = _library(rng, facts)

    value_by_fact = {
        (d.attribute, thing): value for d in documents.values() for thing, value in d.values.items()
    }
    values = [value_by_fact[fact] for fact in facts]
    n = rng.randint(2, 9)
    terms = tuple(term.format(*values, n=n) for term in family.terms)

    return Instance(
        instance_id=instance_id,
        family=name,
        question=family.question.format(*(f"the {a} of {t}" for a, t in facts), n=n),
        documents=documents,
        facts=facts,
        terms=terms,
        answer=calculate(" ".join(terms)),
    )


def _facts(rng: random.Random, count: int) -> tuple[Fact, ...]:
    """Sample distinct facts, which may share an attribute or a thing."""
    facts: list[Fact] = []
    while len(facts) < count:
        attribute, thing = rng.choice(ATTRIBUTES), rng.choice(THINGS)

        # Facts that share an attribute or a thing are harder to distinguish.
        if facts and rng.random() < 0.5:
            attribute, thing = rng.choice([(facts[0][0], thing), (attribute, facts[0][1])])
        if (attribute, thing) not in facts:
            facts.append((attribute, thing))
    return tuple(facts)


def _library(rng: random.Random, facts: tuple[Fact, ...]) -> dict[str, Document]:
    """Make a document for each attribute of the facts, and two misleading documents for each.

    One has the same attribute but other things; the other has the same thing but another attribute.
    """
    things_by_attribute: dict[str, list[str]] = {}
    for attribute, thing in facts:
        things_by_attribute.setdefault(attribute, []).append(thing)

    documents = [
        _document(rng, attribute, things, without=set()) for attribute, things in things_by_attribute.items()
    ]
    for attribute, things in things_by_attribute.items():
        taken = {thing for d in documents if d.attribute == attribute for thing in d.values}
        documents.append(_document(rng, attribute, [], without=taken))

        other = rng.choice([a for a in ATTRIBUTES if a not in things_by_attribute])
        needed = {thing for _, thing in facts}
        documents.append(_document(rng, other, [things[0]], without=needed - {things[0]}))

    rng.shuffle(documents)
    return dict(zip(rng.sample(NAMES, len(documents)), documents, strict=True))


def _document(rng: random.Random, attribute: str, things: list[str], *, without: set[str]) -> Document:
    """Make a document with these things and two or three others that are not in `without`."""
    others = [t for t in THINGS if t not in things and t not in without]
    chosen = things + rng.sample(others, rng.randint(2, 3))
    rng.shuffle(chosen)
    return Document(attribute=attribute, values={thing: rng.randint(2, 99) for thing in chosen})
