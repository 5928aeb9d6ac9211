"""An agent that hands its problem to verifiers, in an environment of its own ($VERIFIERS_PYTHON)."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("verifiers_program.py")


def solve(base_url: str, problem: dict[str, Any]) -> str:
    python = os.environ["VERIFIERS_PYTHON"]
    path = f"{Path(python).parent}:{os.environ['PATH']}"  # verifiers looks for uv there
    arguments = [problem["client"], base_url, problem["question"], problem["folder"]]
    # The run's own packages are not for another environment.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, str(PROGRAM), *arguments],
        capture_output=True,
        text=True,
        env={**environment, "PATH": path},
        timeout=300,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-400:])
    report = json.loads(done.stdout.splitlines()[-1])
    if report["errors"]:
        raise RuntimeError(report["errors"][0])
    Path(problem["report"]).write_text(json.dumps(report))
    return report["said"]
