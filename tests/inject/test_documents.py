"""Manifests as people write them: ten of them with their golden outputs, and any others there and back."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.inject import documents, edit, spelling
from sidecar.inject.documents import Outcome, injected, uninjected
from sidecar.inject.names import STATUS
from sidecar.inject.pod import Defaults, Injected, inject
from sidecar.inject.tree import Node, chunks, compose
from sidecar.inject.workloads import workloads
from tests.inject.goldens import SPECS, golden, outcome
from tests.inject.pods import pods

MINE = Defaults()


def there(text: str, defaults: Defaults = MINE) -> str:
    done = injected([("pod.yaml", text)], defaults)
    assert done.problems == ()
    return done.texts[0]


def back(text: str) -> str:
    done = uninjected([("pod.yaml", text)])
    assert done.problems == () and done.warnings == ()
    return done.texts[0]


def refused(text: str) -> list[str]:
    done = injected([("pod.yaml", text)], MINE)
    assert done.problems and done.texts == ()
    return [str(each) for each in done.problems]


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_manifest_becomes_its_golden_one(path: Path) -> None:
    text, warnings = golden(path)
    done = outcome(path)
    assert done.texts == (text.read_bytes().decode(),), "python -m tests.inject.goldens, and read the difference"
    assert [str(each) for each in done.warnings] == warnings.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_manifest_injected_twice_is_injected_once_and_comes_back(path: Path) -> None:
    text = path.read_bytes().decode()
    once = there(text)
    assert there(once) == once
    assert back(once) == text


def test_there_are_ten_of_them_and_no_golden_one_too_many() -> None:
    assert len(SPECS) >= 10
    assert {path.name for path in (SPECS[0].parents[1] / "golden").glob("*.yaml")} == {path.name for path in SPECS}


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
@pytest.mark.parametrize("indent", [None, 2, 4])
def test_json_says_the_same_and_comes_back_to_the_character(path: Path, indent: int | None) -> None:
    for document in chunks(path.read_bytes().decode()):
        root = compose(document)
        if root is None or root.value is None or not any(workloads(root.value)) or "redis" in document:
            continue
        text = json.dumps(root.value, indent=indent) + ("\n" if indent else "")
        once = there(text)
        assert _less_texts(json.loads(once)) == _said(there(document)), "it is JSON, and says what YAML says"
        assert back(once) == text and there(once) == once


def _said(text: str) -> Any:
    """What a document says, less what is remembered of how it was written."""
    root = compose(text)
    assert root is not None
    return _less_texts(root.value)


def _less_texts(value: Any) -> Any:
    if isinstance(value, list):
        return [_less_texts(each) for each in value]
    if not isinstance(value, dict):
        return value
    plain = {key: _less_texts(each) for key, each in value.items()}
    if STATUS in plain:
        status = json.loads(plain[STATUS])
        status.pop("texts", None)
        plain[STATUS] = status
    return plain


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_lines_of_windows_stay(path: Path) -> None:
    text = path.read_bytes().decode().replace("\n", "\r\n")
    once = there(text)
    assert "\n" not in once.replace("\r\n", "")
    assert back(once) == text


def test_a_newer_sidecar_replaces_an_older_one() -> None:
    text = SPECS[0].read_bytes().decode()
    older = there(text, Defaults(version="0.0.9", image="llm-sidecar:0.0.9", drain_s=60))
    assert older != there(text) and there(older) == there(text)


def test_what_was_changed_since_stays_and_is_told() -> None:
    once = there(_POD)
    changed = once.replace("terminationGracePeriodSeconds: 640", "terminationGracePeriodSeconds: 7200  # mine")
    done = uninjected([("pod.yaml", changed)])
    assert done.texts[0] == _POD.replace("spec:\n", "spec:\n  terminationGracePeriodSeconds: 7200  # mine\n")
    (warning,) = done.warnings
    assert "spec.terminationGracePeriodSeconds: was changed after it was injected" in str(warning)


def test_what_came_since_stays_where_it_is() -> None:
    mine = "    - name: mine\n      image: mine:1\n"
    once = there(_POD).replace("  initContainers:\n", "  initContainers:\n" + mine.replace("    -", "  -"))
    once = once.replace("      image: mine:1", "    image: mine:1")
    restored = back(once)
    assert "llm-sidecar" not in restored
    assert [each["name"] for each in yaml.safe_load(restored)["spec"]["initContainers"]] == ["mine"]


_POD = """\
apiVersion: v1
kind: Pod
metadata: {name: one}
spec:
  containers:
  - name: vllm
    image: vllm/vllm-openai:v1
    args: [--model, m]
