"""How engines load and unload models: what is sent, and what the recorded answers of the real ones mean."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.adapters.errand import Answer, Errand, Request
from sidecar.adapters.models import DEV_MODE, UPDATING, Adapter, Apart, Changer, Repository, Sleep, forgets
from sidecar.kernel.change import Again, Before, Done, Failed, Outcome
from sidecar.policy.schema import Endpoint
from tests import captures

LOADED = Before(True, ("1",), config='{"name":"toy_llm","version_policy":{"latest":{"num_versions":1}}}')


def seen(name: str) -> Answer:
    """A recorded answer, `folder/file`."""
    try:
        body = captures.body(f"{name}.txt")
    except AssertionError:
        body = b""  # it had none
    return Answer(captures.status(f"{name}.txt"), body)


def index(*entries: str) -> Answer:
    """An index of `name:version:state`."""
    said = [dict(zip(("name", "version", "state"), entry.split(":"), strict=False)) for entry in entries]
    return Answer(200, json.dumps(said).encode())


def read(errand: Errand | Done | Failed, *answers: Answer) -> Outcome | Errand:
    assert isinstance(errand, Errand)
    return errand.read(answers)


def sent(errand: Errand | Done | Failed) -> list[tuple[str, Any]]:
    assert isinstance(errand, Errand)
    return [
        (f"{each.method.decode()} {each.target.decode()}", json.loads(each.body) if each.body else None)
        for each in errand.requests
    ]


# Triton.

TOY = Repository("toy_llm")


def test_triton_is_asked_for_its_index_and_the_models_configuration() -> None:
    assert sent(TOY.look()) == [("POST /v2/repository/index", {}), ("GET /v2/models/toy_llm/config", None)]
    outcome = read(TOY.look(), seen("triton/repo_index"), seen("triton/model_config"))
    assert isinstance(outcome, Done) and outcome.before is not None
    assert (outcome.before.loaded, outcome.before.versions) == (True, ("1",))
    assert json.loads(outcome.before.config)["name"] == "toy_llm"
    slow = read(Repository("slow").look(), seen("triton/repo_index"), Answer(400, b"{}"))
    assert slow == Done("it is not loaded", Before())
    nobody = read(Repository("nope").look(), seen("triton/repo_index"), Answer(400, b"{}"))
    assert nobody == Done("it is not loaded", Before())
    assert isinstance(read(TOY.look(), Answer(500, b"no"), Answer(0)), Failed)


def test_triton_loads_as_the_repository_has_it_or_another_way() -> None:
    assert sent(TOY.load(LOADED)) == [("POST /v2/repository/models/toy_llm/load", {})]
    (_, body), *_ = sent(Repository("toy_llm", '{"a":1}').load(LOADED))
    assert body == {"parameters": {"config": '{"a":1}'}}
    (_, body), *_ = sent(Repository("toy_llm", version="2").load(LOADED))
    assert json.loads(body["parameters"]["config"]) == {
        "name": "toy_llm",
        "version_policy": {"specific": {"versions": [2]}},
    }
    assert isinstance(Repository("toy_llm", version="2").load(Before()), Failed)
    assert isinstance(Repository("toy_llm", version="x").load(LOADED), Failed)
    assert isinstance(Repository("toy_llm", "[]", "2").load(LOADED), Failed)
    assert sent(Repository("a/b c").load(Before()))[0][0] == "POST /v2/repository/models/a%2Fb%20c/load"


def test_what_triton_answers_a_load() -> None:
    assert read(TOY.load(LOADED), Answer(200)) == Done("Triton says that it is ready")
    bad = read(TOY.load(LOADED), seen("triton/load_badload"))
    assert bad == Failed(
        "400: load failed for model 'badload': version 1 is at UNAVAILABLE state: Internal: RuntimeError: cannot load"
        " weights At: /models/triton-repo/badload/1/model.py(3): initialize ;"
    )
    unknown = read(TOY.load(LOADED), seen("triton/load_unknown"))
    assert unknown == Failed("500: failed to load 'nope', failed to poll from model repository")
    assert read(TOY.load(LOADED), Answer(0, detail="cannot connect", reached=False)) == Failed("cannot connect")


def test_a_models_own_ready_counts_and_not_the_servers() -> None:
    assert sent(TOY.ready()) == [("GET /v2/models/toy_llm/ready", None)]
    assert sent(Repository("toy_llm", version="2").ready()) == [("GET /v2/models/toy_llm/versions/2/ready", None)]
    assert read(TOY.ready(), seen("triton/model_ready")) == Done()
    for name in ("model_ready_notloaded", "model_ready_unknown"):
        assert read(TOY.ready(), seen(f"triton/{name}")) == Again("400: Model version not ready")
    assert sent(TOY.restored(Before(True, ("9", "10")))) == [("GET /v2/models/toy_llm/versions/10/ready", None)]


@pytest.mark.parametrize(
    ("after", "outcome"),
    [
        (("toy_llm:1:UNLOADING", "toy_llm:2:READY"), Again("version 1 is UNLOADING")),
        (("toy_llm:1:UNAVAILABLE", "toy_llm:2:READY"), Done("gone")),
        (("toy_llm:2:READY", "slow:1:UNLOADING"), Done("gone")),
    ],
)
def test_the_old_version_is_gone_when_the_index_says_so(after: tuple[str, ...], outcome: Outcome) -> None:
    assert read(TOY.drained(LOADED), index(*after)) == outcome


def test_the_same_version_again_is_triton_s_to_drain() -> None:
    outcome = read(TOY.drained(LOADED), index("toy_llm:1:READY"))
    assert isinstance(outcome, Done) and "its own" in outcome.detail
    assert isinstance(read(TOY.drained(LOADED), Answer(500)), Again)


def test_unload_says_200_to_everybody_and_the_index_tells() -> None:
    assert [words for words, _ in sent(TOY.unload())] == [
        "POST /v2/repository/models/toy_llm/unload",
        "POST /v2/repository/index",
    ]
    gone = seen("triton/unload_unknown")
    assert read(TOY.unload(), gone, index("toy_llm:1:UNLOADING")) == Again("version 1 is UNLOADING")
    assert read(TOY.unload(), gone, index("toy_llm:1:READY")) == Again("version 1 is READY")
    assert read(TOY.unload(), gone, seen("triton/repo_index_ready")) == Again("version 1 is READY")
    assert read(TOY.unload(), gone, index("toy_llm")) == Done("gone")
    assert isinstance(read(TOY.unload(), Answer(500, b"no")), Failed)


def test_a_version_of_what_tells_no_configuration_wants_one() -> None:
    second = Repository("toy_llm", version="2")
    failed = second.load(Before(False))
    assert isinstance(failed, Failed) and failed.why.endswith("give it with --config")
    assert isinstance(Repository("toy_llm", config='{"name":"toy_llm"}', version="2").load(Before(False)), Errand)


def test_the_old_version_comes_back_by_its_number() -> None:
    first = TOY.revert(LOADED)
    assert sent(first) == [("POST /v2/repository/index", {})]
    then = read(first, index("toy_llm:1:UNAVAILABLE", "toy_llm:2:READY"))
    assert isinstance(then, Errand) and then.acts
    (path, body), _ = sent(then)
    assert path == "POST /v2/repository/models/toy_llm/load"
    assert json.loads(body["parameters"]["config"])["version_policy"] == {"specific": {"versions": [1]}}
    assert read(then, Answer(200), index("toy_llm:1:READY")) == Done("version 1 again")
    assert isinstance(read(then, Answer(200), index("toy_llm:2:READY")), Failed)
    assert isinstance(read(then, Answer(400, b'{"error":"no"}')), Failed)


def test_what_was_loaded_under_its_own_number_does_not_come_back() -> None:
    outcome = read(TOY.revert(LOADED), index("toy_llm:1:READY"))
    assert isinstance(outcome, Failed) and "version 1, loaded again under the same number" in outcome.why
    loading = read(TOY.revert(LOADED), index("toy_llm:1:READY", "toy_llm:2:LOADING"))
    assert isinstance(loading, Errand), "the load that nobody answered is under way: it is told from the old one"
    assert isinstance(TOY.revert(Before(True, ("1",), config="")), Failed)
    assert sent(TOY.revert(Before()))[0][0] == "POST /v2/repository/models/toy_llm/unload"


# vLLM's adapters.

L1 = Adapter("l1", "/models/lora1")
HAD = Before(True, path="/models/lora2")


def test_vllm_lists_its_adapters_with_their_folders() -> None:
    listed, dev = seen("vllm_features/models_with_lora"), seen("vllm_features/is_sleeping")
    assert read(L1.look(), listed, dev) == Done("loaded from /models/lora2", HAD)
    assert read(L1.look(), listed, seen("vllm/is_sleeping")) == Done(
        "loaded from /models/lora2", Before(True, path="/models/lora2", forgets=False)
    )
    assert read(Adapter("l9").look(), listed, dev) == Done("it is not loaded", Before())
    tiny = read(Adapter("tiny").look(), listed, dev)
    assert tiny == Failed("'tiny' is a base model there, and no adapter")
    assert isinstance(read(L1.look(), Answer(503, b"")), Failed)
    assert isinstance(read(L1.look(), Answer(0, detail="away")), Again)


def test_vllm_loads_an_adapter_over_another_of_its_name_only_in_place() -> None:
    assert sent(L1.load(Before())) == [
        ("POST /v1/load_lora_adapter", {"lora_name": "l1", "lora_path": "/models/lora1"})
    ]
    (_, body), *_ = sent(L1.load(HAD))
    assert body["load_inplace"] is True
    (_, body), *_ = sent(L1.revert(HAD))
    assert (body["lora_path"], body["load_inplace"]) == ("/models/lora2", True)
    assert sent(L1.revert(Before())) == [("POST /v1/unload_lora_adapter", {"lora_name": "l1"})]
    assert isinstance(Adapter("l1", "/models/lora2").revert(HAD), Failed)


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("vllm_features/lora1_load", Done("200: Success: LoRA adapter 'l1' added successfully.")),
        ("vllm_features/lora1_load_inplace", Done("200: Success: LoRA adapter 'l1' added successfully.")),
        ("vllm_features/lora_missing_path", Failed("404: Loading lora lx failed: No adapter found for <path>")),
        (
            "vllm_features/lora_basename",
            Failed("400: The lora adapter 'tiny' conflicts with a served base model."),
        ),
        (
            "vllm_features/lora1_load_again",
            Failed(
                "400: The lora adapter 'l1' has already been loaded. If you want to load the adapter in place, set"
                " 'load_inplace' to True."
            ),
        ),
        ("vllm/lora_load", Failed(UPDATING)),
    ],
)
def test_what_vllm_answers_a_load(name: str, outcome: Outcome) -> None:
    assert read(L1.load(Before()), seen(name)) == outcome


def test_a_rank_that_is_too_large_is_told_in_the_engines_words() -> None:
    outcome = read(L1.load(Before()), seen("vllm_features/lora_bigrank"))
    assert isinstance(outcome, Failed) and "LoRA rank 64 is greater than max_lora_rank 16." in outcome.why


def test_an_adapter_is_ready_when_it_is_listed_from_its_folder() -> None:
    listed = seen("vllm_features/models_with_lora")
    assert read(L1.ready(), listed) == Again("'l1' is loaded from /models/lora2")
    assert read(Adapter("l1", "/models/lora2").ready(), listed) == Done()
    assert read(L1.restored(HAD), listed) == Done()
    assert read(Adapter("l9", "/x").ready(), listed) == Again("'l9' is not among its 2 models")
    assert isinstance(read(L1.ready(), Answer(500)), Again)
    assert isinstance(L1.drained(HAD), Done)


def test_unloading_what_is_not_there_is_done() -> None:
    assert read(L1.unload(), seen("vllm_features/lora_unload")) == Done(
        "200: Success: LoRA adapter 'l1' removed successfully."
    )
    assert read(L1.unload(), seen("vllm_features/lora_unload_again")) == Done("it was not there")
    assert read(L1.unload(), seen("vllm/lora_load")) == Failed(UPDATING)


# vLLM's sleep.

SLEEP = Sleep()


def test_vllm_asleep_and_awake() -> None:
    awake, asleep = seen("vllm_features/is_sleeping"), seen("vllm_features/is_sleeping2")
    assert read(SLEEP.look(), awake) == Done("it is awake", Before(True))
    assert read(SLEEP.look(), asleep) == Done("it is asleep", Before())
    assert read(SLEEP.look(), seen("vllm/is_sleeping")) == Failed(DEV_MODE)
    assert isinstance(read(SLEEP.look(), Answer(500)), Failed)
    assert [words for words, _ in sent(SLEEP.load(Before()))] == ["POST /wake_up", "GET /is_sleeping"]
    assert read(SLEEP.load(Before()), seen("vllm_features/wake_up"), awake) == Done("it is awake")
    assert read(SLEEP.load(Before()), seen("vllm_features/wake_up"), asleep) == Again("it is asleep")
    assert isinstance(read(SLEEP.load(Before()), Answer(500, b"x")), Failed)
    assert read(SLEEP.ready(), awake) == Done("it is awake") == read(SLEEP.restored(HAD), awake)
    assert isinstance(read(SLEEP.ready(), Answer(500)), Again)
    assert isinstance(SLEEP.drained(HAD), Done)


def test_vllm_goes_to_sleep() -> None:
    assert [words for words, _ in sent(Sleep(2).unload())] == ["POST /sleep?level=2", "GET /is_sleeping"]
    slept, asleep = seen("vllm_features/sleep"), seen("vllm_features/is_sleeping2")
    assert read(SLEEP.unload(), slept, asleep) == Done("it is asleep, level 1")
    assert read(SLEEP.unload(), slept, seen("vllm_features/is_sleeping")) == Again("it is still awake")
    assert read(SLEEP.unload(), seen("vllm/sleep")) == Failed(DEV_MODE)
    assert read(SLEEP.unload(), Answer(500, b"x")) == Failed("500: x")
    assert sent(SLEEP.revert(Before()))[0][0] == "POST /sleep?level=1"
    assert read(SLEEP.revert(Before(True))) == Done("it was awake before")


# What serves elsewhere, and what is forgotten.


@pytest.mark.parametrize(
    ("endpoint", "path"),
    [
        (Endpoint(url="http://a:1"), "GET /v1/models"),
        (Endpoint(url="http://a:1", engine="triton"), "GET /v2/models/m/ready"),
        (
            Endpoint(url="http://a:1", engine="triton", engine_model="m/versions/2"),
            "GET /v2/models/m/versions/2/ready",
        ),
        (Endpoint(url="http://a:1", engine="triton", front="openai"), "GET /v1/models"),
        (Endpoint(url="http://a:1", engine="deepspeed"), "GET /v1/models"),
        (Endpoint(url="http://a:1", engine="deepspeed", front="api_server"), "GET /health"),
        (Endpoint(url="http://a:1", engine="deepspeed", front="gateway"), "GET /healthz"),
    ],
)
def test_every_server_says_somewhere_that_it_is_ready(endpoint: Endpoint, path: str) -> None:
    assert [words for words, _ in sent(Apart(endpoint, "m").ready())] == [path]


def test_what_the_servers_answer() -> None:
    mii = Apart(Endpoint(url="http://a:1", engine="deepspeed", engine_model="/models/smollm2-hf"), "m")
    assert read(mii.ready(), seen("mii/oai_models")) == Done()
    assert isinstance(read(mii.ready(), seen("vllm_features/models_with_lora")), Again)
    gateway = Apart(Endpoint(url="http://a:1", engine="deepspeed", front="gateway"), "m")
    assert read(gateway.ready(), seen("mii/rest_healthz")) == Done()
    assert isinstance(read(gateway.ready(), Answer(503)), Again)


def test_who_leaves_how() -> None:
    gateway = Apart(Endpoint(url="http://a:1", engine="deepspeed", front="gateway"), "m")
    ends = gateway.leave("terminate")
    assert [words for words, _ in sent(ends)] == ["GET /terminate"]
    assert isinstance(read(ends, Answer(200, b"Shutting down RESTful API gateway server")), Done)
    assert read(ends, Answer(0, detail="refused", reached=False)) == Done("nobody answers there any more")
    assert read(ends, Answer(500, b"x")) == Failed("500: x")
    triton = Apart(Endpoint(url="http://a:1", engine="triton", engine_model="m/versions/2"), "x")
    assert sent(triton.leave("unload"))[0][0] == "POST /v2/repository/models/m/unload"
    assert sent(Apart(Endpoint(url="http://a:1"), "m").leave("sleep", 2))[0][0] == "POST /sleep?level=2"
    for how in ("unload", "terminate"):
        assert isinstance(Apart(Endpoint(url="http://a:1"), "m").leave(how), Failed)


def test_caches_that_are_reset() -> None:
    errand = forgets(Endpoint(url="http://a:1"))
    assert [words for words, _ in sent(errand)] == ["POST /reset_prefix_cache"]
    assert read(errand, seen("vllm_features/reset_prefix_cache")) == Done("the prefix cache was reset")
    assert read(errand, Answer(200, b'{"success":false}')) == Again("the prefix cache is in use")
    under_streams = [words for words, _ in sent(forgets(Endpoint(url="http://a:1"), True))]
    assert under_streams == ["POST /reset_prefix_cache?reset_running_requests=true"]
    older = read(errand, Answer(200))
    assert older == Done("it was told to reset its prefix cache, and does not say whether it did")
    assert read(errand, seen("vllm/reset_prefix_cache")) == Failed("404: Not Found")
    assert isinstance(forgets(Endpoint(url="http://a:1", engine="triton")), Done)


# Whatever comes back.

CHANGERS: list[Changer] = [TOY, Repository("toy_llm", version="2"), L1, SLEEP]


@given(
    bodies=st.lists(
        st.binary(max_size=40)
        | st.sampled_from([b"[]", b"{}", b"null", b'[{"name":1}]', b'{"data":[{}]}', b"[" * 9999]),
        min_size=2,
        max_size=2,
    ),
    status=st.sampled_from([200, 204, 400, 404, 500, 503]),
)
def test_no_answer_is_too_strange(bodies: list[bytes], status: int) -> None:
    answers = [Answer(status, body) for body in bodies]
    for changer in CHANGERS:
        for errand in (
            changer.look(),
            changer.load(LOADED),
            changer.ready(),
            changer.drained(LOADED),
            changer.unload(),
            changer.revert(LOADED),
            changer.restored(LOADED),
        ):
            if isinstance(errand, Errand):
                assert isinstance(errand.read(answers[: len(errand.requests)]), Done | Again | Failed | Errand)


def test_requests_are_plain() -> None:
    assert Request(b"GET", b"/").body == b""
