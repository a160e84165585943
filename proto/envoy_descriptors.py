"""Writes sidecar/control/xds/envoy.pb: the descriptors of the few Envoy messages that the xDS server speaks.

    python proto/envoy_descriptors.py            from PyPI's xds-protos, which is downloaded and not installed
    python proto/envoy_descriptors.py FOLDER     from one that is unpacked already

The package itself is no dependency (docs/dependencies.md): it installs `envoy`, `google`, `opentelemetry`, `xds` and
more at the top, over files of other packages. Of it we want data: the serialized descriptor that stands as a literal in
each generated module. It is read out of the source, none of which is run, and those that `WANTED` needs are written
in an order in which each comes after what it imports.

Descriptors and not `.proto` files with protoc: xds-protos has no sources, and the four repositories that do would have
to be put together at matching commits. The descriptors are of Envoy's API, Apache-2.0 (envoyproxy/envoy, cncf/xds,
cncf/udpa, bufbuild/protoc-gen-validate, googleapis).
"""

import ast
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from google.protobuf import any_pb2, descriptor_pb2, duration_pb2, empty_pb2, struct_pb2, timestamp_pb2, wrappers_pb2

PACKAGE = "xds-protos==1.85.0"
OUT = Path(__file__).resolve().parents[1] / "sidecar" / "control" / "xds" / "envoy.pb"
WANTED = (
    "envoy/service/discovery/v3/ads.proto",
    "envoy/service/discovery/v3/discovery.proto",
    "envoy/config/cluster/v3/cluster.proto",
    "envoy/config/endpoint/v3/endpoint.proto",
    "envoy/config/listener/v3/listener.proto",
    "envoy/config/route/v3/route.proto",
    "envoy/extensions/filters/http/router/v3/router.proto",
    "envoy/extensions/filters/network/http_connection_manager/v3/http_connection_manager.proto",
    "envoy/extensions/retry/host/previous_hosts/v3/previous_hosts.proto",
    "envoy/extensions/transport_sockets/tls/v3/tls.proto",
    "envoy/extensions/upstreams/http/v3/http_protocol_options.proto",
)
OWN = {
    module.DESCRIPTOR.name: module.DESCRIPTOR.serialized_pb
    for module in (any_pb2, descriptor_pb2, duration_pb2, empty_pb2, struct_pb2, timestamp_pb2, wrappers_pb2)
}
"""What comes with Protobuf itself."""


def main() -> int:
    """Writes the set; the exit code."""
    if len(sys.argv) > 1:
        data = collected(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            data = collected(fetched(Path(folder)))
    OUT.write_bytes(data)
    print(f"{OUT}: {len(data)} bytes")
    return 0


def fetched(folder: Path) -> Path:
    """The package, unpacked into `folder`."""
    command = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)  # noqa: S603 - the words are ours
    (wheel,) = folder.glob("xds_protos-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "unpacked")
    return folder / "unpacked"


def collected(root: Path) -> bytes:
    """`WANTED` and all that they import, as a serialized FileDescriptorSet."""
    found = descriptor_pb2.FileDescriptorSet()
    seen: set[str] = set()

    def add(name: str) -> None:
        if name in seen:
            return
        seen.add(name)
        file = descriptor_pb2.FileDescriptorProto()
        file.ParseFromString(OWN.get(name) or literal(root / f"{name.removesuffix('.proto')}_pb2.py"))
        for each in file.dependency:
            add(each)
        found.file.append(file)

    for name in WANTED:
        add(name)
    return found.SerializeToString(deterministic=True)


def literal(path: Path) -> bytes:
    """The descriptor in a generated module: the argument of its `AddSerializedFile`."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "AddSerializedFile":
            value = ast.literal_eval(node.args[0])
            assert isinstance(value, bytes)
            return value
    raise ValueError(f"{path} has no descriptor in it")


if __name__ == "__main__":
    sys.exit(main())
