"""Make the README as an index shows it, where links into the repository lead nowhere: pyproject.toml cannot say it."""

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
IMAGE, LINK = r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", r"\[([^\]]*)\](?:\((?!https?:)[^)]*\)|\[[^\]]*\])"
TARGET = r"^\[[^\]]*\]: (?!https?:).*\n"  # of the links that are written [text][name]

setup(
    long_description=re.sub(LINK, r"\1", re.sub(TARGET, "", re.sub(IMAGE, "", README), flags=re.MULTILINE)),
    long_description_content_type="text/markdown",
)
