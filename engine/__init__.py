"""A complete small LLM inference engine: `from engine import LLM, SamplingParams`."""

from typing import TYPE_CHECKING, Any

from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine.llm import LLM

__all__ = ["LLM", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # Late, so that the scheduling package can be used and tested without importing torch.
    if name == "LLM":
        from engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
