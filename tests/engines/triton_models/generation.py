"""What both models share: a request read and its answer sent, in the inputs and outputs of Triton's own vLLM backend.

Runs in the stub of Triton's Python backend, beside `model.py`: the launcher puts a copy into each version's folder. The
wire is the vLLM backend's, since that is what a Triton that serves language models speaks:

1. `sampling_parameters` is JSON inside a string; without it the request's own parameters hold.
2. Unless streamed, the answer is one response, and repeats the prompt first unless `exclude_input_in_output` says no.
3. `return_finish_reason`, `return_num_input_tokens` and `return_num_output_tokens` add an output to *every* response: a
   reason that is not there yet is the word "None", and output tokens are those of this response alone.
4. A stream whose client has left ends with an error of its own, which nobody reads, and the model stops.
5. One thread says everything, a piece of each answer in turn, as the vLLM backend has one for its engine. With a thread
   for each answer, streams that ended at the same moment crashed the server, and 50 of them hung for ever (2.51).
6. How many requests are under way is written to a file of the process, in `running_dir` of its settings.

Not the vLLM backend's: a parameter that nothing knows is passed over, and nothing is batched. A version's
`settings.json` makes its load slow (`load_s`) or fail (`load_error`).
"""

import heapq
import itertools
import json
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator
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
    """What one step of a model says, `after_s` after the piece before it; the last piece of an answer has a reason."""

    text: str
    tokens: int = 1
    finish_reason: str | None = None
    after_s: float = 0.0


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
        self._told = os.open(Path(self.settings["running_dir"]) / str(os.getpid()), os.O_CREAT | os.O_WRONLY)
        self._arrivals: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._tell(0)
        time.sleep(float(self.settings.get("load_s", 0)))
        if "load_error" in self.settings:
            raise pb_utils.TritonModelException(str(self.settings["load_error"]))
        self.load()
        self._thread.start()

    def load(self) -> None:
        """Whatever the model needs before its first request."""

    def pieces(self, ask: Ask) -> Iterator[Piece]:
        """The answer, step by step; closed where the client left."""
        raise NotImplementedError

    def execute(self, requests: list[Any]) -> None:
        """Takes every request and returns: the answers come from the thread."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                ask = Ask(request)
            except Exception as exc:  # noqa: BLE001 (whatever is wrong with a request is told to its client)
                self._arrivals.put(Answer(sender, exc, iter(())))
            else:
                self._arrivals.put(Answer(sender, ask, self.pieces(ask)))

    def finalize(self) -> None:
        """Called once, when the version goes; waits for the answers under way."""
        self._arrivals.put(None)
        self._thread.join()
        self._say("unloaded")

    def _run(self) -> None:
        waiting: list[tuple[float, int, Answer]] = []
        numbers = itertools.count()
        over = False
        while waiting or not over:
            due_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            try:
                arrived = self._arrivals.get(timeout=due_s)
            except queue.Empty:
                answer = heapq.heappop(waiting)[2]
            else:
                if arrived is None:
                    over = True
                    continue
                answer = arrived
            if self._advance(answer):
                heapq.heappush(waiting, (time.monotonic() + answer.next.after_s, next(numbers), answer))
            self._tell(len(waiting))

    def _advance(self, answer: "Answer") -> bool:
        """Says the piece that is due and works out the next; False once the answer has ended, in whichever way."""
        try:
            last = answer.step(self._say)
        except Exception as exc:  # noqa: BLE001 (one answer's failure; the client and the log are told)
            self._say(traceback.format_exc())
            last = _failure(f"Error generating stream: {exc}", pb_utils.TritonError.INTERNAL)
        if last is not None:
            answer.sender.send(last, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return last is None

    def _tell(self, running: int) -> None:
        os.pwrite(self._told, b"%8d" % running, 0)

    def _say(self, what: str) -> None:
        pb_utils.Logger.log_info(f"{self._name}: {what}")


class Answer:
    """One answer under way, or why there is none. `next` is the piece that is said when it is due."""

    def __init__(self, sender: Any, ask: Ask | Exception, pieces: Iterator[Piece]) -> None:
        self.sender = sender
        self.next = Piece("", 0)
        self._ask = ask
        self._pieces = pieces
        self._begun = False
        self._said = ask.text if isinstance(ask, Ask) and ask.prepend else ""
        self._tokens = 0

    def step(self, say: Callable[[str], None]) -> Any:
        """Sends the piece that is due, unless it is the last: then returns its response. None: it goes on."""
        ask, piece = self._ask, self.next
        if isinstance(ask, Exception):
            raise ask
        if not self._begun:
            self._begun = True
            self.next = next(self._pieces)
            return None
        self._tokens += piece.tokens
        if self.sender.is_cancelled():
            say(f"cancelled after {self._tokens} tokens")
            return _failure("Request was cancelled", pb_utils.TritonError.CANCELLED)
        if piece.finish_reason is not None:
            say(f"finished after {self._tokens} tokens")
            return ask.response(
                piece if ask.stream else Piece(self._said + piece.text, self._tokens, piece.finish_reason)
            )
        if ask.stream:
            self.sender.send(ask.response(piece))
        else:
            self._said += piece.text
        self.next = next(self._pieces)
        return None


def _input(request: Any, name: str) -> Any:
    """The single element of an input tensor, None where it was not sent."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().reshape(-1)[0]


def _failure(message: str, code: Any) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
