"""A real DeepSpeed engine behind MII's own gRPC service, so that MII's unmodified front ends run on a CPU.

MII's own engine does not: it wants NCCL, and its kernels have no CPU build. DeepSpeed's `init_inference` does, without
kernel injection. So this stands where MII's load balancer and its engine process stand, speaks MII's protos (imported
from MII), reads a request by MII's own rules (its GenerateParamsConfig, its unpacking), and generates with DeepSpeed.
Runs inside the engine environment: `python -P deepspeed_servicer.py FOLDER PORT [PACE_MS]`.

1. One thread owns the model and gives each sequence one token in turn, a long prompt in pieces of PREFILL tokens: a
   new request waits for one round, never for an answer.
2. Always greedy, whatever a request asks, and never batched, since what shares a batch changes the last bits: the same
   prompt has the same answer each time, and tests compare answers.
3. A stream is as MII's: a piece per token, incomplete characters held back, the last piece empty with the reason; the
   first prompt alone is answered. Not as MII's: stop strings are searched in the text and not taken for one token's
   name, and the end of sequence is not told as text.
4. A call that is cancelled leaves the model before its next token (MII's own engine runs on to the end).
5. What MII's rules refuse (a temperature of 0, a prompt longer than `max_length`) fails the call as it does there: the
   exception ends it as UNKNOWN, and the front ends make of it what they make of it.
6. Beside MII's service there is one call for tests: /sidecar.tests.Engine/Held, empty bytes in, the number of sequences
   that the model holds out, in decimal. It answers from when the model is loaded.

PACE_MS (0 and not given: none) is the least time between two rounds, so that a stream of the tiny model, which has
1,400 tokens/s, lasts without keeping a core busy.
"""

import asyncio
import queue
import sys
import threading
import time
from pathlib import Path

# All but grpc live in the engine environment only, where nothing type-checks.
import deepspeed  # type: ignore[import-not-found]
import grpc.aio
import torch  # type: ignore[import-not-found]
from google.protobuf.empty_pb2 import Empty
from mii.batching.data_classes import Response  # type: ignore[import-not-found]
from mii.config import GenerateParamsConfig  # type: ignore[import-not-found]
from mii.constants import (  # type: ignore[import-not-found]
    GRPC_MAX_MSG_SIZE,
    SERVER_SHUTDOWN_TIMEOUT,
    GenerationFinishReason,
)
from mii.grpc_related.proto.modelresponse_pb2 import (  # type: ignore[import-not-found]
    MultiGenerationReply,
    MultiStringRequest,
)
from mii.grpc_related.proto.modelresponse_pb2_grpc import (  # type: ignore[import-not-found]
    add_ModelResponseServicer_to_server,
)
from mii.grpc_related.task_methods import TextGenerationMethods  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase  # type: ignore[import-not-found]

PREFILL = 64  # tokens of a prompt in one round: some 200 ms of SmolLM2 on one core
CONTEXT = 6  # tokens kept before the news when text is made of tokens: longer than any character
HALF_A_CHARACTER = "\ufffd"
TEST_SERVICE = "sidecar.tests.Engine"


