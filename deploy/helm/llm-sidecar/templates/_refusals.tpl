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
{{- if and (not $v.engine.simulated) (eq $v.serving.kind "Deployment") (lt (int $v.serving.progressDeadlineSeconds) (int $v.engine.startSeconds)) }}
{{- fail "serving.progressDeadlineSeconds is less than engine.startSeconds: a roll-out would count as failed while the model is loaded" }}
{{- end }}
{{- range $what := list (list "sidecar" "memory" $v.sidecar.resources.memory $v.sidecar.resources.memoryLimit) (list "sidecar" "cpu" $v.sidecar.resources.cpu $v.sidecar.resources.cpuLimit) (list "engine" "memory" $v.engine.resources.memory $v.engine.resources.memoryLimit) (list "engine" "ephemeralStorage" $v.engine.resources.ephemeralStorage $v.engine.resources.ephemeralStorageLimit) }}
{{- $limit := index $what 3 }}
{{- if and $limit (gt (include "llm-sidecar.quantity" (index $what 2) | float64) (include "llm-sidecar.quantity" $limit | float64)) }}
{{- fail (printf "%s.resources.%s is more than its limit, %s: no pod could be made" (index $what 0) (index $what 1) $limit) }}
{{- end }}
{{- end }}
{{- if and $v.podDisruptionBudget.enabled (has (toString $v.podDisruptionBudget.maxUnavailable) (list "0" "0%")) }}
{{- fail "podDisruptionBudget.maxUnavailable is 0: no machine could be emptied" }}
{{- end }}
{{- if and $v.serviceMonitor.enabled (gt (int $v.serviceMonitor.timeoutSeconds) (int $v.serviceMonitor.intervalSeconds)) }}
{{- fail "serviceMonitor.timeoutSeconds is more than intervalSeconds, which Prometheus does not take" }}
{{- end }}
{{- range list "app.kubernetes.io/name" "app.kubernetes.io/managed-by" "helm.sh/chart" }}
{{- if hasKey $v.serviceMonitor.labels . }}
{{- fail (printf "serviceMonitor.labels: the chart itself says what %s is" .) }}
{{- end }}
{{- end }}
{{- range concat $v.engine.args $v.candidate.args }}
{{- if or (hasPrefix "--uds" .) (hasPrefix "--ssl-" .) }}
{{- fail (printf "engine.args, candidate.args: with %s the sidecar does not reach the engine, which it asks by HTTP on loopback" .) }}
{{- end }}
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
{{- range $name := concat (keys $v.serving.podLabels) (keys $v.serving.podAnnotations) }}
{{- if hasPrefix "sidecar.infra.ai/" $name }}
{{- fail (printf "serving.podLabels, serving.podAnnotations: values say what %s is" $name) }}
{{- end }}
{{- end }}
{{- if contains "llm-sidecar" (index $v.serving.podAnnotations "inject.istio.io/templates" | default "") }}
{{- fail "serving.podAnnotations: Istio's template would add the sidecar a second time" }}
{{- end }}
{{- if or (hasKey $v.policy.settings "apiVersion") (hasKey $v.policy.settings "kind") }}
{{- fail "policy.settings: apiVersion and kind are written by the chart" }}
{{- end }}
{{- $bytes := 0 }}
{{- range $name, $text := $v.policy.files }}
{{- $bytes = add $bytes (len $text) }}
{{- with (fromYaml $text).Error }}
{{- fail (printf "policy.files: %s: %s" $name .) }}
{{- end }}
{{- end }}
{{- if gt (int $bytes) 900000 }}
{{- fail (printf "policy.files: %d bytes, and a ConfigMap has a million at most" (int $bytes)) }}
{{- end }}
{{- range list "policy.yaml" "breaker-node.yaml" "breaker-request.yaml" "breaker-session.yaml" }}
{{- if hasKey $v.policy.files . }}
{{- fail (printf "policy.files: %s is written by the chart; give yours another name" .) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* What a quantity (500m, 96Gi) is as a number. */}}
{{- define "llm-sidecar.quantity" -}}
{{- $units := dict "m" 0.001 "" 1.0 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 -}}
{{- $unit := regexFind "[A-Za-z]*$" . -}}
{{ mulf (trimSuffix $unit . | float64) (index $units $unit) }}
{{- end }}
