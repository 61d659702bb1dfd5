"""The page of the commands of `eff`, from their ``--help``."""

import re

import typer

from shared_core.cli import app


def page() -> str:
    """Return the page's Markdown."""
    lines = ["# Commands", "", "`eff COMMAND --help` prints the same."]
    group = typer.main.get_command(app)
    for name in group.commands:
        command = group.get_command(typer.Context(group), name)
        text = re.sub(r"^Example: (.*)", r"```bash\n\1\n```", command.help, flags=re.M)
        lines += ["", f"## eff {name}", "", text, "", "| option | meaning | default |", "|---|---|---|"]
        with command.context_class(command, info_name=name) as context:
            parameters = [parameter for parameter in command.get_params(context) if parameter.name != "help"]
        for parameter in parameters:
            default = "required" if parameter.required else parameter.default
            told = str(default) if isinstance(default, str | int | float) and default is not False else ""
            cells = (f"`{parameter.opts[0]}`", parameter.help or "", told)
            lines.append("| " + " | ".join(cell.replace("\n", " ").replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
