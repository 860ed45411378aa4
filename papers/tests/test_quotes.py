"""What entries and errata quote is printed in the papers, word by word; the marking of quotes is read strictly."""

import pytest
from quoted import is_printed, letters

from meanflow_papers.catalogue import CATALOGUE


def test_letters_of_tex_and_of_plain_text_are_the_same():
    assert letters(r"if  $c_i^2 \ll a_i^2$  for *all* $i$ (i.e., $\delta_i \ll 0$)") == letters(
        "if c_i^2 << a_i^2 for all i (i.e., delta_i << 0)"
    )
    assert letters(r"$\frac{\pi}{2} - \sqrt{2} \le \lim_{t \to \infty}$") == letters(
        "pi/2 - sqrt(2) <= lim_{t -> inf}"
    )
    assert letters("see figure [2:](#page-2-1) a NN") == letters("see figure 2: a NN")
    # a sign, a relation, a number or a word that differs is seen
    for other in ("a - b <= 2", "a + b >= 2", "a + b <= 3", "a + c <= 2", "a + b < 2"):
        assert letters(other) != letters("a + b <= 2")


def test_only_entries_without_a_quote_have_no_claim():
    odd = [name for name, item in CATALOGUE.items() if bool(item.claims) == (item.verdict == "no claim")]
    assert odd == []
    assert all(place and words for item in CATALOGUE.values() for place, words in item.claims)


@pytest.mark.parametrize("paper", sorted({item.paper for item in CATALOGUE.values()}))
def test_claims_of_entries_are_quotes(paper):
    quotes = [words for item in CATALOGUE.values() if item.paper == paper for _, words in item.claims]
    assert quotes and [words for words in quotes if not is_printed(paper, words)] == []
