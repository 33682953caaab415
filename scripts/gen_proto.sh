#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Regenerates the protobuf code that is checked in; tests/proto checks that it is fresh.
set -euo pipefail
cd "$(dirname "$0")/../proto"
../.venv/bin/python -m grpc_tools.protoc --proto_path=. \
  --python_out=. --pyi_out=. flowslot_proto/flowslot.proto
sed -i '1i # SPDX-License-Identifier: Apache-2.0' flowslot_proto/flowslot_pb2*.py*
