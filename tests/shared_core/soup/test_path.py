"""The path of a search, as a table, as JSON and as a plot."""

import json
import math

from soup_runs import runs

from shared_core.soup import greedy_soup, path_json, path_plot, path_table


def test_path_as_table_json_and_plot(tmp_path):
    from rich.console import Console

    result = greedy_soup(runs(4), lambda weights: math.nan if weights["a"][0, 0] > 1e9 else 0.25)
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(path_table(result))
    assert "soup of 4 of 4: 0.25" in console.export_text()
    assert json.loads(path_json(result))["history"] == result.history
    plot = path_plot(result, tmp_path / "path.png")
    assert plot.read_bytes()[:4] == b"\x89PNG"
