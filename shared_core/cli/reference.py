"""`eff flags`, `formats`, `compat` and `doctor`: what exists, and what this machine supports."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared_core.cli.arguments import describe_flags, print_report
from shared_core.errors import nearest, require
from shared_core.front_ends.finding import front_ends
from shared_core.printing import echo, table, width_of_output

if TYPE_CHECKING:
    from rich.table import Table

    from shared_core.config.options import TechniqueConfig


def flags_markdown(keys: Collection[str] = ()) -> str:
    """Return the flags of these techniques, by default of all, as Markdown: a sentence and a table for each."""
    from shared_core.engine.registry import REGISTRY

    sections = []
    for key, one in REGISTRY.items():
        if keys and key not in keys:
            continue
        rows = [_flag_row(row) for row in describe_flags(key)]
        table = ["| flag | values and default | effect |", "|---|---|---|", *rows]
        text = f"{_meaning(one.config_class)} Callback: `{one.technique_name}`."
        sections += ["\n".join([f"## {key}", "", text, "", *table])]
    return "\n\n".join(sections) + "\n"


def _meaning(config: type[TechniqueConfig]) -> str:
    return " ".join((config.__doc__ or "").partition("\n\n")[0].split())


def _flag_row(row: dict[str, str]) -> str:
    default = row["default"] if row["default"] in ("", "required") else f"default {row['default']}"
    values = row["type"].replace(" | ", ", ") + (f"; {default}" if default else "")
    effect = row["help"].replace("|", "\\|")
    return f"| `{row['flag']}` | {values} | {effect} |"


def flags(
    techniques: Annotated[
        list[str] | None, typer.Argument(help="Keys of techniques, such as prune. Default: all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown tables, as in docs/flags.md.")
    ] = False,
) -> None:
    """List the techniques and their flags.

    Name techniques to see all their flags, with default and meaning.
    """
    from shared_core.engine.registry import registration

    keys = [registration(key).key for key in techniques or ()]
    rows = [row for row in describe_flags() if not keys or row["flag"].startswith(tuple(f"--{key}_" for key in keys))]
    if as_markdown:
        echo(flags_markdown(keys), nl=False)
        return
    if keys or as_json:
        headings = ("flag", "type", "default", "meaning")
        made = table("", headings, headings, [[*row.values()] for row in rows])
        made.columns[0].no_wrap = True
        print_report(rows, [made], as_json=as_json)
    else:
        print_report(rows, _techniques(), as_json=False)


def _techniques() -> list[str | Table]:
    """Return a row per technique, with the flag that switches it on."""
    from shared_core.engine.registry import REGISTRY

    rows = []
    for key, one in REGISTRY.items():
        config = one.config_class
        rows.append((f"--{key}_{config.switch}", config.about or _meaning(config)))
    made = table("", ("flag", "what it does"), ("flag", "what it does"), rows)
    made.columns[0].no_wrap = True
    return [made, "eff flags prune lists the options of prune."]


Cell = str | int | float | None


def format_rows() -> list[dict[str, Cell]]:
    """Return one row per format with its figures."""
    from shared_core.numerics import FORMATS

    return [row.row() for row in FORMATS.values()]


def formats_markdown() -> str:
    """Return the table of number formats, without the figures that follow from the others, as Markdown."""
    rows = format_rows()
    columns = [column for column in rows[0] if column not in ("bias", "smallest subnormal", "decades", "NaN/Inf share")]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(_text(column, row[column]) for column in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _text(column: str, cell: Cell) -> str:
    if cell is None:
        return ""
    if column in ("relative error", "NaN/Inf share"):
        return f"{100 * float(cell):.3g} %"
    if column == "decades":
        return f"{cell:.1f}"
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)


def formats(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every digit, instead of a table.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/formats.md.")] = False,
) -> None:
    """Show every number format: bits, range and error."""
    if as_markdown:
        echo(formats_markdown(), nl=False)
        return
    found = format_rows()
    left_out = _DETAILS if width_of_output() < _WIDE else ()
    columns = [column for column in found[0] if column not in left_out]
    shown: list[str | Table] = [
        table("", ("format",), columns, [[_text(column, row[column]) for column in columns] for row in found])
    ]
    if left_out:
        shown.append(f"Not shown in a narrow terminal: {', '.join(left_out)}. --json prints them.")
    print_report(found, shown, as_json=as_json)


_WIDE = 116
_DETAILS = ("exponent bits", "mantissa bits", "bias", "smallest subnormal")


def compat(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Techniques or run environments: one to list all its refusals, several to list their pairs."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show which techniques combine, with each other and with DDP, FSDP and others.

    Name one or several to see the reasons.
    """
    from shared_core.engine.checks.compatibility import matrix
    from shared_core.reports.page import Console

    rows = matrix()
    if as_json:
        echo(json.dumps(rows, indent=2))
    elif names:
        for line in _reasons(rows, names):
            echo(line)
    else:
        for table in _tables(rows):
            Console().print(table)
        echo("why: eff compat prune, or eff compat prune fsdp1")


