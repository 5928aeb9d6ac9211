#!/usr/bin/env bash
# An environment with SGLang in it, for `make test-sglang` and server_python:  scripts/setup_sglang.sh FOLDER
# It needs an NVIDIA GPU. whetstone is not installed there: SGLang asks for another version of transformers.
# Nothing outside FOLDER changes.
set -euo pipefail
folder=$1
python=${PYTHON:-python3}
command -v nvidia-smi > /dev/null || { echo "setup_sglang.sh: SGLang needs an NVIDIA GPU, and there is none here"; exit 2; }
$python -m venv "$folder"
"$folder/bin/python" -m pip install --disable-pip-version-check --progress-bar off -q 'sglang>=0.5.16,<0.5.24'
"$folder/bin/python" -c 'import sglang; print("SGLang", sglang.__version__)'
