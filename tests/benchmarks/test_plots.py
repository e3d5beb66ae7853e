"""Plots are whole SVG documents, and results of parts that were not measured stay."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

import benchmarks.__main__ as bench
from benchmarks.plots import draw

SVG = "{http://www.w3.org/2000/svg}"


def test_a_plot_has_each_line_within_its_frame() -> None:
    lines = {"ours": [(0.0, 1.0), (40.0, 93.0)], "<theirs>": [(0.0, 0.0), (40.0, 12.5)], "none": []}
    image = ElementTree.fromstring(draw("Bytes & more", "conversations", lines))
    _, _, width, height = map(float, image.attrib["viewBox"].split())
    drawn = [line.attrib["points"].split() for line in image.iter(f"{SVG}polyline")]
    assert [len(points) for points in drawn] == [2, 2, 0]
    for x, y in (map(float, point.split(",")) for points in drawn for point in points):
        assert 0 <= x <= width and 0 <= y <= height
    assert {"ours", "<theirs>", "Bytes & more"} <= {text.text for text in image.iter(f"{SVG}text")}


def test_results_of_other_parts_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results.md"
    results.write_text("# Before\n\n<!-- part: large -->\n## Large\n\n1 s\n\n<!-- part: files -->\n## Files\n\n2 s\n")
    monkeypatch.setattr(bench, "RESULTS", results)
    bench._write("# Measured on 2026-01-02\n", {"files": "## Files\n\n3 s\n", "peers": "## Peers\n\n4 s\n"})
    text = results.read_text()
    assert "1 s" in text and "3 s" in text and "4 s" in text and "2 s" not in text
    assert text.index("## Peers") < text.index("## Large") < text.index("## Files")
    assert text.count("Measured on 2026-01-02, by `python -m benchmarks files`. The machine's load at its end: ") == 1