def _tables(rows: list[dict[str, str]]) -> list[Any]:
    """Return a table of technique pairs, and the techniques that each run environment refuses."""
    from rich import box
    from rich.table import Table

    from shared_core.config.environments import RUN_ENVIRONMENTS

    keys = [row["technique"] for row in rows]
    marks = {"yes": "·", "-": ""}
    among = Table(box=None, title="techniques: x = refused together", title_justify="left", padding=(0, 1, 0, 0))
    among.add_column("", no_wrap=True)
    for number in range(1, len(keys) + 1):
        among.add_column(str(number), justify="right", no_wrap=True)
    for number, row in enumerate(rows, 1):
        among.add_row(f"{number} {row['technique']}", *(marks.get(row[key], "x") for key in keys))
    around = Table(box=box.SIMPLE, title="run environments", title_justify="left", pad_edge=False)
    for heading in ("name", "what it is", "refused by"):
        around.add_column(heading, overflow="fold", no_wrap=heading == "name")
    for name, what in RUN_ENVIRONMENTS.items():
        by = [row["technique"] for row in rows if row[name] != "yes"]
        around.add_row(name, what, "all" if len(by) == len(rows) else ", ".join(by) or "none")
    return [among, around]


def _reasons(rows: list[dict[str, str]], names: list[str]) -> list[str]:
    """Return a line for each refusal of one name, or for each pair of several."""
    known = [*rows[0]][1:]
    for name in names:
        rule = f"{name} is not a technique or a run environment{nearest(name, known)}"
        require(name in known, "eff compat", rule)
    pairs = [(row["technique"], other, row[other]) for row in rows for other in known if row[other] != "-"]
    if len(names) == 1:
        found = [pair for pair in pairs if names[0] in pair[:2] and pair[2] != "yes"]
    else:
        found = [pair for pair in pairs if {*pair[:2]} <= {*names}]
    lines = {frozenset(pair[:2]): f"{pair[0]} + {pair[1]}: {pair[2]}" for pair in reversed(found)}
    return [*reversed(lines.values())] or [f"{' + '.join(names)}: nothing is refused"]


def pairs_markdown() -> str:
    """Return two tables in Markdown: pairs that need an option, and pairs that are refused with what to do instead."""
    from shared_core.engine.checks.compatibility import matrix

    rows = matrix()
    allowed: dict[frozenset[str], str] = {}
    refused: dict[frozenset[str], str] = {}
    for row in rows:
        for other in (other["technique"] for other in rows):
            pair = frozenset((row["technique"], other))
            if row[other] not in ("yes", "-") and pair not in {**allowed, **refused}:
                instead = row[other].partition("; ")[2]
                rest = instead.removeprefix("pass ")
                table = refused if rest == instead else allowed
                table[pair] = f"| `{row['technique']}` + `{other}` | {rest} |"
    tables = {"works with": allowed, "instead": refused}
    return "\n".join(
        "\n".join([f"| together | {title} |", "|---|---|", *lines.values()]) + "\n" for title, lines in tables.items()
    )


