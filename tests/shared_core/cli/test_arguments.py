"""Commands made of the dataclasses of their options: one declaration for flag, help, value and rule."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import pytest
import typer
from typer.testing import CliRunner

from shared_core.cli.arguments import CommandOptions, takes
from shared_core.cli.trainings import LotteryOptions
from shared_core.config.options import Options, option
from shared_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Baking(Options):
    key: ClassVar[str] = "bake"
    needs: ClassVar = {"glaze": ("minutes",)}

    minutes: int | None = option(None, "How long.", low=1)
    glaze: bool = option(False, "Shine.")


@dataclass(frozen=True, kw_only=True)
class BakeOptions(Baking, CommandOptions):
    key: ClassVar[str] = "eff bake"
    without: ClassVar = {"raw": ("minutes",)}

    dough: Path = option(help="What goes in.", argument=True)
    kind: Literal["bread", "cake"] = option("bread", "What comes out.", flag="--of")
    seeds: tuple[str, ...] = option((), "On top; repeat it.")
    rise: bool = option(True, "Wait first.")
    raw: bool = option(False, "Do not bake.")
    crust: float = option(0.5, "How thick.", only_with={"kind": ("bread",)})


@pytest.fixture
def bake():
    app, seen = typer.Typer(), []
    app.command()(takes(BakeOptions)(seen.append))

    def invoke(*arguments):
        CliRunner().invoke(app, list(arguments), catch_exceptions=False)
        return seen.pop()

    return invoke


def test_flags_give_the_dataclass_and_what_is_left_out_its_defaults(bake):
    assert bake("dough") == BakeOptions(dough=Path("dough"))
    given = bake("dough", "--of", "cake", "--seeds", "poppy,", "--seeds", "sesame", "--no-rise", "--minutes", "9")
    assert given == BakeOptions(dough="dough", kind="cake", seeds=("poppy,", "sesame"), rise=False, minutes=9)
    assert given.asked() == {
        "minutes": 9, "glaze": False, "dough": "dough", "of": "cake", "seeds": ("poppy,", "sesame"), "rise": False,
        "raw": False, "crust": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(("arguments", "told"), [
    (["--of", "cak"], ["--of ", "bread, cake", "'cak'", "'cake'?"]),
    (["--minutes", "0"], ["--minutes ", "[1, inf)", "got 0"]),
    (["--crust", "nan"], ["--crust ", "got nan"]),
    (["--glaze"], ["--glaze ", "--minutes"]),
    (["--raw", "--minutes", "9"], ["--raw ", "--minutes"]),
    (["--crust", "1", "--of", "cake"], ["--crust ", "--of bread", "got --of cake"]),
])  # fmt: skip
def test_rules_are_told_in_the_words_of_the_command_line(bake, arguments, told):
    with pytest.raises(ConfigError) as error:
        bake("dough", *arguments)
    words = str(error.value)
    assert words.startswith(f"eff bake: {told[0]}")
    assert all(part in words for part in told)


def test_the_same_rules_are_told_to_python_in_its_words():
    with pytest.raises(ConfigError, match=r"^bake.minutes: minutes must be in \[1, inf\), got 0$"):
        Baking(minutes=0)
    with pytest.raises(ConfigError, match=r"^bake: glaze .*minutes; add what is missing$"):
        Baking(glaze=True)


def test_an_argument_of_a_training_may_be_empty():
    app, seen = typer.Typer(), []
    app.command()(takes(LotteryOptions)(seen.append))
    CliRunner().invoke(app, ["--out", "o", "--", "python", "train.py", "--name", ""], catch_exceptions=False)
    assert seen.pop().command == ("python", "train.py", "--name", "")
