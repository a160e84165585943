{{/* The sidecar's image. */}}
{{- define "llm-sidecar.image" -}}
{{- $image := .Values.image -}}
{{ $image.repository }}{{ if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{/* Labels of what a serving release makes. Pods have no chart's label: another chart would be a roll-out. */}}
{{- define "llm-sidecar.labels" -}}
app.kubernetes.io/name: {{ .Values.name | quote }}
{{ include "llm-sidecar.chartLabels" . }}
{{- end }}

{{- define "llm-sidecar.chartLabels" -}}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* What selects all pods of the service, of all versions. */}}
{{- define "llm-sidecar.selector" -}}
selector:
  matchLabels:
    app.kubernetes.io/name: {{ .Values.name | quote }}
{{- end }}

{{/* Where the issuer's keys are. */}}
{{- define "llm-sidecar.jwksUri" -}}
{{ .Values.tokens.jwksUri | default (printf "%s/protocol/openid-connect/certs" .Values.tokens.issuer) }}
{{- end }}

{{/* Seconds that a drain takes at most: settle, streams, those that are cut. The engine's hook and istio-proxy wait as long. */}}
{{- define "llm-sidecar.waitSeconds" -}}
{{ add 5 (int .Values.sidecar.drainSeconds) 5 }}
{{- end }}
