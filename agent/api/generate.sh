#!/bin/sh
# Regenerates containerd_pb2.py and its type stub from containerd.proto (needs the `dev` extra).
set -eu
cd "$(dirname "$0")/../.."
.venv/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. agent/api/containerd.proto
