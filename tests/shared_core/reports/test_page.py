"""Pages: the same words in HTML and Markdown, nothing of a user's text as markup, plots inside, whole or not at all."""

import base64
import math
import re
from xml.etree import ElementTree

import matplotlib
import pytest
from reports import Outline

from shared_core.errors import CheckpointError, ConfigError
from shared_core.reports.page import (
    Plot,
    Section,
    Table,
    bar_plot,
    build_page,
    check_place,
    line_plot,
    show,
    write_page,
)

HOSTILE = '<script>alert("x & y")</script>|`a`*b*_c_[d](e)~'


def test_a_users_text_is_text():
    blocks = [HOSTILE, Table([HOSTILE, "n"], [[HOSTILE, 1]]), Plot(HOSTILE, b"<svg/>")]
    page, text = build_page(HOSTILE, [Section(HOSTILE, blocks)])
    outline = Outline(page)
    assert "script" not in outline.tags
    assert outline.text.count(HOSTILE) == 7  # title, both headings, paragraph, two cells, caption
    assert ("alt", HOSTILE) in outline.attributes
    # with every escape taken away, nothing of what Markdown reads as markup is left
    bare = re.sub(r"\\[\\`*_\[\]<>|~]", "", text)
    assert not re.search(r"[<`\[]|\*[^P\n]*b", bare)
    row = next(line for line in text.splitlines() if line.startswith("|") and line.endswith("| 1 |"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 3


@pytest.mark.parametrize("text", ["# no heading", "- no list", "1. no list", "+ none", "12) none"])
def test_no_paragraph_becomes_a_list_or_heading(text):
    written = build_page("t", [Section("s", [text])])[1].splitlines()[-1]
    assert "\\" in written
    assert written.replace("\\", "") == text


def test_names_and_numbers_stay_readable():
    text = build_page("t", [Section("s", [Table(["a", "b"], [["layer_1.attn", "0.25"]])])])[1]
    assert "| layer_1.attn | 0.25 |" in text


def test_numbers_and_gaps():
    rows = [["a", 1234567, 0.123456789, None], ["b", None, math.inf, None], ["", 0, -math.inf, None]]
    page, text = build_page("t", [Section("s", [Table(["name", "n", "x", "y"], rows)])])
    assert text.endswith(
        "| name | n | x | y |\n|---|---:|---:|---|\n"
        "| a | 1,234,567 | 0.123457 | – |\n| b | – | ∞ | – |\n| – | 0 | −∞ | – |\n"
    )
    assert page.count('<td class="n">') == 6
    empty, _ = build_page("t", [Section("s", [Table(["name", "n"], [])])])
    assert "<th>n</th>" in empty


def plots():
    return [
        bar_plot({"a_$x$": 3.0, "<b>": math.inf, "c": -1.5}, "dB", "bars"),
        line_plot({"one": [(0, 1.0), (2, 0.5)], "two": [(1, 0.7)]}, "layers", "quality", "lines"),
        bar_plot({}, "dB", "none"),
    ]


def test_plots_are_inside_and_the_same_every_time():
    first = plots()
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 20, "svg.hashsalt": "other"}):
        again = plots()
        assert matplotlib.rcParams["font.size"] == 20
    assert [plot.svg for plot in first] == [plot.svg for plot in again]
    page, text = build_page("t", [Section("s", first)])
    images = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert [base64.b64decode(image) for image in images] == [plot.svg for plot in first]
    for plot in first:
        assert ElementTree.fromstring(plot.svg).tag.endswith("svg")
        assert b"<dc:date>" not in plot.svg
    assert "http" not in re.sub(r'src="[^"]*"', "", page).replace("http-equiv", "")  # nothing is loaded
    assert "*Plot: bars*" in text


def test_the_axis_of_a_count_has_whole_numbers():
    svg = plots()[1].svg.decode()
    ticks = re.findall(r'<g id="xtick_\d+">.*?<!-- ([^ ]+) -->', svg, flags=re.S)
    assert ticks == ["0", "1", "2"]


def test_a_page_and_its_twin_are_written_whole_or_not(tmp_path, monkeypatch):
    write_page(tmp_path / "a.html", "first", [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.md"]
    with pytest.raises(CheckpointError, match="cannot write to"):
        write_page(tmp_path / "none" / "a.html", "second", [])
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(CheckpointError, match="nothing was replaced"):
        write_page(tmp_path / "a.html", "second", [])
    assert "first" in (tmp_path / "a.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.md"]


def test_places_for_pages(tmp_path):
    check_place(tmp_path / "a.html", "here")
    check_place(tmp_path / "new" / "a.html", "here", made=tmp_path / "new")
    for path in (tmp_path / "a.txt", tmp_path / "a", tmp_path / "new" / "a.html"):
        with pytest.raises(ConfigError, match=r"^here must be an .html file"):
            check_place(path, "here")
    (tmp_path / "b.md").mkdir()
    with pytest.raises(CheckpointError, match="here must be a file"):
        check_place(tmp_path / "b.html", "here")


def test_a_long_table_says_how_many_rows_are_left_out():
    page, text = build_page("t", [Section("s", [Table(["n", "x"], [[i, "a"] for i in range(1200)])])])
    assert text.endswith("| 998 | a |\n| … and 201 more | – |\n")
    assert '<td class="n">… and 201 more</td>' in page


def test_a_terminal_shows_the_same_words(capsys):
    show(["a [b] \x1b[2J", Table(["layer", "bytes"], [["0\x07", 1280], ["1", None]]), Plot("drawn", b"<svg/>")])
    shown = capsys.readouterr().out
    for words in ("a [b] \\u001b[2J\n", "0\\u0007", "1,280", "–"):
        assert words in shown
    assert "drawn" not in shown