"""

_OTHER = """\
apiVersion: v1
kind:   ConfigMap
metadata: {name: "other"}   # odd   spaces
data: {a: 'b', c: !!binary aGk=, d: &x 1, e: *x}
"""


def test_other_kinds_are_byte_for_byte_what_they_were() -> None:
    text = f"# begin\n---\n{_OTHER}---\n\n---\n{_POD}---\n{_OTHER}...\n# end\n"
    once = there(text)
    first, last = once.split(_POD[:26])
    assert text.startswith(first) and text.endswith(last[last.index("---\n") :])
    assert back(once) == text


def test_files_are_told_apart() -> None:
    done = injected([("a.yaml", _POD), ("b.yaml", _POD.replace("image:", "image: &i"))], MINE)
    assert len(done.texts) == 2 and done.pods == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "pod.yaml, line 2: not YAML"),
        (f"{_OTHER}---\na: {{{{ .Values.x }}}}\nb: [\n", "pod.yaml, line"),
        (f"{_OTHER}---\n{_POD}kind: Pod\n", 'pod.yaml, line 14: key "kind" is there twice'),
        (
            f"---\n{_POD.replace('- name: vllm', '- nme: vllm')}",
            "document 1 (Pod/one): spec.containers[0]: Object missing",
        ),
        (_POD.replace("[--model, m]", "[--model, 7]"), "spec.containers[0].args[1]: Expected `str`, got `int`"),
        (_POD.replace("name: vllm", "name: 1"), "spec.containers[0].name: Expected `str`"),
        (_POD[: _POD.index("spec:")], "document 1 (Pod/one): spec.containers: there is no container"),
        (
            "apiVersion: apps/v1\nkind: Deployment\nspec: {replicas: 1}\n",
            "(Deployment): spec.template: there is no pod",
        ),
        (_POD.replace("vllm", "redis"), "no container looks like an engine"),
        (
            f"{_POD}  volumes: [{{name: llm-sidecar-run}}]\n",
            "document 1 (Pod/one): spec.volumes[0]: the volume's name \"llm-sidecar-run\" is the sidecar's",
        ),
        (
            f"{_POD}metadata2: 1\n".replace("{name: one}", '{name: one, annotations: {sidecar.infra.ai/status: "x"}}'),
            "metadata.annotations.sidecar.infra.ai/status: is not what `sidecar inject` writes",
        ),
    ],
)
def test_what_is_wrong_is_told_with_its_place(text: str, words: str) -> None:
    assert any(words in each for each in refused(text)), refused(text)


def test_all_that_is_wrong_is_told_at_once() -> None:
    wrong = f"{_POD}  volumes: [{{name: llm-sidecar-run}}, {{name: llm-sidecar-policy}}]\n"
    told = refused(f"{wrong}---\n{wrong}")
    assert len(told) == 4 and sum("document 2" in each for each in told) == 2


def test_what_did_not_ask_and_is_no_engine_is_left_beside_others() -> None:
    redis = _POD.replace("vllm", "redis").replace("one", "cache")
    text = f"{redis}---\n{_POD}"
    done = injected([("pod.yaml", text)], MINE)
    assert done.texts[0].startswith(redis)
    assert ["left as it is" in str(each) for each in done.warnings] == [True]
    labelled = redis.replace("{name: cache}", "{name: cache, labels: {sidecar.infra.ai/inject: enabled}}")
    assert "no container looks like" in refused(f"{labelled}---\n{_POD}")[0]


_ANCHORED = f"{_POD.replace('args: [', 'args:  &said [')}  - name: beside\n    image:  beside:1\n    args: *said\n"


def _list(count: int) -> str:
    item = "".join(f"  {line}" for line in _ANCHORED.splitlines(True))
    return "apiVersion: v1\nkind: List\nitems:\n" + f"- {item[2:]}" * count


def test_a_long_list_is_looked_at_no_more_often_than_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def counted(text: str) -> Node | None:
        looks.append(len(text))
        return compose(text)

    for module in (edit, spelling, documents):
        monkeypatch.setattr(module, "compose", counted)
    counts = []
    for items in (2, 12):
        looks.clear()
        once = there(_list(items))
        counts.append(len(looks))
        assert back(once) == _list(items)
    assert counts[0] == counts[1]


_STRANGE = "kind: InferenceService\nspec: {predictor: {containers: [{name: k, image: vllm/vllm-openai:v1}]}}\n"


def test_a_kind_that_is_not_known_and_has_containers_is_told() -> None:
    text = f"apiVersion: serving.kserve.io/v1beta1\n{_STRANGE}"
    (alone,) = refused(text)
    assert "(InferenceService): left as it is: it has containers" in alone
    done = injected([("pod.yaml", f"{text}---\n{_POD}")], MINE)
    assert done.texts[0].startswith(text) and [alone in str(each) for each in done.warnings] == [True]


def test_a_mark_of_the_byte_order_stays() -> None:
    text = f"\ufeff{_POD}"
    once = there(text)
    assert once == f"\ufeff{there(_POD)}" and back(once) == text


def test_a_list_of_one_kind_is_one() -> None:
    items = "".join(f"- {line}" if not number else f"  {line}" for number, line in enumerate(_POD.splitlines(True)[2:]))
    text = f"apiVersion: v1\nkind: PodList\nitems:\n{items}"
    once = there(text)
    assert "name: llm-sidecar\n" in once and back(once) == text


def test_who_wants_none_gets_none() -> None:
    text = _POD.replace("{name: one}", "{name: one, labels: {sidecar.infra.ai/inject: disabled}}")
    assert there(text) == text


def _service(name: str, ports: str, selector: str = "{app: chat}") -> str:
    spec = f"{{selector: {selector}, ports: {ports}}}"
    return f"---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec: {spec}\n"


def _served(services: str, links: str = "") -> Outcome:
    labelled = _POD.replace("{name: one}", "{name: one, labels: {app: chat, tier: gpu}}")
    return injected(
        [("pod.yaml", f"{labelled}    ports: [{{name: api, containerPort: 8000}}]\n{links}{services}")], MINE
    )


@pytest.mark.parametrize(
    ("services", "told"),
    [
        (_service("chat", "[{port: 80, targetPort: 8000}]"), 1),
        (_service("chat", "[{port: 80, targetPort: api}]"), 1),
        (_service("chat", "[{port: 8000}]"), 1),
        (_service("chat", "[{port: 80, targetPort: 9400}, {port: 9401}]"), 0),
        (_service("chat", "[{port: 8000}]", "{app: other}"), 0),
        (_service("chat", "[{port: 8000}]", "{}"), 0),
        (_service("vllm", "[{port: 80, targetPort: 9400}]"), 1),
    ],
)
def test_a_service_that_leads_nowhere_afterwards_is_told(services: str, told: int) -> None:
    done = _served(services)
    assert len(done.warnings) == told and done.texts[0].endswith(services)


def test_a_service_called_vllm_does_no_harm_without_its_variables() -> None:
    service = _service("vllm", "[{port: 80, targetPort: 9400}]")
    assert _served(service, "  enableServiceLinks: false\n").warnings == ()


STYLES = st.fixed_dictionaries(
    {
        "default_flow_style": st.sampled_from([False, False, None, True]),
        "indent": st.sampled_from([2, 4]),
        "width": st.sampled_from([40, 4096]),
        "explicit_start": st.booleans(),
    }
)


@settings(deadline=None, max_examples=60)
@given(pods(), STYLES)
def test_any_pod_written_in_any_style_is_injected_and_comes_back(pod: dict[str, Any], style: dict[str, Any]) -> None:
    value = {"apiVersion": "v1", "kind": "Pod", **pod}
    text = yaml.safe_dump(value, sort_keys=False, **style)
    done = inject(value, MINE)
    if not isinstance(done, Injected):
        assert injected([("pod.yaml", text)], MINE).problems
        return
    once = there(text)
    assert _said(once) == _less_texts(done.pod)
    assert there(once) == once
    assert back(once) == text
