"""The table of versions is the committed results."""

import json

import resolved_versions


def test_the_page_has_every_library_and_each_resolves():
    results = dict(json.loads(line) for line in resolved_versions.FILE.read_text().splitlines())
    assert set(results) == set(resolved_versions.LIBRARIES), "run `make versions`"
    assert not [name for name, found in results.items() if "error" in found["together"]]
    assert resolved_versions.page_text(results) in resolved_versions.PAGE.read_text(encoding="utf-8")


def test_what_resolves_otherwise_or_not_is_told():
    rows = {
        "trl": {"alone": {"trl": "2.0"}, "together": {"trl": "1.0", "torch": "2.13.0+cpu"}},
        "peft": {"alone": {"peft": "1.0"}, "together": {"error": "no versions"}},
        "ray": {"alone": {"error": "none"}, "together": {"error": "none"}},
    }
    text = resolved_versions.page_text({name: row | {"date": "", "python": ""} for name, row in rows.items()})
    assert "| trl 1.0 | `hf` | 2.13.0 |" in text
    for line in ("- trl alone is 2.0.", "- peft does not install beside efftrain: no", "- ray does not install even"):
        assert line in text
