# SPDX-License-Identifier: Apache-2.0
"""The generated code that is checked in belongs to the .proto file."""

import subprocess
import sys
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from flowslot_proto import flowslot_pb2, methods

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


def test_types_and_paths_are_those_of_the_service() -> None:
    service = flowslot_pb2.DESCRIPTOR.services_by_name["EmulatedSwitch"]
    paths = {value for name, value in vars(methods).items() if name.isupper() and name[0] != "_"}
    assert paths == {f"/{service.full_name}/{method.name}" for method in service.methods}
    types = Path(flowslot_pb2.__file__).with_suffix(".pyi").read_text()
    for name in flowslot_pb2.DESCRIPTOR.message_types_by_name:
        assert f"class {name}(" in types, "run `make proto`"
