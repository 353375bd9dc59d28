#!/usr/bin/env bash
# uv.sh PYTHON ARGUMENTS...: runs uv with what pip was told about where packages lie.
#
# uv reads neither pip's environment nor its files. Its own variables win; where they are unset, pip's index and
# find-links hold. A folder there that offers a CPU build of torch saves the several GB of CUDA packages that come
# with the registry's own build.
set -euo pipefail
python=$1
shift

pip_setting() { # VARIABLE KEY
    local value=${!1:-}
    [ -n "$value" ] || value=$("$python" -m pip config get "global.$2" 2>/dev/null || true)
    echo "$value" | tr '\n' ' ' | sed 's/^ *//; s/ *$//'
}

if [ -z "${UV_FIND_LINKS:-}" ]; then
    links=$(pip_setting PIP_FIND_LINKS find-links)
    export UV_FIND_LINKS=${links// /,}
fi
if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]; then
    index=$(pip_setting PIP_INDEX_URL index-url)
    [ -z "$index" ] || export UV_DEFAULT_INDEX=$index
fi
exec "$python" -m uv "$@"
