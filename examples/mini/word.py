"""Word problems of one to three steps, solved in GSM8K's form: one equation a line, then `#### n`."""

from __future__ import annotations

from random import Random

from item import Item

SHE = ("Anna", "Bella", "Clara", "Dina", "Emma", "Fiona", "Grace", "Hana", "Ivy", "Julia", "Kate", "Lena", "Maya",
       "Nora", "Olga", "Paula", "Rosa", "Sara", "Tina", "Zoe")  # fmt: skip
HE = ("Adam", "Ben", "Carl", "David", "Eric", "Frank", "George", "Henry", "Ivan", "Jack", "Kevin", "Leo", "Mark",
      "Noah", "Oscar", "Paul", "Ray", "Sam", "Tom", "Victor")  # fmt: skip
NAMES = SHE + HE
ITEMS = ("apples", "pears", "marbles", "books", "pencils", "stickers", "coins", "shells", "cards", "cookies", "eggs",
         "stamps", "buttons", "toys", "flowers", "oranges", "candies", "beads", "stones", "balloons")  # fmt: skip
BOXES = ("boxes", "bags", "baskets", "jars", "crates", "trays")
GOODS = ("notebooks", "lamps", "shirts", "tickets", "mugs", "hats", "cakes", "plants", "chairs", "toys")

Solved = tuple[str, list[str], int, tuple]  # question, equation lines, answer, the numbers


def they(name: str) -> str:
    return "She" if name in SHE else "He"


