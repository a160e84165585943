"""Istio's template is written from the block. What Go makes of it, tests/deploy/test_injection.py looks at."""

import re

import yaml

from sidecar.inject.container import Sidecar, container
from sidecar.inject.template import overlay, values
from tests.checks.drift import ROOT


def test_the_file_is_what_the_block_says() -> None:
    path = ROOT / "deploy" / "istio" / "injection" / "template.yaml"
    assert path.read_text(encoding="utf-8") == values(), f"python -m sidecar.inject.template > {path.relative_to(ROOT)}"


def test_the_values_have_the_template_as_it_is() -> None:
    (template,) = yaml.safe_load(values())["sidecarInjectorWebhook"]["templates"].items()
    assert template == ("llm-sidecar", overlay())


def test_no_mark_is_left_and_each_opened_bracket_is_closed() -> None:
    text = overlay()
    assert "@" not in text and "7777" not in text
    assert text.count("{{") == text.count("}}") == len(re.findall(r"\{\{.*?\}\}", text))
    opened = len(re.findall(r"\{\{-? (?:if|with|range)\b", text))
    assert opened == len(re.findall(r"\{\{- end \}\}", text))


def test_what_does_not_depend_on_the_pod_is_there_word_for_word() -> None:
    bare = re.sub(r"\n *\{\{-.*?\}\}(?=\n)", "", overlay().partition("spec:\n")[2])
    bare = re.sub(r"\{\{.*?default (\S+?)\)? (?:\| quote )?\}\}", r"\1", bare)
    bare = bare.replace("{{ $drain }}", "600").replace("{{ $wait }}", "610").replace("{{ $port }}", "8000")
    bare = re.sub(r"\n *cpu: \{\{ \. \| quote \}\}", "", bare)
    bare = bare.replace('{{ eq $kind "vllm" }}', "true").replace("{{ $engine | quote }}", "x")
    spec = yaml.safe_load(f"spec:\n  terminationGracePeriodSeconds: 0\n{bare[bare.index('  initContainers') :]}")[
        "spec"
    ]
    assert spec["initContainers"] == [container(Sidecar())]
