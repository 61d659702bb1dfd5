"""What the lane's tests share: each tells what it checked, and the summary lists it."""

import collections

import pytest

_PROPERTY = "checked without a GPU"


@pytest.fixture
def tell(record_property):
    """Return a function that tells what was checked: on which device, of what, how many of what kind."""
    return lambda device, subject, count, kind: record_property(_PROPERTY, (device, subject, count, kind))


def pytest_terminal_summary(terminalreporter):
    found = collections.defaultdict(collections.Counter)
    for report in terminalreporter.stats.get("passed", ()):
        for name, value in report.user_properties:
            if name == _PROPERTY:
                device, subject, count, kind = value
                found[device, subject][kind] += count
    if found:
        terminalreporter.section(_PROPERTY)
        for (device, subject), kinds in sorted(found.items()):
            told = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            terminalreporter.write_line(f"{device:8} {subject:16} {told}")
