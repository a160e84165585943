"""What each engine says of itself, in its own words: one dialect per engine, and who has one."""

from collections.abc import Mapping
from types import MappingProxyType

from sidecar.adapters.deepspeed import MiiApiServer, MiiGateway, MiiOpenai
from sidecar.adapters.dialect import Dialect, Translator
from sidecar.adapters.health import Deepspeed, Triton, TritonOpenai
from sidecar.adapters.triton import TritonGenerate
from sidecar.adapters.vllm import Vllm
from sidecar.policy.schema import Engine, Front

DIALECTS: Mapping[tuple[Engine, Front], Dialect] = MappingProxyType(
    {
        ("vllm", "openai"): Vllm(),
        ("triton", "generate"): Triton(),
        ("triton", "openai"): TritonOpenai(),
        ("deepspeed", "openai"): Deepspeed(b"/health"),
        ("deepspeed", "api_server"): Deepspeed(b"/health"),
        ("deepspeed", "gateway"): Deepspeed(b"/healthz"),
    }
)
"""What each front tells of its health, its load and its models, if anything."""

TRANSLATORS: Mapping[tuple[Engine, Front], Translator] = MappingProxyType(
    {
        ("triton", "generate"): TritonGenerate(),
        ("deepspeed", "openai"): MiiOpenai(),
        ("deepspeed", "api_server"): MiiApiServer(),
        ("deepspeed", "gateway"): MiiGateway(),
    }
)
"""The fronts that do not speak OpenAI's API as vLLM does; what the others are asked and answer goes by untouched."""
