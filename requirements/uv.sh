#!/usr/bin/env bash
# uv.sh PYTHON ARGUMENTS...: runs uv with what pip was told about where packages lie: uv of PYTHON, or ESPALIER_UV.
#
# uv reads neither pip's environment nor its files. Its own variables win; where they are unset, pip's index,
# find-links and certificates hold. A folder among the find-links that offers a CPU build of torch saves the several
# GB of CUDA packages that come with the registry's own build. Where NVIDIA's driver is too old for that build, uv takes
# the one for the CUDA of the driver.
set -euo pipefail
python=$1
shift

# Not `pip config get`, which reads one of pip's files only. Values are printed as Python strings.
pip_files=$("$python" -m pip config list 2>/dev/null || true)

pip_setting() { # VARIABLE KEY
    local value=${!1:-}
    [ -n "$value" ] || value=$(sed -n "s/^global\.$2='\(.*\)'\$/\1/p" <<<"$pip_files")
    sed 's/\\n/ /g; s/^ *//; s/ *$//' <<<"$value" | tr -s ' '
}

if [ -z "${UV_FIND_LINKS:-}" ]; then
    links=$(pip_setting PIP_FIND_LINKS find-links)
    export UV_FIND_LINKS=${links// /,}
fi
if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]; then
    index=$(pip_setting PIP_INDEX_URL index-url)
    [ -z "$index" ] || export UV_DEFAULT_INDEX=$index
fi
if [ -z "${SSL_CERT_FILE:-}" ]; then
    certificates=$(pip_setting PIP_CERT cert)
    [ -z "$certificates" ] || export SSL_CERT_FILE=$certificates
fi
. "$(dirname "${BASH_SOURCE[0]}")/driver.sh"
[ -z "$OLD_DRIVER" ] || export UV_TORCH_BACKEND=${UV_TORCH_BACKEND:-auto}
export UV_COMPILE_BYTECODE=${UV_COMPILE_BYTECODE:-1} # else every process compiles what it imports, where nothing writes bytecode
if [ -n "${ESPALIER_UV:-}" ]; then exec "$ESPALIER_UV" "$@"; fi
exec "$python" -m uv "$@"