class Text:
    """Turns tokens into what may be said of them: no half characters, nothing that may yet become a stop string."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: list[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        self._tokens: list[int] = []  # the last ones, of which `_decoded` characters are taken
        self._decoded = 0
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """What the token lets be said; sets `stopped` when it completes a stop string, which is never said."""
        self._tokens.append(token)
        decoded = self._decode()
        if decoded.endswith(HALF_A_CHARACTER):
            return ""
        self._held += decoded[self._decoded :]
        self._tokens = self._tokens[-CONTEXT:]
        self._decoded = len(self._decode())
        if found := [at for stop in self._stops if (at := self._held.find(stop)) >= 0]:
            self.stopped = True
            self._held = self._held[: min(found)]
            return self.rest()
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        said, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return said

    def rest(self) -> str:
        """What is still held, once no more tokens come."""
        said = self._held if self.stopped else self._held + self._decode()[self._decoded :]
        self._held, self._tokens, self._decoded = "", [], 0
        return said

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        return text


class Sequence:
    """One prompt under way. `pieces` is filled by the model's thread: Responses, or the exception that ended it.

    It holds at most as many pieces as the request asked for tokens. Setting `gone` takes it out before its next token.
    """

    def __init__(self, tokens: list[int], params: GenerateParamsConfig, text: Text, limit: int) -> None:
        self.pending = tokens  # tokens that the model has not seen
        self.prompt_length = len(tokens)
        self.params = params
        self.text = text
        self.limit = limit  # tokens to generate at most
        self.generated = 0
        self.cache: object = None
        self.gone = False
        self.pieces: asyncio.Queue[Response | Exception] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def say(self, piece: Response | Exception) -> None:
        """Hands a piece to the call's task; from the model's thread."""
        self._loop.call_soon_threadsafe(self.pieces.put_nowait, piece)

    def response(self, text: str, reason: GenerationFinishReason) -> Response:
        return Response(text, self.prompt_length, self.generated, reason)


class Engine:
    """The model and the thread that runs it, from the making until the process ends."""

    def __init__(self, folder: Path, pace_s: float) -> None:
        """Loads the model; returns when it is ready."""
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        self._positions: int = model.config.max_position_embeddings
        self._model = deepspeed.init_inference(model, dtype=model.dtype, replace_with_kernel_inject=False)
        self._pace_s = pace_s
        self._arrivals: queue.SimpleQueue[Sequence] = queue.SimpleQueue()
        self._running: list[Sequence] = []
        threading.Thread(target=self._run, daemon=True).start()

    def held(self) -> int:
        """Sequences that wait for the model or that it works on."""
        return self._arrivals.qsize() + len(self._running)

    def submit(self, prompt: str, asked: dict[str, object]) -> Sequence:
        """Queues a prompt. Raises what MII raises for parameters that it does not take, and for too long a prompt."""
        tokens: list[int] = self._tokenizer.encode(prompt)
        length = {"prompt_length": len(tokens), "max_length": asked.get("max_length", self._positions)}
        params = GenerateParamsConfig(**(asked | length))
        room = min(params.max_length, self._positions) - len(tokens)
        if not tokens or room <= 0:
            raise ValueError(f"a prompt of {len(tokens)} tokens, where the model has {self._positions} positions")
        sequence = Sequence(tokens, params, Text(self._tokenizer, params.stop), min(room, params.max_new_tokens))
        self._arrivals.put(sequence)
        return sequence

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _run(self) -> None:
        while True:
            if not self._running:
                self._running = [self._arrivals.get()]
            began = time.monotonic()
            while not self._arrivals.empty():
                self._running.append(self._arrivals.get())
            self._running = [sequence for sequence in self._running if self._advance(sequence)]
            if self._running:
                time.sleep(max(0.0, self._pace_s - (time.monotonic() - began)))

    def _advance(self, sequence: Sequence) -> bool:
        """Gives a sequence its next token, or a piece of its prompt; False where it has ended, in whichever way."""
        if sequence.gone:
            return False
        try:
            return self._step(sequence)
        except Exception as exc:  # noqa: BLE001 - one sequence's, the thread serves the others on
            sequence.say(exc)
            return False

    def _step(self, sequence: Sequence) -> bool:
        seen, sequence.pending = sequence.pending[:PREFILL], sequence.pending[PREFILL:]
        output = self._model(
            input_ids=torch.tensor([seen]), past_key_values=sequence.cache, use_cache=True, logits_to_keep=1
        )
        sequence.cache = output.past_key_values
        if sequence.pending:
            return True
        token = int(output.logits[0, -1].argmax())
        sequence.pending = [token]
        sequence.generated += 1
        return self._tell(sequence, token)

    def _tell(self, sequence: Sequence, token: int) -> bool:
        params, text = sequence.params, sequence.text
        ended = token == self._tokenizer.eos_token_id and not params.ignore_eos
        if ended and sequence.generated > params.min_new_tokens:
            reason, said = GenerationFinishReason.STOP, text.rest()
        else:
            said = text.add(token)
            reason = GenerationFinishReason.NONE
            if text.stopped:
                reason = GenerationFinishReason.STOP
            elif sequence.generated >= sequence.limit:
                reason = GenerationFinishReason.LENGTH
                said += text.rest()
        going_on = reason is GenerationFinishReason.NONE
        if going_on or said:
            sequence.say(sequence.response(said, GenerationFinishReason.NONE))
        if not going_on:
            sequence.say(sequence.response("", reason))
        return going_on


class Servicer:
    """MII's three calls, each a task of the gRPC server; cancelled ones let go of their sequences."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._methods = TextGenerationMethods()
        self.ended = asyncio.Event()

    async def Terminate(self, request: Empty, context: "Context") -> Empty:
        """Ends the server: running calls have SERVER_SHUTDOWN_TIMEOUT (10 s), as MII gives them."""
        self.ended.set()
        return Empty()

    async def GeneratorReply(self, request: MultiStringRequest, context: "Context") -> MultiGenerationReply:
        prompts, asked = self._methods.unpack_request_from_proto(request)
        sequences: list[Sequence] = []
        try:
            for prompt in prompts:
                sequences.append(self._engine.submit(prompt, asked))
            answers = [await _whole(sequence, prompt) for sequence, prompt in zip(sequences, prompts, strict=True)]
        finally:
            for sequence in sequences:
                sequence.gone = True
        return self._methods.pack_response_to_proto(answers)

    async def GeneratorReplyStream(self, request: MultiStringRequest, context: "Context") -> None:
        prompts, asked = self._methods.unpack_request_from_proto(request)
        sequence = self._engine.submit(prompts[0], asked)
        try:
            going_on = True
            while going_on:
                piece = await _next(sequence)
                await context.write(self._methods.pack_response_to_proto([piece]))
                going_on = piece.finish_reason is GenerationFinishReason.NONE
        finally:
            sequence.gone = True

    async def held(self, request: bytes, context: "Context") -> bytes:
        return str(self._engine.held()).encode()


Context = grpc.aio.ServicerContext[object, object]


async def _next(sequence: Sequence) -> Response:
    piece = await sequence.pieces.get()
    if isinstance(piece, Exception):
        raise piece
    return piece


async def _whole(sequence: Sequence, prompt: str) -> Response:
    said = prompt if sequence.params.return_full_text else ""
    while (piece := await _next(sequence)).finish_reason is GenerationFinishReason.NONE:
        said += piece.generated_text
    return sequence.response(said, piece.finish_reason)


def _overlap(text: str, stop: str) -> int:
    """How many characters at the text's end begin the stop string."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


async def serve(folder: Path, port: int, pace_s: float) -> None:
    """Loads, serves on the loopback, and returns after Terminate."""
    servicer = Servicer(Engine(folder, pace_s))
    limits = [
        ("grpc.max_send_message_length", GRPC_MAX_MSG_SIZE),
        ("grpc.max_receive_message_length", GRPC_MAX_MSG_SIZE),
    ]
    server = grpc.aio.server(options=limits)
    add_ModelResponseServicer_to_server(servicer, server)
    held: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(servicer.held)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(TEST_SERVICE, {"Held": held}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print(f"{folder} is served on port {port}", flush=True)
    await servicer.ended.wait()
    await server.stop(SERVER_SHUTDOWN_TIMEOUT)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) / 1000 if len(sys.argv) > 3 else 0.0))
