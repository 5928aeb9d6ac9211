"""Run a notebook as it is, in a real kernel.

python -m tests.support.notebooks quickstart own_task      runs them and keeps the outputs in the files
"""

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
CELL_SECONDS = 3600


def execute(path: Path, folder: Path) -> Any:
    """The notebook with its outputs; its code runs in `folder`. Raises where a cell does."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    options = {"timeout": CELL_SECONDS, "kernel_name": "python3", "coalesce_streams": True}
    client = NotebookClient(notebook, resources=resources, **options)
    client.execute()
    return notebook


def tidy(notebook: Any) -> None:
    """Leave out what is no result: versions of the kernel, warnings of other packages, colors, paths."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if "image/png" in output.get("data", {}):
                    output.data.pop("text/plain", None)
                if "text" in output:  # the program is named by its path where it is not on the PATH
                    text = re.sub(r"\x1b\[[0-9;]*m", "", output.text)
                    output.text = text.replace(f"{Path(sys.executable).parent}/whet", "whet")


def main(names: list[str]) -> None:
    import nbformat

    for name in names:
        path = FOLDER / f"{name}.ipynb"
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(path, Path(folder))
        tidy(notebook)
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
