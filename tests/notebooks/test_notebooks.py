"""Every notebook runs from top to bottom in a fresh kernel, and shows what it promises."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

jupytext = pytest.importorskip("jupytext", reason="notebooks need the dev extra (jupytext)")
nbclient = pytest.importorskip("nbclient", reason="notebooks need the dev extra (nbclient)")
pytest.importorskip("ipykernel", reason="notebooks need the dev extra (ipykernel)")

REPO = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((REPO / "notebooks").glob("*.py"))


@cache
def executed(path: Path) -> Any:
    """The notebook with its outputs; run in the repository, in the venv of the tests."""
    notebook = jupytext.read(path)
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(REPO)}}
    )
    return client.execute()


def outputs(path: Path, mime: str) -> list[str]:
    cells = [cell for cell in executed(path).cells if cell.cell_type == "code"]
    return [out["data"][mime] for cell in cells for out in cell.outputs if mime in out.get("data", {})]


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] != []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch):
    monkeypatch.delenv("DISPARK_NOTEBOOK_RUNS", raising=False)
    monkeypatch.delenv("MPLBACKEND", raising=False)
    cells = [cell for cell in executed(path).cells if cell.cell_type == "code"]
    assert cells, "a notebook has code"
    assert all(cell.execution_count is not None for cell in cells)
    errors = [out for cell in cells for out in cell.outputs if out.output_type == "error"]
    assert errors == []


def test_first_look_shows_tables_and_a_figure(monkeypatch):
    monkeypatch.delenv("DISPARK_NOTEBOOK_RUNS", raising=False)
    monkeypatch.delenv("MPLBACKEND", raising=False)
    path = REPO / "notebooks" / "first_look.py"
    tables = outputs(path, "text/plain")
    assert any("matl" in table and "ngram" in table and "speedup" in table for table in tables)
    assert any("acceptance_at" in table and "conditional_acceptance_at" in table for table in tables)
    assert any("verify" in table and "none" in table and "host" in table for table in tables)
    assert len(outputs(path, "image/png")) == 1
