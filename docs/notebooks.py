"""Run the pages of docs/tutorials as notebooks; write their outputs into the pages and into examples/notebooks.

`python docs/notebooks.py` runs those whose code has changed, `python docs/notebooks.py trainer` that one in any case.
The page is the source: edit it, not the notebook. A block of Python or of bash becomes a cell, a block that names its
file in the first line is written to that file, and a `text` block after it holds its output. All other text becomes
Markdown cells.
"""

import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
PAGES = {path.stem: path for path in sorted((ROOT / "docs" / "tutorials").glob("*.md"))}
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", flags=re.M | re.S)
FIRST = "import os\nimport tempfile\n\nos.chdir(tempfile.mkdtemp())  # everything is written to a new folder"
TIMEOUT = 600  # seconds for a cell


def notebook_file(name):
    """Return where the notebook of a page lies."""
    return ROOT / "examples" / "notebooks" / f"{name}.ipynb"


def cells_of(page):
    """Return kind, source and shown output of each cell of a page's text."""
    cells, end = [], 0
    for block in BLOCK.finditer(page):
        cells += [("markdown", _prose(page[end : block.start()]), ""), ("code", _source(*block.group(1, 2)), block[3])]
        end = block.end()
    cells.append(("markdown", _prose(page[end:]), ""))
    cells.insert(1, ("code", FIRST, ""))
    return [(kind, source, shown or "") for kind, source, shown in cells if source]


def _prose(text):
    """Return Markdown whose links hold in the notebook's folder; a cell cannot be collapsed, so its frame goes."""
    text = re.sub(r"^</?details>\n|^<summary>(.*)</summary>\n", lambda found: f"{found[1] or ''}\n", text, flags=re.M)
    return re.sub(r"\]\((?!\w+:)", "](../../docs/tutorials/", text).strip()


def _source(language, text):
    named = re.match(r"# (\w+\.\w+)\n", text)
    magic = "%%bash\n" if language == "bash" else f"%%writefile {named[1]}\n" if named else ""
    return magic + (text[named.end() :] if named else text).strip()


def notebook_of(page):
    """Return the page as a notebook without outputs."""
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    for number, (kind, source, _) in enumerate(cells_of(page)):
        make = nbformat.v4.new_code_cell if kind == "code" else nbformat.v4.new_markdown_cell
        notebook.cells.append(make(source, id=f"cell-{number}"))
    return notebook


def with_stored_outputs(page, name):
    """Return the page as a notebook with the outputs of an earlier run; None if the code is not the one that ran."""
    notebook, file = notebook_of(page), notebook_file(name)
    if not file.exists():
        return None
    earlier = nbformat.read(file, as_version=4)
    ran = [cell for cell in earlier.cells if cell.cell_type == "code"]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if [cell.source for cell in ran] != [cell.source for cell in code]:
        return None
    for cell, old in zip(code, ran, strict=True):
        cell.outputs, cell.execution_count = old.outputs, old.execution_count
    notebook.metadata = earlier.metadata
    return notebook


def run(page, folder):
    """Return the page as a notebook that ran in this folder; an error in a cell is raised."""
    notebook = notebook_of(page)
    client = NotebookClient(
        notebook, timeout=TIMEOUT, record_timing=False, resources={"metadata": {"path": str(folder)}}
    )
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # where `eff` is
    client.execute(env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            text = output_of(cell)
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []
    return notebook


def output_of(cell):
    """Return what a cell printed, without colors, progress bars, warnings, and transformers' line of timings."""
    text = "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in text.strip("\n").splitlines()]
    lines = [line for line in lines if not line.startswith(("{'train_runtime'", "{'eval_loss'", "{'loss'"))]
    return "" if cell.source.startswith("%%writefile") else "\n".join(lines)


def with_outputs(page, notebook):
    """Return the page's text with the notebook's outputs."""
    outputs = iter([output_of(cell) for cell in notebook.cells if cell.cell_type == "code"][1:])

    def shown(block):
        text = next(outputs)
        return f"```{block[1]}\n{block[2]}```\n" + (f"\n```text\n{text}\n```\n" if text else "")

    return BLOCK.sub(shown, page)


if __name__ == "__main__":
    for name in sys.argv[1:] or PAGES:
        text = PAGES[name].read_text(encoding="utf-8")
        notebook = None if name in sys.argv else with_stored_outputs(text, name)
        if notebook is None:
            with tempfile.TemporaryDirectory() as folder:
                notebook = run(text, folder)
        notebook_file(name).parent.mkdir(exist_ok=True)
        nbformat.write(notebook, notebook_file(name))
        PAGES[name].write_text(with_outputs(text, notebook), encoding="utf-8")
