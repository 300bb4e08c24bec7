"""Kernels in a trace of the profiler."""

from __future__ import annotations

from splitkv.lab.reproduce import tracing


def test_a_trace_is_read_for_the_kernels_of_attention() -> None:
    events = [
        {"cat": "kernel", "name": "pytorch_flash::flash_fwd_kernel<>", "args": {"grid": [1, 4]}},
        {"cat": "kernel", "name": "flash_unknown"},
        {"cat": "cpu_op", "name": "aten::_flash_attention_forward"},
        {"cat": "kernel", "name": "vectorized_elementwise_kernel", "args": {"grid": [9]}},
    ]
    assert list(tracing.kernels({"traceEvents": events})) == [
        ("pytorch_flash::flash_fwd_kernel<>", [1, 4]),
        ("flash_unknown", []),
    ]
