{{/* Who callers are: the mesh's word where istio-proxy is in the pod, else what the sidecar verifies itself. */}}
{{- define "llm-sidecar.identity" -}}
{{- if .Values.tokens.enabled }}
identity:
  {{- if eq .Values.mesh.mode "sidecar" }}
  jwt:
    issuers: [{{ .Values.tokens.issuer | quote }}]
    claims_header: x-jwt-payload
  {{- else }}
  session:
    - jwt_claim: {{ .Values.tokens.sessionClaim | quote }}
  jwt:
    verified_by: sidecar
    required: true
    providers:
      - issuer: {{ .Values.tokens.issuer | quote }}
        {{- with .Values.tokens.audiences }}
        audiences: {{ toJson . }}
        {{- end }}
        jwks_url: {{ include "llm-sidecar.jwksUri" . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* policy.yaml. */}}
{{- define "llm-sidecar.policy" -}}
{{- $identity := include "llm-sidecar.identity" . | fromYaml -}}
apiVersion: sidecar/v1
kind: Policy
{{ mergeOverwrite $identity (deepCopy .Values.policy.settings) | toYaml }}
{{- end }}

{{/* One breaker's file; a list of context, scope's word and spec. */}}
{{- define "llm-sidecar.breaker" -}}
apiVersion: resilience.example.com/v1
kind: CircuitBreakerPolicy
metadata:
  name: {{ first . }}-level-cb
spec:
  {{- last . | toYaml | nindent 2 }}
{{- end }}
