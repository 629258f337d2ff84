"""The pool of the real node against what torch sees of it."""

from __future__ import annotations

import os

import pytest
from sweepack.devices import load_nvml, visible_pool


@pytest.mark.gpu
def test_the_pool_has_as_many_devices_as_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    nvml = load_nvml()
    if nvml is None or not torch.cuda.device_count():
        pytest.skip("no GPU is visible")
    monkeypatch.delenv("SWEEPACK_DEVICES", raising=False)
    pool = visible_pool(os.environ, nvml)
    if any(device.entry.startswith("MIG-") for device in pool):
        pytest.skip("one process sees one MIG instance, however many there are")
    assert {device.kind for device in pool} == {"cuda"}
    assert len(pool) == torch.cuda.device_count()
