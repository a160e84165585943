{{/* What the schema cannot say: values that each are good and together are not. */}}
{{- define "llm-sidecar.refusals" -}}
{{- $v := .Values }}
{{- if and $v.webhook.enabled $v.serving.enabled }}
{{- fail "webhook.enabled and serving.enabled: the webhook never looks at its own namespace; install it as a release of its own, in another" }}
{{- end }}
{{- if and $v.webhook.enabled (not $v.webhook.certificate.certManager) (not $v.webhook.certificate.caBundle) }}
{{- fail "webhook.certificate: without certManager the API server has to be told by caBundle whom to trust" }}
{{- end }}
{{- if $v.serving.enabled }}
{{- if has (toString $v.serving.maxUnavailable) (list "0" "0%") }}
{{- if eq $v.serving.kind "DaemonSet" }}
{{- fail "serving.maxUnavailable is 0: a DaemonSet has no spare card, so no roll-out could begin" }}
{{- else if has (toString $v.serving.maxSurge) (list "0" "0%") }}
{{- fail "serving.maxSurge and serving.maxUnavailable are both 0: no roll-out could begin" }}
{{- end }}
{{- end }}
{{- if and (eq $v.serving.kind "DaemonSet") $v.autoscaling.enabled }}
{{- fail "autoscaling.enabled: a DaemonSet is as many as there are machines" }}
{{- end }}
{{- if and (eq $v.serving.kind "DaemonSet") $v.candidate.enabled }}
{{- fail "candidate.enabled: a DaemonSet has the machines' only card, there is none for a second version" }}
{{- end }}
{{- if and $v.autoscaling.enabled (gt (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas)) }}
{{- fail "autoscaling.minReplicas is more than autoscaling.maxReplicas" }}
{{- end }}
{{- if and $v.candidate.enabled (eq $v.candidate.version $v.serving.version) }}
{{- fail "candidate.version is serving.version: routes could not tell them apart" }}
{{- end }}
{{- if and $v.candidate.enabled (eq $v.mesh.mode "none") }}
{{- fail "candidate.enabled: the mesh splits by version, and mesh.mode is none; let sidecars split (docs/routing.md)" }}
{{- end }}
{{- if and (eq $v.mesh.mode "ambient") (ne $v.serving.injection "webhook") }}
{{- fail "mesh.mode ambient: Istio adds nothing to these pods; serving.injection has to be webhook" }}
{{- end }}
{{- if and $v.breakers.request.enabled (ne $v.mesh.mode "sidecar") }}
{{- fail "breakers.request.enabled: classes are written by an EnvoyFilter, which only mesh.mode sidecar takes" }}
{{- end }}
{{- if and $v.breakers.session.enabled (not $v.tokens.enabled) }}
{{- fail "breakers.session.enabled: without tokens the session is what a client says it is; set tokens.enabled" }}
{{- end }}
{{- if and (eq $v.serving.injection "webhook") (or $v.sidecar.env $v.sidecar.redis.required (ne $v.sidecar.redis.secret "llm-sidecar-redis") (ne $v.sidecar.redis.key "url")) }}
{{- fail "serving.injection webhook: the webhook knows nothing of sidecar.env and sidecar.redis; leave them as they are" }}
{{- end }}
{{- if and $v.serving.priorityClass.create (not $v.serving.priorityClass.name) }}
{{- fail "serving.priorityClass.create: serving.priorityClass.name is empty" }}
{{- end }}
{{- if has "latest" (list $v.image.tag $v.engine.image.tag $v.candidate.tag) }}
{{- fail "an image's tag is latest, which is another image tomorrow: say which release" }}
{{- end }}
{{- $ours := list "POD_NAME" "NODE_NAME" "REDIS_URL" "SIDECAR_UPSTREAM" "SIDECAR_POLICY" "SIDECAR_LISTEN" "SIDECAR_ADMIN" "SIDECAR_CONTROL" "SIDECAR_OPERATORS" "SIDECAR_SETTLE" "SIDECAR_DRAIN" "SIDECAR_LOG_FORMAT" }}
{{- range $v.sidecar.env }}
{{- if has .name $ours }}
{{- fail (printf "sidecar.env: the chart itself says what %s is" .name) }}
{{- end }}
{{- end }}
{{- range $v.engine.env }}
{{- if has .name (list "HOME" "USER" "HF_TOKEN") }}
{{- fail (printf "engine.env: the chart itself says what %s is" .name) }}
{{- end }}
{{- end }}
{{- range $name := concat (keys $v.serving.podLabels) (keys $v.serving.podAnnotations) }}
{{- if has $name (list "app.kubernetes.io/name" "app.kubernetes.io/component" "version" "sidecar.infra.ai/inject" "sidecar.istio.io/inject" "kubectl.kubernetes.io/default-container" "sidecar.istio.io/nativeSidecar" "traffic.sidecar.istio.io/excludeInboundPorts" "proxy.istio.io/config") }}
{{- fail (printf "serving.podLabels, serving.podAnnotations: the chart itself says what %s is" $name) }}
{{- end }}
{{- end }}
{{- if or (hasKey $v.policy.settings "apiVersion") (hasKey $v.policy.settings "kind") }}
{{- fail "policy.settings: apiVersion and kind are written by the chart" }}
{{- end }}
{{- range list "policy.yaml" "breaker-node.yaml" "breaker-request.yaml" "breaker-session.yaml" }}
{{- if hasKey $v.policy.files . }}
{{- fail (printf "policy.files: %s is written by the chart; give yours another name" .) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
