#!/usr/bin/env bash
# Makes the committed stubs from the schemas; --check fails when they are stale.
set -euo pipefail
cd "$(dirname "$0")/.."
out=proto/python
[ "${1:-}" = "--check" ] && { out=$(mktemp -d); trap 'rm -rf "$out"' EXIT; }
python -m grpc_tools.protoc -I proto --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" proto/tandem/v1/*.proto
touch "$out/tandem/v1/__init__.py" "$out/tandem/__init__.py"
if [ "${1:-}" = "--check" ]; then diff -r -x __pycache__ "$out/tandem" proto/python/tandem && echo "stubs are up to date"; fi