def chain(r: Random) -> Solved:
    """A person's count goes through one to three events: gain, lose, multiply, share."""
    name, friend = r.sample(NAMES, 2)
    item, n, he = r.choice(ITEMS), r.randint(4, 99), they(name)
    story = [r.choice((f"{name} has {n} {item}.", f"{name} starts with {n} {item}.", f"{name} owns {n} {item}."))]
    lines, content = [], [n]
    for _ in range(r.choice((1, 2, 2, 3, 3))):
        shares = [k for k in range(2, 10) if n % k == 0 and n // k > 1]
        kinds = ["gain", "gain", "lose", "lose"] + ["times"] * (n <= 110) + ["share"] * bool(shares)
        kind = r.choice(kinds) if n > 2 else "gain"
        if kind == "gain":
            b = r.randint(2, 99)
            story.append(
                r.choice(
                    (
                        f"{he} buys {b} more.",
                        f"{he} finds {b} more {item}.",
                        f"{friend} gives {name} {b} more.",
                        f"Then {he.lower()} gets {b} new {item}.",
                    )
                )
            )
            lines.append(f"{n} + {b} = {n + b} {item}.")
            n += b
        elif kind == "lose":
            b = r.randint(1, min(n - 1, 99))
            story.append(
                r.choice(
                    (
                        f"{he} gives {b} to {friend}.",
                        f"{he} loses {b} of them.",
                        f"{he} sells {b} {item}.",
                        f"Then {friend} takes {b} away.",
                    )
                )
            )
            lines.append(f"{n} - {b} = {n - b} {item}.")
            n -= b
        elif kind == "times":
            b = r.randint(2, 9)
            story.append(
                r.choice(
                    (
                        f"Then the number of {item} grows to {b} times as many.",
                        f"After a week {he.lower()} has {b} times as many.",
                        f"{he} works until there are {b} times as many.",
                    )
                )
            )
            lines.append(f"{n} * {b} = {n * b} {item}.")
            n *= b
        else:
            b = r.choice(shares)
            story.append(
                r.choice(
                    (
                        f"{he} shares them equally among {b} people and keeps one share.",
                        f"{he} splits all of them into {b} equal piles and keeps one pile.",
                    )
                )
            )
            lines.append(f"{n} / {b} = {n // b} {item}.")
            n //= b
        content += [kind, b]
    ask = r.choice((f"How many {item} does {name} have now?", f"How many {item} does {name} have in the end?"))
    return " ".join([*story, ask]), lines, n, tuple(content)


def boxes(r: Random) -> Solved:
    name, item, box = r.choice(NAMES), r.choice(ITEMS), r.choice(BOXES)
    k, m = r.randint(2, 9), r.randint(3, 99)
    total = k * m
    c = r.randint(1, min(total - 1, 150))
    lines = [f"{k} * {m} = {total} {item}."]
    if r.random() < 0.5:
        q = r.choice(
            (
                f"There are {k} {box} with {m} {item} each. {c} of the {item} are broken. How many are good?",
                f"{name} fills {k} {box} with {m} {item} each and then sells {c}. How many {item} are left?",
            )
        )
        return q, [*lines, f"{total} - {c} = {total - c} {item}."], total - c, (k, m, "-", c)
    q = r.choice(
        (
            f"There are {k} {box} with {m} {item} each and {c} loose {item}. How many {item} are there in all?",
            f"{name} packs {m} {item} into each of {k} {box}. {c} more lie on the table. How many in total?",
        )
    )
    return q, [*lines, f"{total} + {c} = {total + c} {item}."], total + c, (k, m, "+", c)


def compare(r: Random) -> Solved:
    a, b = r.sample(NAMES, 2)
    item, n = r.choice(ITEMS), r.randint(6, 99)
    kind = r.choice(("more", "fewer", "times"))
    if kind == "more":
        d = r.randint(2, 60)
        m, says, line = n + d, f"{b} has {d} more than {a}.", f"{n} + {d} = {n + d} {item}."
    elif kind == "fewer":
        d = r.randint(2, n - 2)
        m, says, line = n - d, f"{b} has {d} fewer than {a}.", f"{n} - {d} = {n - d} {item}."
    else:
        d = r.randint(2, 8)
        m, says, line = n * d, f"{b} has {d} times as many as {a}.", f"{n} * {d} = {n * d} {item}."
    has = r.choice((f"{a} has {n} {item}.", f"{a} collected {n} {item}."))
    if r.random() < 0.3:
        return f"{has} {says} How many {item} does {b} have?", [f"{b}: {line}"], m, (kind, n, d, 1)
    ask = r.choice(("How many do they have together?", f"How many {item} do {a} and {b} have in all?"))
    return f"{has} {says} {ask}", [f"{b}: {line}", f"{n} + {m} = {n + m} {item}."], n + m, (kind, n, d, 2)


def shopping(r: Random) -> Solved:
    name = r.choice(NAMES)
    (x, y), he = r.sample(GOODS, 2), they(name)
    a, p, b, q = r.randint(2, 9), r.randint(2, 40), r.randint(2, 9), r.randint(2, 40)
    cost = a * p + b * q
    lines = [
        f"{x}: {a} * {p} = {a * p} dollars.",
        f"{y}: {b} * {q} = {b * q} dollars.",
        f"{a * p} + {b * q} = {cost} dollars.",
    ]
    buys = r.choice(
        (
            f"{name} buys {a} {x} at ${p} each and {b} {y} at ${q} each.",
            f"{x.capitalize()} cost ${p} and {y} cost ${q}. {name} takes {a} {x} and {b} {y}.",
        )
    )
    return f"{buys} How much does {he.lower()} pay in dollars?", lines, cost, (a, p, b, q)


def change(r: Random) -> Solved:
    name, x = r.choice(NAMES), r.choice(GOODS)
    a, p = r.randint(2, 9), r.randint(2, 60)
    money = a * p + r.randint(1, 120)
    left, he = money - a * p, they(name)
    q = r.choice(
        (
            f"{name} has ${money}. {he} buys {a} {x} for ${p} each. How many dollars are left?",
            f"{a} {x} cost ${p} each. {name} pays with ${money}. How many dollars does {he.lower()} get back?",
        )
    )
    return q, [f"{a} * {p} = {a * p} dollars.", f"{money} - {a * p} = {left} dollars."], left, (a, p, money)


def wages(r: Random) -> Solved:
    name = r.choice(NAMES)
    h, d, p = r.randint(2, 9), r.randint(2, 7), r.randint(5, 9)
    lines = [f"{h} * {d} = {h * d} hours.", f"{h * d} * {p} = {h * d * p} dollars."]
    q = r.choice(
        (
            f"{name} works {h} hours a day for {d} days and earns ${p} an hour. How many dollars in all?",
            f"For {d} days {name} works {h} hours each day at ${p} an hour. How much money is that in dollars?",
        )
    )
    return q, lines, h * d * p, (h, d, p)


def saving(r: Random) -> Solved:
    name = r.choice(NAMES)
    s, w, he = r.randint(3, 60), r.randint(2, 9), they(name)
    had = r.randint(5, 99)
    spent = r.randint(2, s * w + had - 1)
    total = had + s * w
    lines = [f"{s} * {w} = {s * w} dollars.", f"{had} + {s * w} = {total} dollars."]
    tells = f"{name} has ${had} and saves ${s} every week for {w} weeks."
    if r.random() < 0.4:
        return f"{tells} How many dollars does {he.lower()} have then?", lines, total, (s, w, had)
    lines.append(f"{total} - {spent} = {total - spent} dollars.")
    return (f"{tells} Then {he.lower()} spends ${spent}. How many dollars are left?", lines, total - spent,
            (s, w, had, spent))  # fmt: skip


def travel(r: Random) -> Solved:
    v, t, x = r.randint(3, 90), r.randint(2, 9), r.randint(2, 99)
    who = r.choice(("A train", "A bus", "A car", "A boat", "A truck", "A cyclist"))
    q = r.choice((f"{who} goes {v} miles an hour for {t} hours and then {x} miles more. How many miles in total?",
                  f"{who} moves {v} miles each hour. After {t} hours it has {x} miles to go. How long is the whole "
                  f"trip in miles?"))  # fmt: skip
    return q, [f"{v} * {t} = {v * t} miles.", f"{v * t} + {x} = {v * t + x} miles."], v * t + x, (v, t, x)


def groups(r: Random) -> Solved:
    k, each = r.randint(2, 9), r.randint(2, 60)
    total = k * each
    girls = r.randint(1, total - 1)
    boys = total - girls
    where = r.choice(("A school", "A camp", "A club", "A class"))
    q = r.choice(
        (
            f"{where} has {girls} girls and {boys} boys. They form {k} equal teams. How many are in each team?",
            f"{girls} girls and {boys} boys ride in {k} buses, the same number in each. How many in one bus?",
        )
    )
    return q, [f"{girls} + {boys} = {total} children.", f"{total} / {k} = {each} children."], each, (k, girls, boys)


def pages(r: Random) -> Solved:
    name, d, n = r.choice(NAMES), r.randint(2, 9), r.randint(3, 60)
    left, he = r.randint(2, 150), they(name)
    total = n * d + left
    q = r.choice((f"A book has {total} pages. {name} reads {n} pages a day for {d} days. How many pages are left?",
                  f"{name} reads {n} pages each day. After {d} days, how many of the {total} pages has {he.lower()} "
                  f"not read?"))  # fmt: skip
    return q, [f"{n} * {d} = {n * d} pages.", f"{total} - {n * d} = {left} pages."], left, (total, n, d)


def age(r: Random) -> Solved:
    a, b, c = r.sample(NAMES, 3)
    n, d, e = r.randint(8, 60), r.randint(2, 30), r.randint(1, 7)
    m = n + d
    if r.random() < 0.5:
        return (
            f"{a} is {n} years old. {b} is {d} years older. {c} is {e} years younger than {b}. How old is {c}?",
            [f"{b}: {n} + {d} = {m} years.", f"{c}: {m} - {e} = {m - e} years."],
            m - e,
            ("y", n, d, e),
        )
    return (f"{a} is {n} years old and {b} is {d} years older. How old will {b} be in {e} years?",
            [f"{b}: {n} + {d} = {m} years.", f"{m} + {e} = {m + e} years."], m + e, ("f", n, d, e))  # fmt: skip


def baker(r: Random) -> Solved:
    name, k, m = r.choice(NAMES), r.randint(2, 9), r.randint(4, 60)
    total = k * m
    sold = r.randint(1, total - 2)
    left, he = total - sold, they(name)
    p = r.randint(2, 9)
    lines = [f"{k} * {m} = {total} cakes.", f"{total} - {sold} = {left} cakes."]
    if left > 110:
        return (f"{name} bakes {k} trays of {m} cakes. {he} sells {sold}. How many cakes are left?", lines, left,
                (k, m, sold))  # fmt: skip
    return (f"{name} bakes {k} trays of {m} cakes. {sold} are eaten and the rest are sold for ${p} each. How many "
            f"dollars does {he.lower()} get?", [*lines, f"{left} * {p} = {left * p} dollars."], left * p,
            (k, m, sold, p))  # fmt: skip


TEMPLATES = (chain, chain, chain, chain, boxes, compare, shopping, change, wages, saving, travel, groups, pages, age,
             baker)  # fmt: skip


def draw(r: Random) -> Item:
    template = r.choice(TEMPLATES)
    question, lines, n, numbers = template(r)
    solution = "\n".join([*lines, f"#### {n}"])
    return Item("word", template.__name__, question, solution, solution, f"{template.__name__}{numbers}")
