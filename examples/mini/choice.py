"""Questions with four options, answered by one line of reasoning and `Answer: X`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random

from item import Item
from word import NAMES

LETTERS = "ABCD"
PETS = ("cat", "dog", "parrot", "rabbit", "turtle", "horse", "goat", "duck", "mouse", "snake")
COLORS = ("red", "blue", "green", "yellow", "white", "black", "brown", "orange", "pink", "gray")
ALPHABET = "BCDFGHJKLMNPQRSTVWXZ"
RELATIONS = (("taller", "tallest", "shortest"), ("older", "oldest", "youngest"), ("faster", "fastest", "slowest"),
             ("richer", "richest", "poorest"), ("heavier", "heaviest", "lightest"))  # fmt: skip

Posed = tuple[str, str, list[str], str, object]  # stem, right option, wrong options, reasoning, content


def near(r: Random, n: int) -> list[str]:
    """Three wrong numbers close to n: typical slips by one, by ten, by a few."""
    wrong: list[int] = []
    while len(wrong) < 3:
        w = n + r.choice((-20, -11, -10, -9, -5, -3, -2, -1, 1, 2, 3, 5, 9, 10, 11, 20))
        if w >= 0 and w not in wrong:
            wrong.append(w)
    return [str(w) for w in wrong]


def arithmetic(r: Random) -> Posed:
    kind = r.choice("++--*/")
    if kind == "+":
        a, b = r.randint(10, 499), r.randint(10, 499)
        n = a + b
    elif kind == "-":
        a = r.randint(20, 999)
        b = r.randint(1, a - 1)
        n = a - b
    elif kind == "*":
        a, b = r.randint(11, 110), r.randint(2, 9)
        n = a * b
    else:
        n, b = r.randint(3, 110), r.randint(2, 9)
        a = n * b
    stem = r.choice(("What is {}?", "Compute {}.", "Which number equals {}?")).format(f"{a} {kind} {b}")
    return stem, str(n), near(r, n), f"{a} {kind} {b} = {n}", (a, kind, b)


def comparison(r: Random) -> Posed:
    low, high = r.choice(((10, 99), (100, 999), (1, 999), (300, 450)))
    numbers = r.sample(range(low, high + 1), 4)
    word, n = r.choice((("largest", max(numbers)), ("smallest", min(numbers))))
    rest = [str(x) for x in numbers if x != n]
    stem = r.choice((f"Which number is the {word}?", f"Which of these is the {word} number?"))
    return stem, str(n), rest, f"The {word} number is {n}.", (word, sorted(numbers))


def ordering(r: Random) -> Posed:
    people = r.sample(NAMES, 4)  # from most to least
    more, most, least = r.choice(RELATIONS)
    facts = [f"{a} is {more} than {b}." for a, b in pairwise(people)]
    r.shuffle(facts)
    ask, who = r.choice(((most, people[0]), (least, people[3]), (f"second {most}", people[1])))
    chain = f"From {most} to {least}: {', '.join(people)}."
    return f"{' '.join(facts)} Who is the {ask}?", who, [p for p in people if p != who], chain, (more, people, ask)


def sequence(r: Random) -> Posed:
    if r.random() < 0.75:
        start, step = r.randint(1, 150), r.randint(2, 30)
        if r.random() < 0.3:
            step = -step
            start += 4 * 30
        terms = [start + i * step for i in range(5)]
        line = f"The step is {abs(step)}: {terms[3]} {'+' if step > 0 else '-'} {abs(step)} = {terms[4]}"
    else:
        start, step = r.randint(1, 24), r.randint(2, 3)
        terms = [start * step**i for i in range(5)]
        line = f"Each number is {step} times the one before: {terms[3]} * {step} = {terms[4]}"
    shown = ", ".join(str(t) for t in terms[:4])
    stem = r.choice((f"Which number comes next? {shown}, ...", f"Continue the sequence {shown}, ..."))
    return stem, str(terms[4]), near(r, terms[4]), line, tuple(terms)


def reversal(r: Random) -> Posed:
    letters = r.sample(ALPHABET, r.randint(4, 6))
    right = letters[::-1]
    wrong: list[list[str]] = []
    while len(wrong) < 3:
        w = list(right)
        i, j = r.sample(range(len(w)), 2)
        w[i], w[j] = w[j], w[i]
        if w not in wrong:
            wrong.append(w)
    stem = r.choice(("Which is {} in reverse order?", "Read {} backwards.")).format(" ".join(letters))
    return stem, " ".join(right), [" ".join(w) for w in wrong], f"Backwards it is {' '.join(right)}.", letters


def position(r: Random) -> Posed:
    letters = r.sample(ALPHABET, r.randint(5, 7))
    i = r.randrange(len(letters))
    wrong = r.sample([x for x in letters if x != letters[i]], 3)
    count = ", ".join(f"{k + 1} {x}" for k, x in enumerate(letters[: i + 1]))
    return f"Which is letter number {i + 1} of {' '.join(letters)}?", letters[i], wrong, f"{count}.", (letters, i)


def world(r: Random) -> Posed:
    """Facts of a small closed world; each names first what the question asks by."""
    people, pets, colors = r.sample(NAMES, 4), r.sample(PETS, 4), r.sample(COLORS, 4)
    i = r.randrange(4)
    kind = r.choice(("pet", "owner", "house", "two"))
    if kind == "pet":
        facts = [f"{p} has the {x}." for p, x in zip(people, pets, strict=True)]
        line, asks, options = f"{people[i]} has the {pets[i]}.", f"Which animal does {people[i]} have?", pets
    elif kind == "owner":
        facts = [f"The {x} belongs to {p}." for p, x in zip(people, pets, strict=True)]
        line, asks, options = f"The {pets[i]} belongs to {people[i]}.", f"Who owns the {pets[i]}?", people
    elif kind == "house":
        facts = [f"The {c} house belongs to {p}." for p, c in zip(people, colors, strict=True)]
        line = f"The {colors[i]} house belongs to {people[i]}."
        asks, options = f"Who owns the {colors[i]} house?", people
    else:
        facts = [f"{p} lives in the {c} house." for p, c in zip(people, colors, strict=True)]
        facts += [f"The {c} house is home to the {x}." for x, c in zip(pets, colors, strict=True)]
        line = f"{people[i]} lives in the {colors[i]} house. The {colors[i]} house is home to the {pets[i]}."
        asks, options = f"Which animal lives with {people[i]}?", pets
    r.shuffle(facts)
    rest = [o for k, o in enumerate(options) if k != i]
    return f"{' '.join(facts)} {asks}", options[i], rest, line, (kind, sorted(facts), asks)


FAMILIES: tuple[Callable[[Random], Posed], ...] = (
    arithmetic, arithmetic, comparison, ordering, sequence, reversal, position, world, world,
)  # fmt: skip


def draw(r: Random) -> Item:
    return pose(r, r.choice(FAMILIES))


def pose(r: Random, family: Callable[[Random], Posed]) -> Item:
    stem, right, wrong, line, content = family(r)
    options = [right, *wrong]
    r.shuffle(options)
    letter = LETTERS[options.index(right)]
    question = "\n".join([stem, *(f"{x}) {o}" for x, o in zip(LETTERS, options, strict=True))])
    response = f"{line}\nAnswer: {letter}"
    return Item("choice", family.__name__, question, response, letter, f"{family.__name__}{content}", tuple(options))
