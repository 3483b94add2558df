r"""Final answers of GSM8K-style problems: finding them in a response and comparing them as exact numbers.

Four forms of a final answer, from the most to the least explicit:

- `hash`: a line `#### N`, as in the GSM8K data set (Cobbe et al. 2021). `N` may carry currency, sign, unit.
- `boxed`: `\boxed{N}` or `\fbox{N}`, as in the MATH data set (Hendrycks et al. 2021).
- `statement`: "the answer is N", "Answer: N", or a line `A: N`.
- `last_number`: none of these, but the text ends on a number.

*Strict* takes the first two and wants every one of them in the response to agree. *Flexible* takes the last
mark of the first two kinds, else the last statement, else the last number. In both, an answer that offers
several numbers ("#### 5 or 6", two boxes on one line, "the answer is 5 or 6", a text that breaks off in
"16 - 3") has no value, so that it cannot be right by accident.

Text is read once from left to right by patterns whose repetitions are bounded, so the time is linear in its
length whatever the model writes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Literal

from verl.errors import UserError

AnswerForm = Literal["hash", "boxed", "statement", "last_number"]
ANSWER_FORMATS = ("strict", "flexible")
TOLERANCE = Fraction(1, 10**6)
"""Two integers must be equal. Otherwise the difference may be this much, or this share of a gold answer below 1:
enough for a float printed in full (14.666666666666666 for 44/3), too little for a rounded answer (0.333 for 1/3)."""

_MAX_DIGITS = 64  # a longer run of digits is noise, and costly to turn into an integer
_MAX_MARK = 200  # characters of a `####` line, a box or a statement that are read
_TAIL = 2000  # characters at the end in which the last number is sought

_SAME_LENGTH = str.maketrans({"−": "-", "–": "-", "\u00a0": " ", "\u202f": " ", "＝": "=", "，": ",", "：": ":"})
_DIGITS = re.compile(r"(?<![0-9A-Za-z.])\.[0-9][0-9]*|[0-9][0-9,.]*")
_PLAIN_NUMBER = re.compile(r"(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.[0-9]+)?|\.[0-9]+")
_DENOMINATOR = re.compile(r"/([0-9]{1,20})(?![0-9/]|[.,][0-9])")
_CURRENCY = "$€£¥"
# Right after a number, or right before one: what makes it a power, a factor, a multiple, a time, an operand.
_ALTERED = re.compile(
    r"[²³^√π]|[xyzkKMBi](?![A-Za-z])|[eE][-+]?[0-9]|/[A-Za-z](?![A-Za-z])|[/:][0-9]|/\(|\s?\\(?:sqrt|pi|times|cdot|pm|div)(?![A-Za-z])"
)
_LEADS_IN = re.compile(r"(?:√|\\sqrt\{|\\f?box(?:ed)?\{\$?|[0-9]:|(?<![A-Za-z])[A-Za-z]\s?[-+*/]\s?)$")
# Between two numbers: both are offered, or the second is an operand and no result.
_JOINED = re.compile(
    rf"\s*%?\s*(?:[A-Za-z]{{1,20}}\s{{1,3}})?(?:or|and|to|through|plus|minus|times|[-+*/×÷x^,&])\s*[{_CURRENCY}(\-]*\s*",
    re.IGNORECASE,
)
# Before the number of a statement: it is a part of an expression, or it is denied.
_PARTIAL = re.compile(r"[+*^×÷√]|\bor\b|\bnot\b", re.IGNORECASE)
_UNFINISHED = re.compile(r"\s*[-+/×÷=]\s*|\s+\*\s*")

_HASH = re.compile(r"#{4,}([^\n#]*)")
_HASH_NUMBER = re.compile(rf"[\s:=_`~≈({_CURRENCY}+-]{{0,12}}\.?[0-9]")
_HEADING = re.compile(r"\s*[0-9]{1,3}\s?[.):]\s+[A-Za-z]")
_BRACES = re.compile(r"\\[{}]|\\(?:boxed|fbox)\s{0,3}\{|[{}]")
_STATEMENT = re.compile(
    r"\banswers?(?:[ \t]{1,3}[A-Za-z']{1,20}){0,6}?[*_ \t]{0,4}(?::|=|(?<=[ *_])is\b)(?!\s{1,3}not\b)|^[ \t]{0,8}A:",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE_END = re.compile(r"[.!?;。](?=\s|$)|\n")

_FRACTION = re.compile(
    r"\\[dtc]?frac\s{0,3}(?:\{\s{0,3}([0-9]{1,20})\s{0,3}\}|([0-9]))\s{0,3}(?:\{\s{0,3}([0-9]{1,20})\s{0,3}\}|([0-9]))"
)
_WRAPPER = re.compile(r"\\(?:boxed|fbox|text|textbf|mathrm|mathbf|mbox)\s{0,3}\{([^{}]{0,100})\}")
_DROPPED = re.compile(
    r"\\(?:left|right|displaystyle|quad|qquad|degree)(?![A-Za-z])|\\! ?|\\[,;: ()\[\]]|\^\s?\{?\\circ\}?|\{,\}|\*\*|°"
)
_UNIT_POWER = re.compile(r"(?<=[A-Za-z])\s?\^\s?\{?[23]\}?")
_SPACED_THOUSANDS = re.compile(r"([^0-9]*[0-9]{1,3})((?: [0-9]{3})+)((?:\.[0-9]+)?[^0-9]*)")
# An expression rather than a number: a LaTeX command, an operator, a variable beside a sign, an alternative.
_EXPRESSION = re.compile(
    r"\\[A-Za-z]|[\^*+×÷√π±≤≥]|(?:^|\s)[<>]|(?<![A-Za-z])[A-Za-z]\s?-|-\s?[A-Za-z](?![A-Za-z])|\bor\b|\bnot\b", re.IGNORECASE
)


@dataclass(frozen=True)
class Answer:
    """A final answer as found. `value` is None when there is none, or it is not one clear number."""

    value: Fraction | None
    form: AnswerForm | None
    """How it was stated; None when nothing was found."""
    start: int
    """Character at which the answer begins (its length when nothing was found): the reasoning lies before it."""

    @property
    def stated(self) -> bool:
        """A readable answer in a form that says so, not merely a number at the end."""
        return self.value is not None and self.form != "last_number"


@dataclass(frozen=True)
class _Number:
    start: int
    end: int
    value: Fraction | None
    """None: digits, but not a number by themselves (10^6, 5x, x - 5, 1.2.3, 12:30)."""


def extract_answer(text: str, answer_format: str = "flexible") -> Answer:
    """Find the final answer of a response.

    What stands before `</think>` is not part of the answer; a `<think>` that never closes leaves none.

    Args:
        text: the whole response.
        answer_format: `strict` or `flexible`, see the top of this module.

    Raises:
        UserError: unknown `answer_format`.
    """
    if answer_format not in ANSWER_FORMATS:
        raise UserError(f"reward.answer_format is {answer_format!r}; use {' or '.join(ANSWER_FORMATS)}")
    text = text.translate(_SAME_LENGTH)
    begin = text.rfind("</think>") + len("</think>") if "</think>" in text else 0
    nothing = Answer(None, None, len(text))
    if "<think>" in text[begin:]:
        return nothing
    marks = sorted(_marks(text, begin), key=lambda mark: mark.start)
    if answer_format == "strict":
        if not marks:
            return nothing
        values = {mark.value for mark in marks}
        return Answer(values.pop() if len(values) == 1 else None, marks[-1].form, marks[-1].start)
    if marks:
        last = marks[-1]
        line_start = text.rfind("\n", 0, last.start) + 1
        beside = {mark.value for mark in marks if mark.start >= line_start and mark.value is not None}
        return Answer(last.value if len(beside) == 1 else None, last.form, last.start)
    return _statement(text, begin) or _last_number(text, begin) or nothing


def parse_number(text: str) -> Fraction | None:
    """One number with the dress it wears in answers: `$1,234.50`, `-7`, `3/4`, `1 1/2`, `\\frac{3}{4}`, `25%`, `18 eggs.`

    Units and the percent sign are dropped (25% is 25). None when there is no number, more than one, or an
    expression of which a number is only a part (`4\\sqrt{2}`, `x + 5`, `10^6`, `5k`), or a decimal comma (`1,5`).
    """
    if len(text) > _MAX_MARK:
        return None
    text = _plain(text.translate(_SAME_LENGTH)).strip().removeprefix("+")
    numbers = _numbers(text)
    values = {number.value for number in numbers}
    if len(values) != 1:
        return None
    rest, position = [], 0
    for number in numbers:
        rest.append(text[position : number.start])
        position = number.end
    rest.append(text[position:])
    # "0" stands where a number was, so that "5 - x" still shows its sign beside the variable.
    return None if _EXPRESSION.search("0".join(rest)) else values.pop()


def parse_ground_truth(ground_truth: object) -> Fraction:
    """The gold answer as an exact number: a number, a text that is one, or a solution that ends in `#### N`.

    Raises:
        UserError: it is missing, or not one number.
    """
    value: Fraction | None = None
    if isinstance(ground_truth, str):
        found = extract_answer(ground_truth, "strict")
        value = parse_number(ground_truth) if found.form is None else found.value
    elif hasattr(ground_truth, "item") and getattr(ground_truth, "size", 0) == 1:
        return parse_ground_truth(ground_truth.item())  # type: ignore[attr-defined]  # a NumPy scalar, as data frames hold
    elif isinstance(ground_truth, int | Fraction | Decimal) and not isinstance(ground_truth, bool):
        value = Fraction(ground_truth)
    elif isinstance(ground_truth, float) and math.isfinite(ground_truth):
        value = Fraction(repr(ground_truth))  # 0.1 means one tenth, not the binary fraction next to it
    if value is None:
        raise UserError(
            f"the ground truth {str(ground_truth)[-60:]!r} is not a number; reward.type=accuracy grades numbers and texts "
            "that end in '#### N': correct the data or write a reward.function"
        )
    return value


def numbers_equal(answer: Fraction, gold: Fraction) -> bool:
    """Equal, within `TOLERANCE` when one of the two is not an integer."""
    if answer.denominator == gold.denominator == 1:
        return answer == gold
    return abs(answer - gold) <= TOLERANCE * min(Fraction(1), abs(gold))


def _marks(text: str, begin: int) -> Iterator[Answer]:
    """Every `#### N` line and every box. Headings (`#### Step 2`, `#### 1. First`) are no marks."""
    for match in _HASH.finditer(text, begin):
        content = _plain(match.group(1)[: _MAX_MARK + 1])
        if _HASH_NUMBER.match(content) and not _HEADING.match(content):
            yield Answer(parse_number(content), "hash", match.start())
    open_braces: list[re.Match[str]] = []
    for match in _BRACES.finditer(text, begin):
        if match.group().endswith("{") and match.group() != "\\{":
            open_braces.append(match)
        elif match.group() == "}" and open_braces:
            opened = open_braces.pop()
            if len(opened.group()) > 1:
                yield Answer(parse_number(text[opened.end() : match.start()]), "boxed", opened.start())


def _statement(text: str, begin: int) -> Answer | None:
    for match in reversed(list(_STATEMENT.finditer(text, begin))):
        window = text[match.end() : match.end() + _MAX_MARK]
        sentence = _plain(_SENTENCE_END.split(window.lstrip(" \t\r\n*_:"), maxsplit=1)[0])
        numbers = _numbers(sentence)
        if numbers:
            equals = sentence.rfind("=")
            after = [number for number in numbers if number.start > equals]
            return Answer(_stated_value(sentence, after, equals + 1), "statement", match.start())
    return None


def _stated_value(sentence: str, numbers: list[_Number], begin: int) -> Fraction | None:
    """The number a sentence states: the one it opens with, unless another is offered beside it, or else the only one."""
    if not numbers:
        return None
    first = numbers[0]
    before = sentence[begin : first.start]
    if _PARTIAL.search(before):
        return None
    opens = not re.search(r"[A-Za-z]", before)
    if opens and len(numbers) > 1:
        joined = _JOINED.fullmatch(sentence[first.end : numbers[1].start])
        return None if joined else first.value
    values = {number.value for number in numbers}
    return values.pop() if len(values) == 1 else None


def _last_number(text: str, begin: int) -> Answer | None:
    offset = max(begin, len(text) - _TAIL)
    raw = text[offset:]
    tail = _plain(raw)
    numbers = _numbers(tail)
    if not numbers:
        return None
    last = numbers[-1]
    start = max(match.start() for match in _DIGITS.finditer(raw))
    for fraction in _FRACTION.finditer(raw):
        if fraction.start() <= start < fraction.end():
            start = fraction.start()
    clear = not _UNFINISHED.fullmatch(tail[last.end :])
    if len(numbers) > 1:
        clear = clear and not _JOINED.fullmatch(tail[numbers[-2].end : last.start])
    return Answer(last.value if clear else None, "last_number", offset + start)


def _plain(text: str) -> str:
    """Short text without the LaTeX and Markdown that dresses a number."""
    text = text.replace("\\$", "$").replace("\\%", "%")
    text = _UNIT_POWER.sub("", _DROPPED.sub("", text))
    text = _FRACTION.sub(
        lambda m: f" {m[1] or m[2]}/{m[3] or m[4]}" if _after_digit(m) else f"{m[1] or m[2]}/{m[3] or m[4]}", text
    )
    for _ in range(2):  # a box in a text, or a text in a box
        text = _UNIT_POWER.sub("", _WRAPPER.sub(r" \1 ", text))
    spaced = _SPACED_THOUSANDS.fullmatch(text)
    return spaced[1] + spaced[2].replace(" ", "") + spaced[3] if spaced else text


def _after_digit(match: re.Match[str]) -> bool:
    return match.start() > 0 and match.string[match.start() - 1].isdigit()


def _numbers(text: str) -> list[_Number]:
    """Every number of a text, with sign and fraction; digits inside words (H2O, x1) and exponents are none."""
    found: list[_Number] = []
    position = 0
    for match in _DIGITS.finditer(text):
        start = match.start()
        if start < position:
            continue
        raw = match.group().rstrip(".,")
        end = start + len(raw)
        before = text[start - 1] if start else ""
        if before == "_" or (before.isascii() and before.isalpha()):
            continue
        if before == "^" or text[max(0, start - 2) : start] == "^{":
            continue  # its base has been spoilt by the caret already
        value = None
        if len(raw) <= _MAX_DIGITS and _PLAIN_NUMBER.fullmatch(raw):
            value = Fraction(raw.replace(",", ""))
            denominator = _DENOMINATOR.match(text, end) if value.denominator == 1 else None
            if denominator and before != "/":
                value = value / int(denominator[1]) if int(denominator[1]) else None
                end = denominator.end()
                start, value = _join_mixed(text, found, start, value)
        if _ALTERED.match(text, end) or _LEADS_IN.search(text, max(0, start - 8), start):
            value = None
        if value is not None and _is_negative(text, start):
            value = -value
        found.append(_Number(start, end, value))
        position = end
    return found


def _join_mixed(text: str, found: list[_Number], start: int, value: Fraction | None) -> tuple[int, Fraction | None]:
    """`1 1/2`: take the integer before a proper fraction into it. Returns the new start and unsigned value."""
    whole = found[-1] if found else None
    if whole is None or value is None or value >= 1 or whole.value is None or whole.value.denominator != 1:
        return start, value
    if text[whole.end : start] != " " or not text[whole.start : whole.end].isdigit():
        return start, value
    found.pop()
    return whole.start, abs(whole.value) + value


def _is_negative(text: str, start: int) -> bool:
    """A minus before the number, or before its currency, that is not a subtraction, a range or a bullet."""
    at = start - 1
    while at >= 0 and text[at] in _CURRENCY:
        at -= 1
    spaced = at >= 0 and text[at] == " "
    if spaced:
        at -= 1
    if at < 0 or text[at] != "-":
        return False
    left = text[max(0, at - 4) : at].rstrip(" ")
    if spaced:
        return left != "" and left[-1] in "=:("
    return at == 0 or not (text[at - 1].isalnum() or text[at - 1] in ")]}%")
