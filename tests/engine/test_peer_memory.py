"""Memory shared between ranks: who can have it, who cannot and why, and never with NVLink multicast."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.execution import rank_process
from engine.parallel import peer_memory
from engine.parallel.peer_memory import PeerMemory, share_memory

DEVICE = torch.device("cuda", 0)
OFF = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
WHOLE = ["0 of here", "1 of here"]


class Symmetric(SimpleNamespace):
    """torch's module where no GPU is: memory of the host, and a handle as it would be."""

    def __init__(self, *, backend: str = "CUDA", multicast_ptr: int = 0, shift: int = 0) -> None:
        super().__init__(get_backend=lambda device: backend, rendezvous=self._rendezvous, empty=self._empty)
        self.multicast_ptr = multicast_ptr
        self.shift = shift
        self.failure: RuntimeError | None = None
        self.out_of_memory: RuntimeError | None = None

    def _empty(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.out_of_memory is not None:
            raise self.out_of_memory
        return torch.full((size,), 7, dtype=dtype)

    def _rendezvous(self, buffer: torch.Tensor, process_group: object) -> Any:
        if self.failure is not None:
            raise self.failure
        assert not buffer.any(), "peers may write as soon as the first rank has returned"
        pointers = [buffer.data_ptr() + self.shift, 4096]
        return SimpleNamespace(buffer_ptrs=pointers, multicast_ptr=self.multicast_ptr)


class TwoRanks:
    """This rank, 0, and another that says `theirs`, or that it is well."""

    rank, size, is_capturable = 0, 2, True

    def __init__(self, places: list[str], theirs: str = "") -> None:
        self.places, self.theirs = places, theirs
        self.told: list[str] = []

    def gather_texts(self, text: str, device: torch.device) -> list[str]:
        if re.match(r"\d+ of ", text):
            return self.places
        self.told.append(text)
        return [text, self.theirs]


class Sharing:
    """Calls share_memory on rank 0, where nothing stands in the way unless told. group: the last call's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch.setattr
        self.group = TwoRanks(WHOLE)

    def __call__(
        self,
        symmetric: Symmetric | None,
        *,
        places: list[str] = WHOLE,
        environment: dict[str, str] = OFF,
        reach: bool = True,
        theirs: str = "",
    ) -> PeerMemory | str:
        self._patch(peer_memory, "_symmetric_memory", lambda: symmetric)
        self._patch(torch.cuda, "synchronize", lambda device: None)
        self._patch(torch.cuda, "device_count", lambda: 2)
        self._patch(torch.cuda, "can_device_access_peer", lambda device, peer: reach)
        self.group = TwoRanks(places, theirs)
        return share_memory(self.group, DEVICE, 256, environment)  # type: ignore[arg-type]


@pytest.fixture
def share(monkeypatch: pytest.MonkeyPatch) -> Sharing:
    return Sharing(monkeypatch)


def test_memory_is_zero_and_addresses_are_in_rank_order(share: Sharing) -> None:
    memory = share(Symmetric())
    assert isinstance(memory, PeerMemory)
    assert memory.buffer.shape == (256,)
    assert not memory.buffer.any()
    assert memory.addresses == (memory.buffer.data_ptr(), 4096)
    assert share.group.told == ["", "", ""]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"symmetric": None}, r"torch .* has no symmetric memory with empty, rendezvous, get_backend"),
        ({"environment": {}}, "TORCH_SYMM_MEM_DISABLE_MULTICAST=1 must be set"),
        (
            {"environment": {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "true"}},
            "TORCH_SYMM_MEM_DISABLE_MULTICAST=1 must",
        ),
        ({"symmetric": Symmetric(backend="NVSHMEM")}, "torch's symmetric memory is to come from NVSHMEM"),
        ({"places": ["0 of here", "0 of here"]}, "ranks have the same GPU, or see only their own"),
        ({"places": ["0 of here", "1 of there"]}, "the ranks are on several hosts: 0 of here; 1 of there"),
        ({"places": ["0 of here", "2 of here"]}, "it does not see the GPU of rank 1, cuda:2"),
        ({"reach": False}, r"cuda:0 cannot reach the memory of cuda:1 \(no peer-to-peer access\)"),
    ],
)
def test_what_stands_in_the_way_is_told_before_anything_is_mapped(
    share: Sharing, options: dict[str, Any], reason: str
) -> None:
    answer = share(**({"symmetric": Symmetric()} | options))
    assert isinstance(answer, str)
    assert re.match(f"rank 0: {reason}", answer), answer
    assert len(share.group.told) == 1


def test_ranks_over_gloo_have_none() -> None:
    group: Any = SimpleNamespace(is_capturable=False)
    assert share_memory(group, torch.device("cpu"), 1) == (
        "it needs a GPU for each rank, and these ranks talk over gloo"
    )


def test_the_other_ranks_reason_is_everyones(share: Sharing) -> None:
    assert share(Symmetric(), theirs="it is out of luck") == "rank 1: it is out of luck"
    assert len(share.group.told) == 1


def test_what_fails_later_is_told_to_all(share: Sharing) -> None:
    full, broken = Symmetric(), Symmetric()
    full.out_of_memory = torch.OutOfMemoryError("CUDA out of memory\nand more")
    broken.failure = RuntimeError("CUDA driver error: operation not permitted")
    for symmetric, reason, times in (
        (full, "rank 0: 256 bytes cannot be allocated: CUDA out of memory", 2),
        (broken, "rank 0: torch's rendezvous failed: CUDA driver error: operation not permitted", 3),
        (
            Symmetric(multicast_ptr=64),
            "rank 0: torch's rendezvous failed: a multicast object was made in spite",
            3,
        ),
        (Symmetric(shift=32), "rank 0: torch's rendezvous failed: the buffer at 0x.* is mapped at 0x", 3),
    ):
        answer = share(symmetric)
        assert isinstance(answer, str)
        assert re.match(reason, answer), answer
        assert "more" not in answer
        assert len(share.group.told) == times


def test_the_ranks_own_processes_keep_off_multicast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in peer_memory.NO_MULTICAST:
        monkeypatch.delenv(name, raising=False)
    environment = rank_process._environment()
    assert environment["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    assert environment["NCCL_NVLS_ENABLE"] == "0"
    assert environment["NVSHMEM_DISABLE_NVLS"] == "1"


def test_this_torch_has_what_is_called() -> None:
    symmetric = peer_memory._symmetric_memory()
    assert symmetric is not None
    assert list(inspect.signature(symmetric.rendezvous).parameters) == ["tensor", "group"]
    assert {"dtype", "device"} <= set(inspect.signature(symmetric.empty).parameters)
    handle = torch._C._distributed_c10d._SymmetricMemory
    assert all(hasattr(handle, name) for name in ("buffer_ptrs", "multicast_ptr"))
