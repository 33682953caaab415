# SPDX-License-Identifier: Apache-2.0
"""The generated code that is checked in belongs to the .proto file."""

import subprocess
import sys
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from flowslot_proto import flowslot_pb2, flowslot_pb2_grpc

PROTO = Path(flowslot_pb2.__file__).parents[1]
NAME = "flowslot_proto/flowslot.proto"


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    # Compared as descriptors: the text differs from one version of the generator to the next.
    out = tmp_path / "set"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTO}"]
    subprocess.run([*command, f"--descriptor_set_out={out}", NAME], check=True)
    [wanted] = FileDescriptorSet.FromString(out.read_bytes()).file
    checked_in = FileDescriptorProto()
    flowslot_pb2.DESCRIPTOR.CopyToProto(checked_in)
    for file in (wanted, checked_in):  # json_name is filled in by the generator only
        for message in file.message_type:
            for field in message.field:
                field.ClearField("json_name")
    assert checked_in == wanted, "run `make proto`"


def test_generated_service_is_fresh() -> None:
    service = flowslot_pb2.DESCRIPTOR.services_by_name["EmulatedSwitch"]
    text = Path(flowslot_pb2_grpc.__file__).read_text()
    stub = Path(flowslot_pb2.__file__).with_suffix(".pyi").read_text()
    for method in service.methods:
        assert f"'/{service.full_name}/{method.name}'" in text, "run `make proto`"
        assert hasattr(flowslot_pb2_grpc.EmulatedSwitchServicer, method.name)
    for name in flowslot_pb2.DESCRIPTOR.message_types_by_name:
        assert f"class {name}(" in stub, "run `make proto`"
