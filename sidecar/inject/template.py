"""Istio's custom injection template, from the same objects as everything else: Istio's own webhook adds the sidecar.

`python -m sidecar.inject.template > deploy/istio/injection/template.yaml` writes the values for istiod's chart; a pod
asks by its annotation `inject.istio.io/templates: sidecar,llm-sidecar`.

1. A template adds; it cannot read a command line. So the engine must listen on loopback and have probes from within by
   itself (docs/kubernetes.md); the command and the webhook do that for it.
2. Istio lays a pod's own containers over what a template says of them. So the engine gets our hook only where it has
   none: two hooks would be one pod with two handlers, which no API server takes.
3. Only what Go's templates and sprig have is used, none of Istio's own functions: so Helm can render it in a test.
"""

import sys
from typing import Final

from sidecar.inject import names
from sidecar.inject.container import (
    DRAIN_S,
    MARGIN_S,
    Object,
    Resources,
    Sidecar,
    container,
    engine_mount,
    engine_pre_stop,
    volumes,
)
from sidecar.inject.engines import DEFAULT_PORT
from sidecar.inject.write import Style, block

_MARK_S: Final = 7_777_777
"""A drain that nobody has: where it is written, the template's variable goes."""

_USUAL: Final = Resources()
_STYLE: Final = Style(2, 0)


def _said(annotation: str, default: object) -> str:
    shown = default if isinstance(default, int) else f'"{default}"'
    return f'(index .ObjectMeta.Annotations "{annotation}" | default {shown})'


_MARKED: Final = Sidecar(
    image="@image",
    policy="@policy",
    upstream="@upstream",
    drain_s=_MARK_S,
    resources=Resources("@cpu", "@memory", "@cpu-limit", "@memory-limit"),
)

_VALUES: Final = {
    "'@image'": f"{{{{ {_said(names.SIDECAR_IMAGE, names.IMAGE)} | quote }}}}",
    "'@policy'": f"{{{{ {_said(names.POLICY_NAME, names.POLICY)} | quote }}}}",
    "'@cpu'": f"{{{{ {_said(names.CPU, _USUAL.cpu)} | quote }}}}",
    "'@memory'": f"{{{{ {_said(names.MEMORY, _USUAL.memory)} | quote }}}}",
    "'@memory-limit'": f"{{{{ {_said(names.MEMORY_LIMIT, _USUAL.memory_limit)} | quote }}}}",
    f"{_MARKED.wait_s}": "{{ $wait }}",
    f"{_MARK_S}": "{{ $drain }}",
}

_HEAD: Final = f"""\
{{{{- $first := (index .Spec.Containers 0).Name }}}}
{{{{- $engine := index .ObjectMeta.Annotations "{names.ENGINE_CONTAINER}" | default $first }}}}
{{{{- $kind := index .ObjectMeta.Annotations "{names.ENGINE}" | default "vllm" }}}}
{{{{- $port := index .ObjectMeta.Annotations "{names.ENGINE_PORT}" | default {DEFAULT_PORT} }}}}
{{{{- $drain := int {_said(names.DRAIN, DRAIN_S)} }}}}
{{{{- $wait := add $drain {_MARKED.wait_s - _MARK_S} }}}}
{{{{- $grace := add $wait {MARGIN_S} }}}}
"""


def overlay() -> str:
    """The template's text: what is laid over a pod."""
    ours = block([container(_MARKED)], _STYLE)
    engine: Object = {"volumeMounts": [engine_mount()]}
    hook: Object = {"lifecycle": {"preStop": engine_pre_stop(_MARKED)}}
    text = "\n".join(
        (
            "spec:",
            "  {{- if lt (int .Spec.TerminationGracePeriodSeconds) (int $grace) }}",
            "  terminationGracePeriodSeconds: {{ $grace }}",
            "  {{- end }}",
            "  initContainers:",
            *_indented(_conditional(ours), 2),
            "  containers:",
            "  - name: {{ $engine | quote }}",
            *_indented(block(engine, _STYLE), 4),
            "    {{- range .Spec.Containers }}",
            "    {{- if and (eq .Name $engine) (not (and .Lifecycle .Lifecycle.PreStop)) }}",
            *_indented(block(hook, _STYLE), 4),
            "    {{- end }}",
            "    {{- end }}",
            "  volumes:",
            *_indented(_conditional(block(volumes(_MARKED), _STYLE)), 2),
            "",
        )
    )
    for mark, value in _VALUES.items():
        text = text.replace(mark, value)
    return _HEAD + text


def _conditional(lines: list[str]) -> list[str]:
    """What stands there only for some pods."""
    found: list[str] = []
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        match line.strip():
            case "value: '@upstream'":
                name = found.pop()
                body = [name, f"{indent}value: http://{names.LOOPBACK}:{{{{ $port }}}}"]
                found.extend([f'{indent}{{{{- if eq $kind "vllm" }}}}', *body, f"{indent}{{{{- end }}}}"])
            case "cpu: '@cpu-limit'":
                head = f'{indent}{{{{- with index .ObjectMeta.Annotations "{names.CPU_LIMIT}" }}}}'
                found.extend([head, f"{indent}cpu: {{{{ . | quote }}}}", f"{indent}{{{{- end }}}}"])
            case "optional: true" if "configMap" in found[-2]:
                found.append(f'{indent}optional: {{{{ eq $kind "vllm" }}}}')
            case _:
                found.append(line)
    return found


def values() -> str:
    """The values of istiod's chart."""
    lines = (
        "# Istio adds the sidecar: values for istiod's chart. Written by `python -m sidecar.inject.template`.",
        "#",
        "#   helm upgrade istiod istio/istiod --namespace istio-system --reuse-values --values template.yaml",
        "#",
        "# A pod asks by its annotation `inject.istio.io/templates: sidecar,llm-sidecar`. Native sidecars must be on",
        "# (pilot.env.ENABLE_NATIVE_SIDECARS: 'true', the default of recent releases).",
        "sidecarInjectorWebhook:",
        "  templates:",
        "    llm-sidecar: |",
        *_indented(overlay().splitlines(), 6),
        "",
    )
    return "\n".join(lines)


def _indented(lines: list[str], columns: int) -> list[str]:
    return [f"{' ' * columns}{line}" if line else "" for line in lines]


if __name__ == "__main__":
    sys.stdout.write(values())
