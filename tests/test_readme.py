"""The README's Python blocks run, in order, in one namespace."""

import pathlib
import re

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_code_blocks_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert blocks
    space: dict = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), space)
    printed = capsys.readouterr().out
    assert "gap True" in printed
    assert "(64, 2)" in printed
