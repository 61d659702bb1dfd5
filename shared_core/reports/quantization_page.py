"""Show the results of `eff quantize`, as sections of a page and as lines on the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared_core.reports.page import Cell, Plot, Section, Table, bar_plot, line_plot

Values = Mapping[str, Any]
_PLOTTED = 60  # bars; more would not be read
_NAMES = {"float": "float", "quantized": "quantised (PTQ)", "qat": "trained quantised (QAT)"}
_METRICS = {
    "rmse": "root mean square error of the model's outputs",
    "kl": "KL divergence of the predicted distribution, nats",
}


def sections(values: Values) -> list[Section]:
    """Return the sections of the page; what was not measured says which option measures it.

    Args:
        values: What ``eff_quantization.json`` holds.
    """
    return [
        _asked(values),
        Section("Quality", _quality(values)),
        Section("Size", _size(values)),
        Section("Error of the outputs", _outputs(values)),
        Section("Error of the weights", _sqnr(values)),
        *_kv_cache(values.get("kv_cache")),
        Section("Sensitivity", _sensitivity(values)),
        Section("Robustness", _robustness(values)),
        Section("Latency", _latency(values)),
        Section("Notes", _notes(values)),
    ]


def _asked(values: Values) -> Section:
    given = {name: value for name, value in values["asked"].items() if value not in (None, False, [])}
    if "attack" not in given:
        given = {name: value for name, value in given.items() if not name.startswith("attack_")}
    options = {name: value for name, value in values["config"].items() if value not in (None, [], ())}
    return Section(
        "What was asked",
        [
            Table(["option", "value"], [[name.replace("_", "-"), _words(value)] for name, value in given.items()]),
            "Of the quantisation, with defaults:",
            Table(["option of qat", "value"], [[name, _words(value)] for name, value in options.items()]),
        ],
    )


def _quality(values: Values) -> list[str | Table | Plot]:
    before = values["quality"]["float"]
    if before is None:
        return ["Not measured; --eval measures it."]
    rows: list[list[Cell]] = [["float", before, None, None, None]]
    for name, verdict in values["verdicts"].items():
        quality, loss = values["quality"][name], verdict["loss"]
        share = None if loss is None else f"{loss:.3%}"
        rows.append([_NAMES[name], quality, quality - before, share, verdict["judgement"]])
    better = "larger" if values["asked"]["mode"] == "max" else "smaller"
    rules = {verdict["rule"] for verdict in values["verdicts"].values()}
    return [
        Table(["model", "quality", "change", "loss, share of float", "verdict"], rows),
        f"Quality is what {values['asked']['eval']} returned; {better} is better. A loss is {'; '.join(rules)}.",
    ]


def _size(values: Values) -> list[str | Table | Plot]:
    size, layers = values["bytes"], {entry["name"]: entry for entry in values["layers"]}
    rows: list[list[Cell]] = []
    for name, (in_float, codes) in values["layer_bytes"].items():
        entry = layers[name]
        told = [entry[key] for key in ("type", "weights", "weight_bits", "input")]
        rows.append([name, *told, in_float, codes, f"{in_float / codes:.2f}"])
    headings = ["layer", "type", "weights", "bits", "input", "bytes in float", "bytes as codes", "ratio"]
    return [
        f"The whole model takes {size['quantized']:,} bytes with codes and scales, of {size['float']:,} in float: "
        f"{_ratio(values):.2f} times smaller. Biases, norms and layers left in float are counted as they are; a weight "
        "that layers share is counted once here and in each of their rows below.",
        Table(headings, rows),
    ]


def _outputs(values: Values) -> list[str | Table | Plot]:
    whole = values.get("output_sqnr_db")
    if "output_sqnr_db" not in values or not _has_batches(values):
        return ["Not measured; --calibration gives the batches for it."]
    found = {entry["name"]: entry.get("output_sqnr_db") for entry in values["layers"]}
    measured = {name: value for name, value in found.items() if value is not None}
    rows: list[list[Cell]] = [[name, round(measured[name], 2)] for name in sorted(measured, key=measured.__getitem__)]
    unknown = [name for name in found if name not in measured]
    return [
        f"Signal to quantisation noise on the calibration batches, 10·log₁₀(Σy² / Σ(ŷ − y)²): {_decibels(whole)} of "
        "the whole model's output. Of each layer's output below, given the inputs that it has in the float model.",
        _bars(measured, "SQNR (dB)", "Signal to quantisation noise of the outputs, by layer", low=True),
        Table(["layer", "SQNR (dB)"], rows),
        *([f"No noise, or not reached by a batch: {', '.join(unknown)}."] if unknown else []),
    ]


def _has_batches(values: Values) -> bool:
    return bool(values["asked"].get("calibration"))


def _decibels(value: float | None) -> str:
    return "no noise" if value is None or value == math.inf else f"{value:.1f} dB"


def _sqnr(values: Values) -> list[str | Table | Plot]:
    found = {entry["name"]: entry["sqnr_db"] for entry in values["layers"]}
    worst = sorted(values["layers"], key=lambda entry: entry["sqnr_db"])
    return [
        "Signal to quantisation noise of each layer's weights, 10·log₁₀(Σw² / Σ(ŵ − w)²); one bit is worth about 6 dB.",
        _bars(found, "SQNR (dB)", "Signal to quantisation noise of the weights, by layer", low=True),
        Table(
            ["layer", "SQNR (dB)", "largest error / largest weight"],
            [[entry["name"], round(entry["sqnr_db"], 2), entry["largest_relative_error"]] for entry in worst],
        ),
    ]


def _kv_cache(found: Values | None) -> list[Section]:
    if found is None:  # most models have none
        return []
    rows: list[list[Cell]] = [
        [name, *scales.values(), *(round(value, 2) for value in found["sqnr_db"][name].values())]
        for name, scales in found["scales"].items()
    ]
    headings = ["attention layer", "scale of keys", "scale of values", "SQNR of keys (dB)", "SQNR of values (dB)"]
    return [Section("Cache of keys and values", [cache_line(found), Table(headings, rows)])]


def cache_line(found: Values) -> str:
    """Return what a cache in FP8 costs, of the values of a `KvCacheReport`."""
    worst = {part: min(each[part] for each in found["sqnr_db"].values()) for part in ("keys", "values")}
    loss = ""
    if found["loss"] is not None:
        loss = f"; loss of the next token {found['loss']:.4f}, {found['rounded_loss']:.4f} with it"
    return f"cache in FP8: SQNR at least {worst['keys']:.1f} dB of keys, {worst['values']:.1f} dB of values{loss}"


def _sensitivity(values: Values) -> list[str | Table | Plot]:
    found, plan = values["sensitivity"], values["plan"]
    if found is None:
        return ["Not measured; --sensitivity measures each layer, --largest-loss also plans by them."]
    costs = {name: next(iter(entry.values())) for name, entry in found["layers"].items()}
    bits = {name: int(next(iter(entry))) for name, entry in found["layers"].items()}
    what = _METRICS[found["metric"]]
    ranked = sorted(costs, key=lambda name: -costs[name])
    blocks: list[str | Table | Plot] = [
        f"What rounding the weight of one layer alone to nearest costs: {what}.",
        _bars(costs, what, "Cost of each layer quantised alone"),
        Table(["layer", "bits", found["metric"]], [[name, bits[name], costs[name]] for name in ranked]),
    ]
    if plan is None:
        return blocks
    starts = {"quantized": "from all layers quantised, the most sensitive back to float", "float": "from all in float"}
    curves = {starts[name]: points for name, points in plan["curves"].items()}
    lines = {name: [(point["quantized"], point["quality"]) for point in points] for name, points in curves.items()}
    rows: list[list[Cell]] = [
        [name, point["quantized"], point["average_bits"], point["quality"]]
        for name, points in curves.items()
        for point in points
    ]
    codes = sum(width <= 8 for width in plan["bits"].values())
    return [
        *blocks,
        f"The plan quantises {codes} of {len(plan['bits'])} layers, {plan['average_bits']:.2f} bits a weight, with "
        f"{plan['conversions']} changes of format; the largest loss asked for is {values['asked']['largest_loss']}.",
        line_plot(lines, "layers quantised", "quality", "Quality against the number of quantised layers, as searched"),
        Table(["search", "layers quantised", "bits a weight", "quality"], rows),
        Table(
            ["layer", "bits in the plan", "kept by rule"],
            [[name, width, plan["kept"].get(name)] for name, width in plan["bits"].items()],
        ),
    ]


def _robustness(values: Values) -> list[str | Table | Plot]:
    found = values["attacks"]
    if found is None:
        return ["Not measured; --attack measures accuracy under FGSM and PGD where the task is images."]
    rows = found["rows"]
    names = list(dict.fromkeys(row["model"] for row in rows))
    clean = {row["model"]: row["clean"] for row in rows}
    lines = {_NAMES[name]: [(0.0, clean[name]), *_weakest(rows, name)] for name in names}
    bounds = "no bounds" if found["low"] is None else f"bounds {found['low']:g} to {found['high']:g}"
    told: list[list[Cell]] = [
        [
            row["attack"].upper(), row["eps"], _NAMES[row["model"]],
            "the model itself" if row["made_on"] == "itself" else "the float model, transferred",
            row["clean"], row["adversarial"], row["without_gradient"],
        ]
        for row in rows
    ]  # fmt: skip
    return [
        f"Accuracy on {rows[0]['examples']:,} examples, unchanged and with no input element changed by more than eps, "
        f"within {bounds}; PGD takes {found['steps']} steps from a random start. In a quantised model the gradient "
        "passes straight through the rounding and is not the slope of what is computed: attacks made on the float "
        "model are tried as well, and the plot has the lowest accuracy of each strength.",
        line_plot(lines, "eps", "accuracy", "Lowest accuracy under attack, against the strength of the attack"),
        Table(["attack", "eps", "model", "made on", "unchanged", "attacked", "examples without gradient"], told),
    ]


def _weakest(rows: Sequence[Values], name: str) -> list[tuple[float, float]]:
    """Return (eps, accuracy) of a model under the attack that costs it most, for each strength."""
    found: dict[float, float] = {}
    for row in rows:
        if row["model"] == name:
            found[row["eps"]] = min(row["adversarial"], found.get(row["eps"], 1.0))
    return sorted(found.items())


def _latency(values: Values) -> list[str | Table | Plot]:
    found, machine = values["milliseconds"], values["machine"]
    if not found:
        return ["Not measured; --latency times one forward, with the example inputs that MODEL returns."]
    against = [found.get("float32"), found.get("bfloat16")]
    rows: list[list[Cell]] = [
        [name, round(time, 4), *(None if base is None else f"{base / time:.2f}" for base in against)]
        for name, time in found.items()
    ]
    return [
        "CPU time of one forward on one thread, not compiled, the median of rounds that take turns, on "
        f"{machine['cpu']} ({machine['instructions']}), torch {machine['torch']}. A form without kernels for this "
        "model is left out.",
        Table(["form", "milliseconds", "times faster than float32", "times faster than bfloat16"], rows),
    ]


def _notes(values: Values) -> list[str | Table | Plot]:
    rows: list[list[Cell]] = [[name, reason] for name, reason in values["left_out"].items()]
    left: list[str | Table | Plot] = [Table(["left in float", "why"], rows)] if rows else ["No layer was refused."]
    return [f"Calibration batches: {values['batches']}.", *left, *values["notes"]]


def _bars(found: Mapping[str, float], label: str, caption: str, *, low: bool = False) -> Plot:
    if len(found) > _PLOTTED:
        chosen = set(sorted(found, key=lambda name: found[name] if low else -found[name])[:_PLOTTED])
        caption += f": the {_PLOTTED} {'lowest' if low else 'highest'} of {len(found)}"
        found = {name: value for name, value in found.items() if name in chosen}
    return bar_plot(found, label, caption)


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _ratio(values: Values) -> float:
    return float(values["bytes"]["float"] / values["bytes"]["quantized"])


def tell(out: Path, values: Values) -> None:
    """Print what was found: a table of layers, and lines for the rest."""
    from rich.table import Table as Grid

    from shared_core.reports.console import Console

    grid = Grid(title=f"quantised with {values['config']['scheme']}: {out}", title_justify="left")
    for heading in ("layer", "weights", "bits", "input", "SQNR of weights", "of outputs"):
        grid.add_column(heading, justify="left" if heading in ("layer", "input") else "right", overflow="fold")
    for entry in values["layers"]:
        output = entry.get("output_sqnr_db")
        grid.add_row(
            entry["name"], f"{entry['weights']:,}", str(entry["weight_bits"]), entry["input"],
            f"{entry['sqnr_db']:.1f}", "-" if output is None else f"{output:.1f}",
        )  # fmt: skip
    console = Console()
    console.print(grid)
    if _has_batches(values):
        console.print(f"SQNR of the model's output: {_decibels(values['output_sqnr_db'])} on the calibration batches")
    else:
        console.print("SQNR of outputs: not measured, as there are no batches; --calibration gives some", markup=False)
    if values.get("kv_cache") is not None:
        console.print(cache_line(values["kv_cache"]), markup=False)
    for name, reason in values["left_out"].items():
        console.print(f"left in float: {name}: {reason}", markup=False)
    for note in values["notes"]:
        console.print(f"note: {note}", markup=False)
    size = values["bytes"]
    console.print(
        f"size as codes: {size['quantized']:,} of {size['float']:,} bytes, {_ratio(values):.2f} times smaller"
    )
    if values["milliseconds"]:
        told = ", ".join(f"{name} {found:.2f} ms" for name, found in values["milliseconds"].items())
        console.print(f"one forward, one thread: {told}")
    if values["plan"] is not None:
        plan = values["plan"]
        codes = sum(width <= 8 for width in plan["bits"].values())
        console.print(f"plan: {codes} of {len(plan['bits'])} layers, {plan['average_bits']:.2f} bits a weight")
    if values["attacks"] is not None:
        clean = {row["model"]: row["clean"] for row in values["attacks"]["rows"]}
        for name, before in clean.items():
            for eps, after in _weakest(values["attacks"]["rows"], name):
                console.print(f"accuracy under attacks of {eps:.4g}: {name} {before:.4f} → {after:.4f}")
    quality = values["quality"]
    for name, verdict in values["verdicts"].items():
        loss = "" if verdict["loss"] is None else f": a loss of {verdict['loss']:.3%}"
        console.print(
            f"quality: {quality['float']:.4f} in float, {quality[name]:.4f} "
            f"{'quantised' if name == 'quantized' else 'trained quantised'}{loss}, {verdict['judgement']}"
        )