def figures_markdown() -> str:
    """Return the figures that techniques log while training, as a table of docs/reports.md."""
    from shared_core.engine.registry import REGISTRY

    configs = {key: one.config_class for key, one in REGISTRY.items()}
    rows = ["| figure | meaning | progress bar |", "|---|---|---|"]
    for key, config in configs.items():
        for name, figure in config.figures.items():
            only = f" ({figure.only})" if figure.only else ""
            rows.append(f"| `{key}/{name}` | {figure.text}{only} | {'yes' if figure.in_bar else ''} |")
    silent: dict[str, list[str]] = {}
    for key, config in configs.items():
        if config.logs_nothing:
            silent.setdefault(config.logs_nothing, []).append(f"`{key}`")
    rows += [f"| {', '.join(keys)} | nothing ({reason}); see the receipt | |" for reason, keys in silent.items()]
    return "\n".join(rows) + "\n"


def distributed_markdown() -> str:
    """Return the table of distributed strategies, with the techniques that each refuses, as Markdown."""
    from shared_core.engine.checks.compatibility import matrix

    strategies = {
        "DDP": (), "FSDP2": ("fsdp2",), "tensor parallelism": ("tensor_parallel",),
        "DeepSpeed ZeRO 0–2": ("deepspeed",), "DeepSpeed ZeRO 3": ("deepspeed", "zero3"),
        "FSDP1": ("fsdp1",), "DataParallel": ("data_parallel",),
    }  # fmt: skip
    lines, table = ["| strategy | techniques that are refused |", "|---|---|"], matrix()
    for strategy, ways in strategies.items():
        rows = [(f"`{row['technique']}`", all(row[way] == "yes" for way in ways)) for row in table]
        works, refused = [name for name, fits in rows if fits], [name for name, fits in rows if not fits]
        text = f"all but {' and '.join(works)}" if works else "all"
        lines.append(f"| {strategy} | {text if len(works) < 3 else ', '.join(refused) or 'none'} |")
    return "\n".join(lines) + "\n"


_UNUSABLE = ("out of range", "known bad")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show devices, formats and libraries, and how each technique runs here.

    The exit code is 1 if the version of a library is not supported.
    """
    from shared_core.hardware import default_device
    from shared_core.libraries import libraries
    from shared_core.tools.machine import abilities, devices, formats, tools

    found = libraries()
    device = default_device()
    report = {
        "python": sys.version.split()[0],
        "devices": devices(),
        "trains_on": device.type,
        "formats": formats(device),
        "tools": tools(),
        "libraries": [
            {**dataclasses.asdict(library), "state": library.state, "install": library.install} for library in found
        ],
        "trainers": [front_end.name for front_end in front_ends()],
        "techniques": {key: dataclasses.asdict(ability) for key, ability in abilities(device).items()},
        "usable": not any(library.state in _UNUSABLE for library in found),
    }
    print_report(report, _lines(report), as_json=as_json, failed=not report["usable"])


def _lines(report: dict[str, Any]) -> Iterator[str | Table]:
    rows = []
    for device in report["devices"]:
        if device["device"] == "cpu":
            about = f"{device['cores']} cores, torch uses {device['threads']}; {', '.join(device['instructions'])}"
        else:
            about = f"compute capability {device['capability']}, {device['memory'] / 2**30:.1f} GiB"
        rows.append((device["device"], device["name"], about))
    yield _table(f"devices (Python {report['python']}; trains on {report['trains_on']})", rows)
    yield _table(f"formats on {report['trains_on']}", list(report["formats"].items()))
    yield _table("tools", [*report["tools"].items(), ("trainers", ", ".join(report["trainers"]) or "none")])
    libraries = [
        (
            each["name"],
            each["found"] or "none",
            each["wanted"],
            f"{each['state']}: {each['install']}".removesuffix(": "),
        )
        for each in report["libraries"]
    ]
    yield _table("libraries", libraries)
    abilities = [(key, each["level"], each["why"]) for key, each in report["techniques"].items()]
    yield _table(f"techniques on {report['trains_on']}", abilities)
    if not report["trainers"]:
        yield 'no trainer: pip install "efftrain[hf]" or pip install "efftrain[lightning]"'
    for each in report["libraries"]:
        if each["state"] in _UNUSABLE:
            yield f"{each['name']} {each['found']} is {each['state']} ({each['wanted']}): {each['install']}"


def _table(title: str, rows: Sequence[Sequence[str]]) -> Table:
    columns = [str(number) for number in range(len(rows[0]))]
    made = table(title, columns, columns, rows)
    made.show_header, made.columns[0].no_wrap = False, True
    return made
