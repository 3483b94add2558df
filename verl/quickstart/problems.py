"""Generated arithmetic word problems with worked solutions: the quick start's data set, and a fixture for tests.

A problem has one or two steps over small whole numbers; its solution writes each step as an equation and
ends in `#### N`, the convention of GSM8K (Cobbe et al. 2021).
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo", "Ida", "Jon", "Kim", "Leo", "Mia", "Ned", "Ola", "Pia")
THINGS = ("apples", "books", "coins", "eggs", "flags", "marbles", "pens", "shells", "stamps", "toys")
GAINS = ("finds {b} more", "buys {b} more", "gets {b} as a gift", "wins {b} more")
LOSSES = ("loses {b}", "gives away {b}", "sells {b}", "breaks {b}")
LARGEST = 9


@dataclass(frozen=True, kw_only=True)
class WordProblem:
    question: str
    answer: str
    """Worked solution, one equation a line, then `#### N`."""
    steps: int


def generate_problem(rng: random.Random, *, slip_rate: float = 0.0) -> WordProblem:
    """One problem of one or two steps over numbers up to LARGEST.

    `slip_rate`: how often a step of the worked solution adds where the story takes away; the rest of the
    solution follows from the slip, as a careless pupil's would.
    """
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    have = rng.randint(1, LARGEST)
    text = [f"{name} has {have} {thing}."]
    lines = []
    steps = rng.choice((1, 2))
    for _ in range(steps):
        gains = have < 2 or (have <= LARGEST and rng.random() < 0.5)
        amount = rng.randint(1, LARGEST if gains else min(have, LARGEST))
        change = rng.choice(GAINS if gains else LOSSES).format(b=amount)
        text.append(f"{name} {change}.")
        adds = gains or rng.random() < slip_rate
        now = have + amount if adds else have - amount
        lines.append(f"{have} {'+' if adds else '-'} {amount} = {now}")
        have = now
    text.append(f"How many {thing} does {name} have?")
    return WordProblem(question=" ".join(text), answer="\n".join([*lines, f"#### {have}"]), steps=steps)


def generate_problems(count: int, seed: int, *, slip_rate: float = 0.0) -> list[WordProblem]:
    """`count` problems with distinct questions."""
    rng = random.Random(seed)
    problems: dict[str, WordProblem] = {}
    while len(problems) < count:
        problem = generate_problem(rng, slip_rate=slip_rate)
        problems.setdefault(problem.question, problem)
    return list(problems.values())


def write_jsonl(problems: list[WordProblem], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ({"question": p.question, "answer": p.answer, "data_source": "quickstart", "steps": p.steps} for p in problems)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
