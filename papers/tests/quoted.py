"""Quotes of the papers, compared with their texts: the letters, digits and relations must be the printed ones.

The texts are not part of the project. The folder named by $MEANFLOW_PAPER_TEXTS holds them, one file a paper whose name
begins with its number (``004....txt``), in Markdown with formulas in TeX. Tests skip where it is not set.
"""

import functools
import os
import re
import unicodedata
from pathlib import Path

import pytest

SIGNS = {"leq": "<=", "le": "<=", "geq": ">=", "ge": ">=", "ll": "<<", "gg": ">>", "neq": "!=", "pm": "+-"}
SIGNS |= {
    "infty": "inf",
    "to": "->",
    "rightarrow": "->",
    "times": "x",
    "top": "T",
    "coloneqq": ":=",
    "prime": "'",
}
# commands of TeX for the looks of something
LOOKS = (
    "left|right|big|Big|bigg|math[a-z]+|boldsymbol|bm|text|textbf|t?frac|q?quad|operatorname|limits|begin|end|aligned|"
    "bmatrix|cases|tag|therefore|because|langle|rangle|cdot|mid"
)


def letters(text: str) -> str:
    """Return what a text says: its letters and digits in lower case, relations, plus, minus and primes."""
    text = re.sub(r"\[((?:[^\[\]]|\\\[)*?)\]\(#page[^)]*\)", r"\1", text)  # links of the text
    text = re.sub(r"<[^<>]*?/?su[pb]>|</?b>", "", text)
    text = re.sub(rf"\\(?:{LOOKS})(?![A-Za-z])", "", text)
    text = re.sub(r"\\([A-Za-z]+)", lambda m: SIGNS.get(m[1], m[1]), text)
    text = re.sub("[α-ωΑ-Ω]", lambda m: unicodedata.name(m[0]).split()[-1].replace("LAMDA", "LAMBDA"), text)
    text = text.replace("’", "'").replace("–", "-")
    return re.sub(r"[^a-z0-9<>=+'-]", "", text.lower())


@functools.cache
def printed(paper: str) -> str:
    """Return ``letters`` of a paper's text; the test that asks for it is skipped where there is none."""
    folder = os.environ.get("MEANFLOW_PAPER_TEXTS")
    found = sorted(Path(folder).glob(f"{paper}*.txt")) if folder else []
    if not found:
        pytest.skip("$MEANFLOW_PAPER_TEXTS names no folder with the papers' texts")
    return letters(found[0].read_text())


def is_printed(paper: str, quote: str) -> bool:
    """Whether a quote is in the paper's text, its parts between dots (...) in this order."""
    place = 0
    for part in quote.split("..."):
        place = printed(paper).find(letters(part), place)
        if place < 0:
            return False
    return True
