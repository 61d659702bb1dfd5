"""Pages of results keep the sections that are not measured again, and the notes below each."""

import measure


def test_a_section_is_replaced_and_the_others_and_notes_stay(tmp_path):
    page = tmp_path / "results" / "page.md"
    order = ["a", "b", "c"]
    measure.write_sections(page, "# Page\n\nHead.", {"c": "old c", "a": "old a"}, order)
    page.write_text(page.read_text().replace("old a\n", "old a\n\n### Notes\n\nBy hand.\n"))
    measure.write_sections(page, "# Page\n\nNew head.", {"a": "new a", "b": "b\n\n| x |\n|---|"}, order)
    assert page.read_text() == (
        "# Page\n\nNew head.\n\n## a\n\nnew a\n\n### Notes\n\nBy hand.\n\n## b\n\nb\n\n| x |\n|---|\n\n## c\n\nold c\n"
    )


def test_every_section_of_the_committed_pages_says_where_and_when():
    for name in ("cpu", "papers", "evidence"):
        page = (measure.RESULTS / f"{name}.md").read_text(encoding="utf-8")
        sections = page.split("\n## ")[1:]
        assert sections
        for section in sections:
            caption = section.split("\n")[2]
            assert caption[:4].isdigit(), caption
            assert "one thread" in caption, caption
