"""Every form of CUDA_VISIBLE_DEVICES and SWEEPACK_DEVICES, on nodes made up in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from fake_nvml import FakeNvml, Gpu, Mig, NVMLError, NVMLError_Uninitialized
from hypothesis import given
from hypothesis import strategies as st
from sweepack import devices
from sweepack.devices import Device, Nvml, close_nvml, load_nvml, pool_limit, visible_pool
from sweepack.errors import UserError


def uuid(number: int) -> str:
    return f"GPU-{number}f3a1c22-0000-4000-8000-00000000000{number}"


G = [uuid(number) for number in range(8)]
NODE = FakeNvml(*map(Gpu, G))
TWINS = FakeNvml(Gpu("GPU-ab11"), Gpu("GPU-ab22"))
MODELS = FakeNvml(Gpu(G[0], "NVIDIA T4"), Gpu(G[1]), Gpu(G[2]))
LOST = FakeNvml(Gpu(G[0]), Gpu(G[1], lost=True), Gpu(G[2]))

M1, M2 = "MIG-11aa0000-0000-5000-8000-000000000000", "MIG-22bb0000-0000-5000-8000-000000000000"
OLD1, OLD2, OLD3 = f"MIG-{G[0]}/1/0", f"MIG-{G[0]}/2/0", f"MIG-{G[0]}/3/10"
SPLIT = Gpu(G[0], mig=(None, Mig(M1, 1), Mig(M2, 2, profile="2g.35gb")), mig_mode=True)
SPLIT_TOO = Gpu(G[1], mig=(Mig("MIG-33cc", 5),), mig_mode=True)
UNSPLIT = Gpu(G[1], mig=(None, None), mig_mode=True)
ALL_MIG = FakeNvml(SPLIT, SPLIT_TOO)
MIXED = FakeNvml(SPLIT, Gpu(G[1], mig=(None,)))
OLD_DRIVER = FakeNvml(Gpu(G[0], mig=(Mig(OLD1, 1), Mig(OLD3, 3, 10)), mig_mode=True))


def pool(nvml: Nvml | None, cuda: str | None = None, **environ: str) -> list[Device]:
    return visible_pool(environ if cuda is None else {"CUDA_VISIBLE_DEVICES": cuda, **environ}, nvml)


def entries(nvml: Nvml | None, cuda: str | None = None, **environ: str) -> list[str]:
    return [device.entry for device in pool(nvml, cuda, **environ)]


@pytest.mark.parametrize(
    ("nvml", "cuda", "expected"),
    [
        pytest.param(NODE, None, G, id="unset"),
        pytest.param(NODE, "0,1", [G[0], G[1]], id="indices"),
        pytest.param(NODE, "2,5", [G[2], G[5]], id="indices with a gap"),
        pytest.param(NODE, "5,2", [G[5], G[2]], id="the order given"),
        pytest.param(FakeNvml(*(Gpu(f"GPU-{n:02}") for n in range(12))), "1", ["GPU-01"], id="twelve GPUs"),
        pytest.param(NODE, " 2 ,\t5 ", [G[2], G[5]], id="spaces"),
        pytest.param(NODE, "02", [G[2]], id="a leading zero"),
        pytest.param(NODE, "0,-1,1", [G[0]], id="up to the -1"),
        pytest.param(NODE, "0,-1,nonsense", [G[0]], id="nothing after the -1 counts"),
        pytest.param(NODE, f"{G[3]},{G[1]}", [G[3], G[1]], id="UUIDs"),
        pytest.param(NODE, "GPU-3f,GPU-1", [G[3], G[1]], id="UUID prefixes"),
        pytest.param(MODELS, None, G[:3], id="unset on several models"),
        pytest.param(MODELS, "0,1", ["0", "1"], id="CUDA's own order on several models"),
        pytest.param(ALL_MIG, None, [M1, M2, "MIG-33cc"], id="unset in MIG mode"),
        pytest.param(MIXED, None, [M1, M2, G[1]], id="unset, MIG on one GPU"),
        pytest.param(FakeNvml(SPLIT, UNSPLIT), None, [M1, M2], id="a GPU in MIG mode without an instance"),
        pytest.param(ALL_MIG, f"{M2},{M1}", [M2, M1], id="MIG UUIDs"),
        pytest.param(ALL_MIG, "MIG-22", [M2], id="a MIG UUID prefix"),
        pytest.param(ALL_MIG, f"{OLD2},{OLD1}", [M2, M1], id="MIG UUIDs of the old style"),
        pytest.param(OLD_DRIVER, OLD1, [OLD1], id="an old driver"),
        pytest.param(ALL_MIG, "0,1", [M1, "MIG-33cc"], id="the first instance of an index"),
        pytest.param(MIXED, G[0], [M1], id="the first instance of a GPU UUID"),
        pytest.param(LOST, None, [G[0], G[2]], id="unset with a lost GPU"),
        pytest.param(LOST, "2", [G[2]], id="beside a lost GPU"),
        pytest.param(None, "3, 1", ["3", "1"], id="indices without NVML"),
        pytest.param(None, "GPU-x1,GPU-y2", ["GPU-x1", "GPU-y2"], id="UUIDs without NVML"),
        pytest.param(None, f"{M1},{OLD1}", [M1, OLD1], id="MIG UUIDs without NVML"),
    ],
)
def test_each_form_names_its_devices(nvml: Nvml | None, cuda: str | None, expected: list[str]) -> None:
    assert entries(nvml, cuda) == expected


@pytest.mark.parametrize("cuda", ["", "  ", "-1", " -1 ", "-1,0", "NoDevFiles"])
@pytest.mark.parametrize("nvml", [NODE, None])
def test_hidden_gpus_leave_the_cpu(nvml: Nvml | None, cuda: str) -> None:
    assert pool(nvml, cuda) == [Device("", "cpu", "cpu", "cpu")]


@pytest.mark.parametrize("nvml", [None, FakeNvml(), FakeNvml(UNSPLIT), FakeNvml(Gpu(G[0], lost=True))])
def test_without_a_usable_gpu_there_is_the_cpu(nvml: Nvml | None) -> None:
    assert pool(nvml) == [Device("", "cpu", "cpu", "cpu")]


@pytest.mark.parametrize(
    ("nvml", "cuda", "parts"),
    [
        (NODE, "0,0", ["`0` is given twice", "show no device at all", "export CUDA_VISIBLE_DEVICES=0"]),
        (NODE, "1,01", ["`1` and `01` are the same device", "show no device at all"]),
        (NODE, f"GPU-1,{G[1]}", [f"`GPU-1` and `{G[1]}` are the same device"]),
        (ALL_MIG, f"{M1},{OLD1}", [f"`{M1}` and `{OLD1}` are the same device"]),
        (None, "1,01", ["`1` and `01` are the same device"]),
        (None, "GPU-x,GPU-x", ["`GPU-x` is given twice"]),
        (None, f"{M1},{M1}", [f"`{M1}` is given twice"]),
        (None, "GPU-x,GPU-xy", ["`GPU-x` fits 2 devices"]),
        (NODE, "0,8,1", ["`8` names none", "stop there, with 1 device visible", "CUDA_VISIBLE_DEVICES=0,1"]),
        (NODE, "8", ["`8` names none", "0 devices visible", f"CUDA_VISIBLE_DEVICES={','.join(G)}"]),
        (NODE, "9" * 5000, ["is neither an index nor a UUID"]),
        (NODE, "GPU-9", ["`GPU-9` names none", f"here: cuda:7 NVIDIA H200 = {G[7]}"]),
        (NODE, M1, [f"`{M1}` names none"]),
        (OLD_DRIVER, f"MIG-{G[0]}/3/1", [f"`MIG-{G[0]}/3/1` names none"]),
        (OLD_DRIVER, f"MIG-{G[0]}/3/", ["is neither"]),
        (FakeNvml(), "0", ["`0` names none", "no GPU that NVML shows", "unset CUDA_VISIBLE_DEVICES"]),
        (TWINS, "GPU-ab", ["`GPU-ab` fits 2 devices", "GPU-ab11,GPU-ab22"]),
        (ALL_MIG, "MIG-", ["`MIG-` is neither"]),
        (ALL_MIG, f"MIG-{G[0]}", [f"`MIG-{G[0]}` fits 2 devices"]),
        (NODE, f"0,{G[1]}", [f"`{G[1]}` is a GPU UUID in a list that starts with `0`", "1 device visible"]),
        (NODE, f"{G[1]},0", [f"`0` is an index in a list that starts with `{G[1]}`"]),
        (MIXED, f"{G[1]},{M1}", [f"`{M1}` is a MIG UUID in a list"]),
        (None, "0,GPU-x", ["`GPU-x` is a GPU UUID in a list"]),
        (NODE, "all", ["`all` is neither", "0 devices visible"]),
        (NODE, "1gpu", ["`1gpu` is neither", "silently read 1"]),
        (NODE, "-2", ["`-2` is neither"]),
        (NODE, "0,,1", ["an entry is empty", "1 device visible"]),
        (None, "cuda:0", ["`cuda:0` is neither"]),
        (LOST, "0,1", ["`1` cannot be used: NVML cannot query it: GPU is lost", "CUDA_VISIBLE_DEVICES=0"]),
        (FakeNvml(UNSPLIT), "0", ["`0` cannot be used: it is in MIG mode and has no instance"]),
        (MIXED, "1", ["`1` is uncertain", f"={G[1]}\n", f"CUDA_VISIBLE_DEVICES={M1},{M2}"]),
        (FakeNvml(UNSPLIT, SPLIT), "1", ["`1` is uncertain"]),
        (MODELS, "3", ["`3` names none"]),
    ],
)
def test_what_cuda_would_swallow_is_refused_by_name(nvml: Nvml | None, cuda: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        pool(nvml, cuda)
    assert (caught.value.key, caught.value.value) == ("CUDA_VISIBLE_DEVICES", cuda)
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], message


def test_the_mended_value_of_an_error_is_accepted() -> None:
    for nvml, cuda in [(NODE, "0,0,9,3"), (MIXED, "0"), (LOST, "1"), (TWINS, "GPU-ab"), (ALL_MIG, f"{M1},0")]:
        with pytest.raises(UserError) as caught:
            pool(nvml, cuda)
        for line in caught.value.fix.splitlines():
            name, _, value = line.removeprefix("or: ").removeprefix("export ").partition("=")
            assert visible_pool({name: value}, nvml)


def test_a_known_gpu_is_described() -> None:
    assert pool(NODE, "2") == [Device(G[2], G[2], "cuda", "cuda:2 NVIDIA H200", "NVIDIA H200", 141 << 30)]


def test_a_mig_instance_is_described_with_its_own_memory_and_profile() -> None:
    model = "NVIDIA H200 MIG 2g.35gb"
    assert pool(ALL_MIG, M2) == [Device(M2, M2, "cuda", "MIG 2g.35gb of cuda:0", model, 16 << 30)]


def test_both_spellings_of_a_mig_instance_lease_the_same_device() -> None:
    assert pool(ALL_MIG, OLD2) == pool(ALL_MIG, M2)


def test_a_gpu_that_shares_the_memory_of_its_host_claims_none() -> None:
    gpu = Gpu(G[0], "NVIDIA GB10", memory=None)
    assert pool(FakeNvml(gpu)) == [Device(G[0], G[0], "cuda", "cuda:0 NVIDIA GB10", "NVIDIA GB10")]


def test_pci_order_turns_indices_of_several_models_into_uuids() -> None:
    assert entries(MODELS, "0,2", CUDA_DEVICE_ORDER="PCI_BUS_ID") == [G[0], G[2]]
    assert entries(MODELS, "0,2", CUDA_DEVICE_ORDER="FASTEST_FIRST") == ["0", "2"]


@pytest.mark.parametrize("nvml", [None, MODELS])
def test_an_index_alone_is_keyed_by_the_slurm_job_or_the_host(nvml: Nvml | None) -> None:
    assert pool(nvml, "1") == [Device("1", "host:1", "cuda", "cuda:1")]
    assert pool(nvml, "1", SLURM_JOB_ID="77") == [Device("1", "77:1", "cuda", "cuda:1")]


@given(st.data())
def test_the_pool_is_the_indices_asked_for_in_their_order(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))
    asked = data.draw(st.lists(st.integers(0, count - 1), unique=True, min_size=1))
    space = st.text(" \t", max_size=3)
    cuda = ",".join(f"{data.draw(space)}{index}{data.draw(space)}" for index in asked)
    assert entries(FakeNvml(*map(Gpu, G[:count])), cuda) == [G[index] for index in asked]


@given(st.lists(st.sampled_from(["0", "1", "2", "3", "-1", "", "x", "GPU-", G[1], M1]), max_size=4))
def test_no_value_shows_a_device_that_it_does_not_name(tokens: list[str]) -> None:
    try:
        shown = entries(FakeNvml(*map(Gpu, G[:3])), ",".join(tokens))
    except UserError:
        return
    named = {G[int(token)] if token in {"0", "1", "2"} else token for token in tokens}
    assert set(shown) <= named | {""}


@pytest.mark.parametrize("cuda", [None, "0", "nonsense"])
def test_simulated_devices_come_first(cuda: str | None) -> None:
    simulated = [Device("", f"sim:{n}", "sim", f"sim:{n}") for n in range(3)]
    assert pool(NODE, cuda, SWEEPACK_DEVICES="sim:3") == simulated


@pytest.mark.parametrize("cuda", [None, "0", "nonsense"])
def test_the_cpu_can_be_asked_for(cuda: str | None) -> None:
    assert pool(NODE, cuda, SWEEPACK_DEVICES="cpu") == [Device("", "cpu", "cpu", "cpu")]


@pytest.mark.parametrize(
    ("nvml", "cuda", "ours", "expected"),
    [
        (NODE, None, "3,1", [G[3], G[1]]),
        (NODE, "2,5,7", "7, 2", [G[7], G[2]]),
        (NODE, "2,5", f"GPU-5,{G[2]}", [G[5], G[2]]),
        (NODE, "2,5", "", [G[2], G[5]]),
        (NODE, "2,5", "  ", [G[2], G[5]]),
        (MODELS, "2,1", "1", ["1"]),
        (MODELS, None, "1", [G[1]]),
        (MIXED, None, f"{M2},1", [M2, G[1]]),
        (None, "4,6", "6", ["6"]),
    ],
)
def test_a_choice_among_the_visible(nvml: Nvml | None, cuda: str | None, ours: str, expected: list[str]) -> None:
    assert entries(nvml, cuda, SWEEPACK_DEVICES=ours) == expected


@pytest.mark.parametrize(
    ("nvml", "cuda", "ours", "parts"),
    [
        (NODE, "2,5", "0", ["`0` names none", f"here: cuda:5 NVIDIA H200 = {G[5]}", f"={G[2]},{G[5]}"]),
        (NODE, "2,5", G[3], [f"`{G[3]}` names none"]),
        (NODE, "", "0", ["`0` names none", "export SWEEPACK_DEVICES=cpu"]),
        (None, None, "0", ["`0` names none"]),
        (NODE, None, "1,1", ["`1` is given twice", "export SWEEPACK_DEVICES=1"]),
        (NODE, None, "sim", ["`cpu`, `sim:N`", "export SWEEPACK_DEVICES=sim:2"]),
        (NODE, None, "sim:0", ["`sim:0` is neither"]),
        (NODE, None, "sim:-1", ["`sim:-1` is neither"]),
        (NODE, None, "sim:2,cpu", ["`sim:2` is neither"]),
        (NODE, None, "gpu", ["`gpu` is neither"]),
        (NODE, None, "0,-1", ["`-1` is neither", "export SWEEPACK_DEVICES=0"]),
        (LOST, None, "1", ["`1` cannot be used", "GPU is lost"]),
    ],
)
def test_a_choice_outside_the_visible_is_refused(
    nvml: Nvml | None, cuda: str | None, ours: str, parts: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        pool(nvml, cuda, SWEEPACK_DEVICES=ours)
    assert (caught.value.key, caught.value.value) == ("SWEEPACK_DEVICES", ours)
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], message
    assert "CUDA would" not in message


def test_the_limit_is_a_thousand_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "load_nvml", lambda: NODE)
    assert pool_limit({"CUDA_VISIBLE_DEVICES": "2,5"}) == 2000
    assert pool_limit({"SWEEPACK_DEVICES": "sim:4"}) == 4000
    assert pool_limit({}) == 8000


@pytest.mark.parametrize("environ", [{"CUDA_VISIBLE_DEVICES": "0,0"}, {"SWEEPACK_DEVICES": "sim:0"}])
def test_a_refused_pool_still_has_a_limit(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "load_nvml", lambda: NODE)
    assert pool_limit(environ) == 1000


class _Module(ModuleType):
    """NVML's module before it is initialised; ``init`` and ``count`` take the place of what these calls do."""

    NVMLError = NVMLError

    def __init__(self, init: Callable[[], Any] = lambda: None, count: Callable[[], Any] = lambda: 1) -> None:
        super().__init__("pynvml")
        self.initialised, self._init, self._count = 0, init, count

    def nvmlInit(self) -> None:
        self._init()
        self.initialised += 1

    def nvmlShutdown(self) -> None:
        self.initialised -= 1

    def nvmlDeviceGetCount(self) -> Any:
        if not self.initialised:
            raise NVMLError_Uninitialized
        return self._count()


def _fails() -> None:
    raise OSError("no driver")


def test_nvml_is_used_when_it_answers_and_closed_before_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module := _Module())
    for _ in range(2):
        assert load_nvml() is load_nvml() is module
        assert module.initialised == 1
        close_nvml()
        assert module.initialised == 0
    monkeypatch.setitem(sys.modules, "pynvml", None)
    close_nvml()


@pytest.mark.parametrize("module", [None, _Module(init=_fails), _Module(count=_fails)])
def test_an_absent_or_failing_nvml_is_none(module: ModuleType | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert load_nvml() is None


@pytest.mark.parametrize("name", [name for name in vars(FakeNvml) if name.startswith(("nvml", "NVML"))])
def test_the_real_library_has_what_the_fake_has(name: str) -> None:
    assert hasattr(pytest.importorskip("pynvml"), name)
