"""What was used leads to the papers behind it."""

import pathlib
import re

import diffrax
import pytest

import meanflow as mf

ALWAYS = {"meanflow", "jax"}


@pytest.mark.parametrize(
    "used, keys",
    [
        ((), set()),
        ((mf.vanilla(),), {"mei2018"}),
        ((mf.batchnorm(), mf.solve), {"mei2018", "ma2021", "kidger2021"}),
        ((mf.batchnorm_manifold(),), {"mei2018", "ma2021"}),
        ((mf.lifted(), "sliding"), {"williams2019", "filippov1988"}),
        ((mf.kernels.batchnorm_ntk,), {"jacot2018", "cai2024"}),
        ((mf.layers.Unitize,), {"huang2020"}),
        ((mf.depth, mf.descend), {"nachum2024", "optax"}),
        ((diffrax.Tsit5(),), {"kidger2021"}),
    ],
)
def test_what_was_used_is_cited(used, keys):
    cited = set(re.findall(r"^@\w+\{(\w+),", mf.citation(*used), re.MULTILINE))
    assert cited - ALWAYS - ({"mei2018"} - keys) == keys and cited >= ALWAYS


def test_the_five_papers_are_those_of_the_citation_file():
    listed = (pathlib.Path(__file__).parent.parent / "CITATION.cff").read_text()
    everything = mf.citation(
        mf.batchnorm(), mf.lifted(), mf.kernels.batchnorm_ntk, mf.depth, mf.layers.Unitize
    )
    titles = re.findall(r"^    title: (.*)$", listed, re.MULTILINE)
    assert len(titles) == 5 and not [title for title in titles if title not in everything]
