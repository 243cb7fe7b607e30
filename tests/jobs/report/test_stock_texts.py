"""The texts of all studies can be rendered, from the reference results and without any record."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from jobs.report.results import list_results
from jobs.report.texts.templates import StudyTexts
from jobs.report.views import tables_of
from jobs.results.run_states import observe
from jobs.sweep.load import load_sweep
from tests.jobs.harness import ROOT

TEMPLATES = sorted((ROOT / "jobs" / "report" / "texts").glob("*.md.j2"))
assert TEMPLATES


def render(template: Path, results_folder: Path) -> dict[str, str]:
    """Render all texts of a study, by table. A warning fails the test."""
    name = template.name.removesuffix(".md.j2")
    views = tables_of(load_sweep(ROOT / "sweeps" / f"{name}.yaml").sweep)
    texts = StudyTexts(template, [view.name for view in views])
    observation = observe(results_folder)
    results = list_results(observation)
    rendered = texts.render_all(observation, views, results)
    used = {name: one.use(pytest.fail) for name, one in rendered.items()}
    return {name: text for name, text in used.items() if text}


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_reference_results_have_every_number_of_the_texts(template: Path) -> None:
    name = template.name.removesuffix(".md.j2")
    texts = render(template, ROOT / "logs" / "h200" / name)
    assert len(texts) == template.read_text().count("{% block ")
    page = (ROOT / "docs" / "results" / f"{name}.md").read_text()
    for text in texts.values():
        assert "not measured" not in text
        assert text in page  # `make report` wrote it from these records


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_without_records_every_number_is_not_measured(template: Path, tmp_path: Path) -> None:
    name = template.name.removesuffix(".md.j2")
    reference = ROOT / "logs" / "h200" / name
    shutil.copytree(reference / "submissions", tmp_path / name / "submissions")
    with_records = render(template, reference)
    without = render(template, tmp_path / name)
    for table, text in with_records.items():
        if "value(" in block_of(template, table):
            # A block may also be empty without its runs.
            assert "not measured" in without.get(table, "not measured").lower()
        else:
            assert without[table] == text


def block_of(template: Path, table: str) -> str:
    return template.read_text().split(f"{{% block {table} %}}")[1].split("{% endblock %}")[0]
