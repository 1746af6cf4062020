"""The lines of a launch about the mesh."""

from maxtrain.observe.mesh_lines import mesh_lines


def test_axes_and_bytes_are_a_table():
    shape = {"data": 4, "stage": 1, "fsdp": 16, "context": 1, "expert": 1, "tensor": 2}
    held = {"parameters": 3 << 30, "optimizer state": 6 << 30, "batch": 1 << 18}
    assert mesh_lines(shape, {"data": 4}, held, "embed=[fsdp, tensor] mlp=[]") == [
        "mesh:",
        "  data     4  rows; each part has the whole model (4 over the slow network)",
        "  fsdp    16  rows, and parameters, which are gathered layer by layer",
        "  tensor   2  heads, hidden units and vocabulary",
        "  parameters are stored by embed=[fsdp, tensor] mlp=[]",
        "  a device holds 3.00 GiB parameters, 6.00 GiB optimizer state, 0.25 MiB batch",
    ]


def test_one_device_needs_no_table():
    assert mesh_lines({"data": 1, "fsdp": 1}, {}, {"parameters": 1}) == []
