"""What both models share: a request read and its answer sent, in the inputs and outputs of Triton's own vLLM backend.

Runs in the stub of Triton's Python backend, beside `model.py`: the launcher puts a copy into each version's folder. The
wire is the vLLM backend's, since that is what a Triton that serves language models speaks:

1. `sampling_parameters` is JSON inside a string; without it the request's own parameters hold.
2. Unless streamed, the answer is one response, and repeats the prompt first unless `exclude_input_in_output` says no.
3. `return_finish_reason`, `return_num_input_tokens` and `return_num_output_tokens` add an output to *every* response: a
   reason that is not there yet is the word "None", and output tokens are those of this response alone.
4. A stream whose client has left ends with an error of its own, which nobody reads, and the model stops.
5. Requests under way are a gauge among Triton's metrics (`sidecar_tests_running`), as the vLLM backend adds vLLM's.

Two things are not the vLLM backend's: a parameter that nothing knows is passed over, and each request has a thread of
its own, where an engine would batch. A version's `settings.json` makes its load slow (`load_s`) or fail (`load_error`).
"""

import json
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# These two live in the engine environment and its stub only, where nothing type-checks.
import numpy as np  # type: ignore[import-not-found]
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

MAX_TOKENS = 16  # where the request names none, as vLLM has it
FLAGS = ("stream", "exclude_input_in_output")
WISHES = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
INPUTS = (("text_input", "TYPE_STRING"), ("sampling_parameters", "TYPE_STRING"), *((n, "TYPE_BOOL") for n in FLAGS))
OUTPUTS = (
    ("text_output", "TYPE_STRING"),
    ("finish_reason", "TYPE_STRING"),
    ("num_input_tokens", "TYPE_UINT32"),
    ("num_output_tokens", "TYPE_UINT32"),
)


@dataclass(frozen=True)
class Piece:
    """What one step of a model says; the last piece of an answer has a reason."""

    text: str
    tokens: int = 1
    finish_reason: str | None = None


class Ask:
    """One request. `input_tokens` is the model's to set, before its first piece."""

    def __init__(self, request: Any) -> None:
        """Raises ValueError on parameters that are no JSON object, and on what a stream may not ask for."""
        self.text: str = _input(request, "text_input").decode()
        self.stream = bool(_input(request, "stream"))
        exclude = _input(request, "exclude_input_in_output")
        if self.stream and exclude is not None and not exclude:
            raise ValueError("When streaming, `exclude_input_in_output` = False is not allowed.")
        self.prepend = not self.stream and not exclude
        written = _input(request, "sampling_parameters")
        self.parameters: dict[str, Any] = json.loads(request.parameters() if written is None else written)
        if not isinstance(self.parameters, dict):
            raise ValueError("sampling parameters must be a JSON object")
        self.max_tokens = int(self.parameters.get("max_tokens", MAX_TOKENS))
        self.wishes = {name: bool(_input(request, name)) for name in WISHES}
        self.input_tokens = 0

    def response(self, piece: Piece) -> Any:
        """The response that carries a piece."""
        outputs = [pb_utils.Tensor("text_output", np.array([piece.text.encode()], dtype=np.object_))]
        if self.wishes["return_finish_reason"]:
            reason = str(piece.finish_reason).encode()
            outputs.append(pb_utils.Tensor("finish_reason", np.array([reason], dtype=np.object_)))
        if self.wishes["return_num_input_tokens"]:
            outputs.append(pb_utils.Tensor("num_input_tokens", np.array([self.input_tokens], dtype=np.uint32)))
        if self.wishes["return_num_output_tokens"]:
            outputs.append(pb_utils.Tensor("num_output_tokens", np.array([piece.tokens], dtype=np.uint32)))
        return pb_utils.InferenceResponse(output_tensors=outputs)


class Generation:
    """A decoupled model; a subclass has `load` and `pieces`."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Adds inputs and outputs, so that each model's config.pbtxt holds what is its own."""
        for name, data_type in (*INPUTS, *((name, "TYPE_BOOL") for name in WISHES)):
            config.add_input(
                {"name": name, "data_type": data_type, "dims": [1]}
                | ({} if name == "text_input" else {"optional": True})
            )
        for name, data_type in OUTPUTS:
            config.add_output({"name": name, "data_type": data_type, "dims": [-1]})
        config.set_max_batch_size(0)
        config.set_model_transaction_policy({"decoupled": True})
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Called once, before the version is ready; what it raises is the reason of a failed load."""
        self.version = args["model_version"]
        self._name = f"{args['model_name']} {self.version}"
        settings = Path(args["model_repository"]) / self.version / "settings.json"
        self.settings: dict[str, Any] = json.loads(settings.read_text()) if settings.is_file() else {}
        self._threads: set[threading.Thread] = set()
        self._gauges = pb_utils.MetricFamily(
            name="sidecar_tests_running", description="Requests under way", kind=pb_utils.MetricFamily.GAUGE
        )
        self._running = self._gauges.Metric(labels={"model": args["model_name"], "version": self.version})
        time.sleep(float(self.settings.get("load_s", 0)))
        if "load_error" in self.settings:
            raise pb_utils.TritonModelException(str(self.settings["load_error"]))
        self.load()

    def load(self) -> None:
        """Whatever the model needs before its first request."""

    def pieces(self, ask: Ask) -> Iterator[Piece]:
        """The answer, step by step; closed where the client left."""
        raise NotImplementedError

    def execute(self, requests: list[Any]) -> None:
        """Begins every request and returns: the answers come from their threads."""
        self._threads = {thread for thread in self._threads if thread.is_alive()}
        for request in requests:
            self._running.increment(1)
            thread = threading.Thread(target=self._answer, args=(request,))
            thread.start()
            self._threads.add(thread)

    def finalize(self) -> None:
        """Called once, when the version goes; waits for the answers under way."""
        for thread in self._threads:
            thread.join()
        self._say("unloaded")

    def _answer(self, request: Any) -> None:
        sender = request.get_response_sender()
        try:
            last = self._send(Ask(request), sender)
        except Exception as exc:  # noqa: BLE001 (a thread begins here; the client and the log are told)
            self._say(traceback.format_exc())
            last = _failure(f"Error generating stream: {exc}", pb_utils.TritonError.INTERNAL)
        sender.send(last, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        self._running.increment(-1)

    def _send(self, ask: Ask, sender: Any) -> Any:
        """Sends all but the last response, and returns that."""
        said = ask.text if ask.prepend else ""
        tokens = 0
        for piece in self.pieces(ask):
            tokens += piece.tokens
            if sender.is_cancelled():
                self._say(f"cancelled after {tokens} tokens")
                return _failure("Request was cancelled", pb_utils.TritonError.CANCELLED)
            if ask.stream and piece.finish_reason is None:
                sender.send(ask.response(piece))
                continue
            said += piece.text
            if piece.finish_reason is not None:
                self._say(f"finished after {tokens} tokens")
                return ask.response(piece if ask.stream else Piece(said, tokens, piece.finish_reason))
        raise RuntimeError("the model ended without a reason")

    def _say(self, what: str) -> None:
        pb_utils.Logger.log_info(f"{self._name}: {what}")


def _input(request: Any, name: str) -> Any:
    """The single element of an input tensor, None where it was not sent."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().reshape(-1)[0]


def _failure(message: str, code: Any) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
