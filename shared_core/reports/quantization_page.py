"""Show the results of `eff quantize`, as sections of a page and as lines on the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared_core.printing import by_reason, counted, most_telling, size_text
from shared_core.reports.page import Block, Columns, Section, Table, bar_plot, line_plot, show, table_of

Values = Mapping[str, Any]
_NAMES = {"float": "float", "quantized": "after training (PTQ)", "qat": "in training (QAT)"}
_METRICS = {
    "rmse": "root mean square error of the model's outputs",
    "kl": "KL divergence of the predicted distribution, nats",
    "hessian": "mean curvature of the loss, tr(H)/n, times the squared error of the weights",
}


def sections(values: Values) -> list[Section]:
    """Return the sections of the page. Missing measurements name the option that adds them."""
    cache = values.get("kv_cache")  # most models have none
    return [
        Section("What was asked", _asked(values)),
        Section("Quality", _quality(values)),
        Section("Size", _size(values)),
        Section("Error of the outputs", _outputs(values)),
        Section("Error of the weights", _weights(values)),
        *([Section("Cache of keys and values", _kv_cache(cache))] if cache else []),
        Section("Sensitivity", [*_sensitivity(values), *_plan(values)]),
        Section("Robustness", _robustness(values)),
        Section("Latency", _latency(values)),
        Section("Notes", _notes(values)),
    ]


def _asked(values: Values) -> list[Block]:
    given = {name: value for name, value in values["asked"].items() if value not in (None, False, [])}
    if "attack" not in given:
        given = {name: value for name, value in given.items() if not name.startswith("attack_")}
    options = [option for option in values["config"].items() if option[1] not in (None, [], ())]
    return [
        Table(["option", "value"], [[name.replace("_", "-"), value] for name, value in given.items()]),
        "Options of the quantization, with defaults:",
        Table(["option of qat", "value"], options),
    ]


def _quality(values: Values) -> list[Block]:
    before = values["quality"]["float"]
    if before is None:
        return ["Not measured; --eval measures it."]
    rows: list[list[Any]] = [["float", before, None, None, None]]
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


def _size(values: Values) -> list[Block]:
    size, layers = values["bytes"], {entry["name"]: entry for entry in values["layers"]}
    rows = [
        [name, *(layers[name][key] for key in ("type", "weights", "weight_bits", "input")), in_float, codes,
         f"{in_float / codes:.2f}"]
        for name, (in_float, codes) in values["layer_bytes"].items()
    ]  # fmt: skip
    return [
        f"The whole model takes {size['quantized']:,} bytes with codes and scales, of {size['float']:,} in float: "
        f"{_ratio(values):.2f} times smaller. Biases, norms and layers left in float are counted as they are; a weight "
        "that layers share is counted once here and in each of their rows below.",
        Table(["layer", "type", "weights", "bits", "input", "bytes in float", "bytes as codes", "ratio"], rows),
    ]


def _ratio(values: Values) -> float:
    return float(values["bytes"]["float"] / values["bytes"]["quantized"])


def _outputs(values: Values) -> list[Block]:
    if "output_sqnr_db" not in values or not values["asked"].get("calibration"):
        return ["Not measured; --calibration gives the batches for it."]
    found = {entry["name"]: entry.get("output_sqnr_db") for entry in values["layers"]}
    measured = {name: value for name, value in found.items() if value is not None}
    unknown = [name for name in found if name not in measured]
    return [
        f"Signal to quantization noise on the calibration batches, 10·log₁₀(Σy² / Σ(ŷ − y)²): {_decibels(values)} for "
        "the whole model's output. Below, for each layer's output, given its inputs in the float model.",
        bar_plot(measured, "SQNR (dB)", "Signal to quantization noise of the outputs, by layer", lowest=True),
        Table(
            ["layer", "SQNR (dB)"],
            [[name, round(measured[name], 2)] for name in sorted(measured, key=measured.__getitem__)],
        ),
        *([f"No noise, or not reached by a batch: {', '.join(unknown)}."] if unknown else []),
    ]


def _decibels(values: Values) -> str:
    value = values["output_sqnr_db"]
    return "no noise" if value is None or value == math.inf else f"{value:.1f} dB"


def _weights(values: Values) -> list[Block]:
    found = {entry["name"]: entry["sqnr_db"] for entry in values["layers"]}
    columns: Columns = {
        "layer": "name", "SQNR (dB)": lambda entry: round(entry["sqnr_db"], 2),
        "largest error / largest weight": "largest_relative_error",
    }  # fmt: skip
    return [
        *cast_lines(values["layers"]),
        "Signal to quantization noise of each layer's weights, 10·log₁₀(Σw² / Σ(ŵ − w)²); one bit is worth about 6 dB.",
        bar_plot(found, "SQNR (dB)", "Signal to quantization noise of the weights, by layer", lowest=True),
        table_of(sorted(values["layers"], key=lambda entry: float(entry["sqnr_db"])), columns),
    ]


def _kv_cache(found: Values) -> list[Block]:
    rows = [
        [name, *scales.values(), *(round(value, 2) for value in found["sqnr_db"][name].values())]
        for name, scales in found["scales"].items()
    ]
    headings = ["attention layer", "scale of keys", "scale of values", "SQNR of keys (dB)", "SQNR of values (dB)"]
    return [cache_line(found), Table(headings, rows)]


def cache_line(found: Values) -> str:
    """Return the cost of an FP8 cache, from the values of a `KvCacheReport`."""
    worst = {part: min(each[part] for each in found["sqnr_db"].values()) for part in ("keys", "values")}
    loss = ""
    if found["loss"] is not None:
        loss = f" The loss of the next token is {found['loss']:.4f}, and {found['rounded_loss']:.4f} with the cache."
    ratios = f"{worst['keys']:.1f} dB or more for keys and {worst['values']:.1f} dB or more for values"
    return f"Cache in FP8: a signal-to-noise ratio of {ratios}.{loss}"


def _sensitivity(values: Values) -> list[Block]:
    found = values["sensitivity"]
    if found is None:
        return ["Not measured; --sensitivity measures each layer, --largest-loss also plans by them."]
    what = _METRICS[found["metric"]]
    costs = {name: next(iter(entry.values())) for name, entry in found["layers"].items()}
    errors, traces = found.get("errors") or {}, found.get("traces") or {}
    rows = [
        [name, int(bits), cost, *([errors[name][bits]] if errors else [])]
        for name in sorted(costs, key=lambda name: -costs[name])
        for bits, cost in found["layers"][name].items()
    ]
    estimates = [
        [name, one["trace"] / one["weights"], one["standard_error"] / one["weights"]] for name, one in traces.items()
    ]
    return [
        f"Cost of rounding the weight of one layer alone to nearest: {what}.",
        *_probes(traces),
        bar_plot(costs, what, "Cost of each layer quantized alone"),
        Table(["layer", "bits", found["metric"], *(["standard error"] if errors else [])], rows),
        *([Table(["layer", "tr(H)/n", "standard error"], estimates)] if traces else []),
    ]


def _probes(traces: Values) -> Iterator[str]:
    """Yield how the curvature was estimated, and how many estimates are noise."""
    if traces:
        count = next(iter(traces.values()))["probes"]
        yield f"Curvature by Hutchinson's estimate with {counted(count, 'probe')}; ± is its standard error."
        if noise := [name for name, one in traces.items() if one["trace"] < 2 * one["standard_error"]]:
            text = f"{len(noise)} of {counted(len(traces), 'layer')}"
            yield f"Estimates below two standard errors: {text}. Raise --probes to rank them."


def _ranking(found: Values) -> Iterator[str]:
    """Yield the most sensitive layers, with the error of the estimate."""
    costs = {name: next(iter(entry.values())) for name, entry in found["layers"].items()}
    errors = {name: next(iter(entry.values())) for name, entry in (found.get("errors") or {}).items()}
    lines = [
        f"{name} {costs[name]:.3g}" + (f" ± {errors[name]:.1g}" if errors else "")
        for name in sorted(costs, key=lambda name: -costs[name])[:5]
    ]
    yield f"Most sensitive by {found['metric']}: {', '.join(lines)}."
    yield from _probes(found.get("traces") or {})


def _plan(values: Values) -> list[Block]:
    plan = values["plan"]
    if plan is None:
        return []
    starts = {"quantized": "from all layers quantized, the most sensitive back to float", "float": "from all in float"}
    curves = {starts[name]: points for name, points in plan["curves"].items()}
    lines = {name: [(point["quantized"], point["quality"]) for point in points] for name, points in curves.items()}
    steps = [{"search": name, **point} for name, points in curves.items() for point in points]
    searched = {"search": "search", "layers quantized": "quantized", "bits a weight": "average_bits"}
    searches: list[Block] = [
        f"The largest loss asked for is {values['asked']['largest_loss']}.",
        line_plot(lines, "layers quantized", "quality", "Quality against the number of quantized layers, as searched"),
        table_of(steps, {**searched, "quality": "quality"}),
    ]
    return [
        f"The plan quantizes {_planned(plan)}. It changes the format {counted(plan['conversions'], 'time')}.",
        *(searches if curves else []),
        Table(
            ["layer", "bits in the plan", "kept by rule"],
            [[name, width, plan["kept"].get(name)] for name, width in plan["bits"].items()],
        ),
    ]


def _planned(plan: Values) -> str:
    codes = sum(width <= 8 for width in plan["bits"].values())
    return f"{codes} of {counted(len(plan['bits']), 'layer')}, with {plan['average_bits']:.2f} bits a weight on average"


def _robustness(values: Values) -> list[Block]:
    found = values["attacks"]
    if found is None:
        return ["Not measured; --attack measures accuracy under FGSM and PGD for image models."]
    rows = found["rows"]
    clean = {row["model"]: row["clean"] for row in rows}
    lines = {_NAMES[name]: [(0.0, before), *_weakest(rows, name)] for name, before in clean.items()}
    bounds = "no bounds" if found["low"] is None else f"bounds {found['low']:g} to {found['high']:g}"
    columns: Columns = {
        "attack": lambda row: row["attack"].upper(), "eps": "eps", "model": lambda row: _NAMES[row["model"]],
        "made on": lambda row: "the model itself" if row["made_on"] == "itself" else "the float model, transferred",
        "unchanged": "clean", "attacked": "adversarial", "examples without gradient": "without_gradient",
    }  # fmt: skip
    return [
        f"Accuracy on {rows[0]['examples']:,} examples, unchanged and with no input element changed by more than eps, "
        f"within {bounds}; PGD takes {found['steps']} steps from a random start. In a quantized model the gradient "
        "passes straight through the rounding and is not its true slope. So attacks made on the float "
        "model are tried too, and the plot shows the lowest accuracy at each strength.",
        line_plot(lines, "eps", "accuracy", "Lowest accuracy under attack, against the strength of the attack"),
        table_of(rows, columns),
    ]


def _weakest(rows: Sequence[Values], name: str) -> list[tuple[float, float]]:
    """Return (eps, accuracy) of a model under the attack that costs it most, for each strength."""
    found: dict[float, float] = {}
    for row in rows:
        if row["model"] == name:
            found[row["eps"]] = min(row["adversarial"], found.get(row["eps"], 1.0))
    return sorted(found.items())


def _latency(values: Values) -> list[Block]:
    found, machine = values["milliseconds"], values["machine"]
    if not found:
        return ["Not measured; --latency times one forward, with the example inputs that MODEL returns."]
    against = [found.get("float32"), found.get("bfloat16")]
    rows = [
        [name, round(time, 4), *(None if base is None else f"{base / time:.2f}" for base in against)]
        for name, time in found.items()
    ]
    return [
        "CPU time of one forward pass on one thread, not compiled, median of alternating rounds, on "
        f"{machine['cpu']} ({machine['instructions']}), torch {machine['torch']}. A form without kernels for this "
        "model is left out.",
        Table(["form", "milliseconds", "times faster than float32", "times faster than bfloat16"], rows),
    ]


def _notes(values: Values) -> list[Block]:
    left = Table(["left in float", "why"], list(values["left_out"].items()))
    return [
        f"Calibration batches: {values['batches']}.", left if left.rows else "No layer was left out.", *values["notes"]
    ]  # fmt: skip


def print_study(out: Path, values: Values, *, every_layer: bool = False) -> None:
    """Print the results: size and quality, the layers with the most noise, and the layers left out."""
    columns: Columns = {
        "layer": "name", "weights": "weights", "bits": "weight_bits", "input": "input",
        "weights, dB": lambda entry: round(entry["sqnr_db"], 1),
        "outputs, dB": lambda entry: None if (found := entry.get("output_sqnr_db")) is None else round(found, 1),
    }  # fmt: skip
    title, layers = most_telling(values["layers"], lambda entry: -float(entry["sqnr_db"]), "layer", every_layer)
    size = values["bytes"]
    show([
        f"Quantized {counted(len(values['layers']), 'layer')} with {values['formats']}.",
        *cast_lines(values["layers"]),
        f"Size with codes: {size_text(size['quantized'])} instead of {size_text(size['float'])}, "
        f"{_ratio(values):.2f} times smaller.",
        *_quality_lines(values),
        f"Signal-to-noise ratio after rounding, {title}:",
        table_of(layers, columns),
        *_lines(values),
        f"Wrote {out}.",
    ])  # fmt: skip


def cast_lines(layers: Sequence[Values]) -> list[str]:
    """Return a line about values beyond the range of a float format and values that became 0, if layers count them."""
    cast = [entry for entry in layers if "weights_flushed" in entry]
    if not cast:
        return []
    total = sum(entry["weights"] for entry in cast)
    shares = {}
    for kind in ("clipped", "flushed"):
        worst = max(cast, key=lambda entry: entry[f"weights_{kind}"] / max(entry["weights"], 1))
        count = sum(entry[f"weights_{kind}"] for entry in cast)
        where = f", most in {worst['name']}" if count else ""
        shares[kind] = f"{count:,} of {total:,} ({count / total:.2%}{where})"
    return [f"Weights clipped to the largest value: {shares['clipped']}; rounded to 0: {shares['flushed']}."]


def _quality_lines(values: Values) -> Iterator[str]:
    quality = values["quality"]
    for name, verdict in values["verdicts"].items():
        loss = "" if verdict["loss"] is None else f", a loss of {verdict['loss']:.3%}"
        what = "quantized" if name == "quantized" else "trained quantized"
        text = f"{quality['float']:.4f} in float, {quality[name]:.4f} {what}"
        yield f"Quality: {text}{loss} ({verdict['judgement']})."


def _lines(values: Values) -> Iterator[str]:
    if values["asked"].get("calibration"):
        yield f"Signal-to-noise ratio of the model's output: {_decibels(values)} on the calibration batches."
    else:
        yield "Signal-to-noise ratio of the outputs: not measured. --calibration names batches for it."
    if values.get("kv_cache") is not None:
        yield cache_line(values["kv_cache"])
    yield from by_reason(values["left_out"], "Left in float")
    yield from (f"note: {note}" for note in values["notes"])
    if times := values["milliseconds"]:
        yield f"One forward pass on one thread: {', '.join(f'{name} {time:.2f} ms' for name, time in times.items())}."
    if values["sensitivity"] is not None:
        yield from _ranking(values["sensitivity"])
    if values["plan"] is not None:
        yield f"The plan quantizes {_planned(values['plan'])}."
    rows = (values["attacks"] or {}).get("rows", [])
    for name, before in {row["model"]: row["clean"] for row in rows}.items():
        for eps, after in _weakest(rows, name):
            yield f"Accuracy under attacks of {eps:.4g}, {_NAMES[name]}: {before:.4f} → {after:.4f}."
