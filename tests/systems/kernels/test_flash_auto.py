"""Test of which implementation `auto` chooses on a Hopper GPU, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_auto_chooses_what_the_documentation_says(capsys):
    pytest.importorskip("triton")
    from scripts import attention_choice

    attention_choice.main()
    page = Path(__file__).parents[3] / "docs" / "attention.md"
    assert capsys.readouterr().out in page.read_text()
