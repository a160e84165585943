{{/* The engine's workload with the sidecar in its pods; a dict of root, name, version, replicas, tag, model and args. */}}
{{- define "llm-sidecar.workload" -}}
{{- $v := .root.Values -}}
{{- $here := eq $v.serving.injection "manifest" -}}
{{- $daemon := eq $v.serving.kind "DaemonSet" -}}
{{- $resources := $v.engine.resources -}}
apiVersion: apps/v1
kind: {{ $v.serving.kind }}
metadata:
  name: {{ .name | quote }}
  namespace: {{ .root.Release.Namespace | quote }}
  labels:
    {{- include "llm-sidecar.labels" .root | nindent 4 }}
    app.kubernetes.io/component: inference
    version: {{ .version | quote }}
spec:
  {{- if not (or $daemon (and $v.autoscaling.enabled (eq .name $v.name))) }}
  replicas: {{ int .replicas }}
  {{- end }}
  revisionHistoryLimit: 5
  {{- if $daemon }}
  # A new one comes when the old one has gone: there is one card for it.
  updateStrategy:
    type: RollingUpdate
    rollingUpdate:
      maxUnavailable: {{ $v.serving.maxUnavailable }}
  {{- else }}
  progressDeadlineSeconds: {{ int $v.serving.progressDeadlineSeconds }}
  strategy:
    type: RollingUpdate
    rollingUpdate:
      maxSurge: {{ $v.serving.maxSurge }}
      maxUnavailable: {{ $v.serving.maxUnavailable }}
  {{- end }}
  selector:
    matchLabels:
      app.kubernetes.io/name: {{ $v.name | quote }}
      version: {{ .version | quote }}
  template:
    metadata:
      labels:
        app.kubernetes.io/name: {{ $v.name | quote }}
        app.kubernetes.io/component: inference
        version: {{ .version | quote }}
        {{- if not $here }}
        sidecar.infra.ai/inject: enabled
        {{- end }}
        {{- if eq $v.mesh.mode "ambient" }}
        # Beside ambient's capture there must be no istio-proxy.
        sidecar.istio.io/inject: "false"
        {{- end }}
        {{- with $v.serving.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      annotations:
        kubectl.kubernetes.io/default-container: {{ $v.name | quote }}
        {{- if eq $v.mesh.mode "sidecar" }}
        # istio-proxy is a native sidecar as well: it starts before ours and ends after it.
        sidecar.istio.io/nativeSidecar: "true"
        # Kubelet and Prometheus ask the admin port directly. It is read only; orders come by the socket.
        traffic.sidecar.istio.io/excludeInboundPorts: "9401"
        # How long streams may outlive a listener that istiod changed, or that drains at the pod's end: as ours do.
        proxy.istio.io/config: |
          drainDuration: {{ include "llm-sidecar.waitSeconds" .root }}s
        {{- end }}
        {{- if not $here }}
        {{- include "llm-sidecar.told" .root | nindent 8 }}
        {{- end }}
        {{- with $v.serving.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      serviceAccountName: {{ $v.name | quote }}
      automountServiceAccountToken: false
      # A Service "vllm" sets VLLM_PORT, which the engine takes for its own.
      enableServiceLinks: false
      {{- if $here }}
      terminationGracePeriodSeconds: {{ include "llm-sidecar.graceSeconds" .root }}
      {{- end }}
      {{- with $v.imagePullSecrets }}
      imagePullSecrets:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $v.serving.priorityClass.name }}
      priorityClassName: {{ . | quote }}
      {{- end }}
      securityContext:
        runAsNonRoot: true
        seccompProfile:
          type: RuntimeDefault
      {{- with $v.serving.nodeSelector }}
      nodeSelector:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if $resources.gpus }}
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms:
              # A whole card: where MIG's strategy is "single", or cards are shared, nvidia.com/gpu is a part of one.
              - matchExpressions:
                  - key: nvidia.com/mig.strategy
                    operator: NotIn
                    values: [single]
                  - key: nvidia.com/gpu.sharing-strategy
                    operator: NotIn
                    values: [time-slicing, mps]
      {{- end }}
      {{- if or $resources.gpus $v.serving.tolerations }}
      tolerations:
        {{- if $resources.gpus }}
        - key: nvidia.com/gpu
          operator: Exists
          effect: NoSchedule
        {{- end }}
        {{- with $v.serving.tolerations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- end }}
      {{- if $v.serving.spread }}
      topologySpreadConstraints:
        {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
        - maxSkew: 1
          topologyKey: {{ . | quote }}
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels:
              app.kubernetes.io/name: {{ $v.name | quote }}
          matchLabelKeys: [pod-template-hash]
        {{- end }}
      {{- end }}
      {{- if $here }}
      initContainers:
        -
          {{- include "llm-sidecar.container" .root | nindent 10 }}
      {{- end }}
      containers:
        - name: {{ $v.name | quote }}
          {{- if $v.engine.simulated }}
          image: {{ include "llm-sidecar.image" .root }}
          args:
            - demo
            - --listen=127.0.0.1:{{ int $v.engine.port }}
            - --admin=off
            - --control=off
            - --redis=local
            {{- with .args }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          {{- with $v.engine.env }}
          env:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          {{- else }}
          image: {{ printf "%s:%s" $v.engine.image.repository .tag | quote }}
          args:
            - {{ printf "--model=%s" .model | quote }}
            {{- with .args }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
            - --host=127.0.0.1
            - --port={{ int $v.engine.port }}
          env:
            # All that it writes is below: models, compiled kernels.
            - name: HOME
              value: /data
            - name: USER
              value: vllm
            - name: HF_TOKEN
              valueFrom:
                secretKeyRef:
                  name: {{ $v.engine.tokenSecret.name | quote }}
                  key: {{ $v.engine.tokenSecret.key | quote }}
                  optional: true
            {{- with $v.engine.env }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          {{- end }}
          resources:
            requests:
              cpu: {{ $resources.cpu | quote }}
              memory: {{ $resources.memory | quote }}
              {{- with $resources.ephemeralStorage }}
              ephemeral-storage: {{ . | quote }}
              {{- end }}
            limits:
              memory: {{ $resources.memoryLimit | quote }}
              {{- with $resources.ephemeralStorageLimit }}
              ephemeral-storage: {{ . | quote }}
              {{- end }}
              {{- if $resources.gpus }}
              nvidia.com/gpu: {{ int $resources.gpus | quote }}
              {{- end }}
          startupProbe:
            {{- include "llm-sidecar.probe" .root | nindent 12 }}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: {{ div (int $v.engine.startSeconds) 10 }}
            terminationGracePeriodSeconds: 30
          livenessProbe:
            {{- include "llm-sidecar.probe" .root | nindent 12 }}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
            # The pod's grace is for its streams' end, not for an engine that hangs.
            terminationGracePeriodSeconds: 30
          readinessProbe:
            {{- include "llm-sidecar.probe" .root | nindent 12 }}
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: 2
          {{- if $here }}
          lifecycle:
            preStop:
              {{- include "llm-sidecar.enginePreStop" .root | nindent 14 }}
          {{- end }}
          securityContext:
            runAsUser: {{ int $v.engine.user }}
            runAsGroup: {{ int $v.engine.group }}
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities:
              drop: [ALL]
          volumeMounts:
            - name: data
              mountPath: /data
            - name: shm
              mountPath: /dev/shm
            - name: tmp
              mountPath: /tmp
            {{- if $here }}
            -
              {{- include "llm-sidecar.engineMount" .root | nindent 14 }}
            {{- end }}
      volumes:
        - name: data
          {{- if $v.engine.storage.claim }}
          persistentVolumeClaim:
            claimName: {{ $v.engine.storage.claim | quote }}
          {{- else }}
          emptyDir:
            sizeLimit: {{ $v.engine.storage.data | quote }}
          {{- end }}
        - name: shm
          emptyDir:
            medium: Memory
            sizeLimit: {{ $v.engine.storage.shm | quote }}
        - name: tmp
          emptyDir:
            sizeLimit: {{ $v.engine.storage.tmp | quote }}
        {{- if $here }}
        {{- include "llm-sidecar.volumes" .root | nindent 8 }}
        {{- end }}
{{- end }}

{{/* How a probe asks: from within, or as one would write it, which the webhook turns into the same for engines it knows. */}}
{{- define "llm-sidecar.probe" -}}
{{- if or (eq .Values.serving.injection "manifest") .Values.engine.simulated }}
{{- include "llm-sidecar.engineProbe" . }}
{{- else -}}
httpGet:
  path: /health
  port: {{ int .Values.engine.port }}
{{- end }}
{{- end }}

{{/* What the webhook is told of the sidecar, where it is not what it takes by itself. */}}
{{- define "llm-sidecar.told" -}}
{{- $sidecar := .Values.sidecar -}}
{{- $resources := $sidecar.resources -}}
{{- /* By its image the webhook knows vLLM's own alone. */}}
{{- $known := and (not .Values.engine.simulated) (hasSuffix "vllm/vllm-openai" .Values.engine.image.repository) -}}
{{- $said := dict
  "engine" (list "vllm" (ternary "vllm" "" $known))
  "engine-container" (list .Values.name (ternary .Values.name "" $known))
  "engine-port" (list (int .Values.engine.port | toString) "8000")
  "policy" (list .Values.policy.configMap "llm-sidecar-policy")
  "drain-seconds" (list (int $sidecar.drainSeconds | toString) "600")
  "image" (list (include "llm-sidecar.image" .) (printf "llm-sidecar:%s" .Chart.AppVersion))
  "cpu" (list $resources.cpu "500m")
  "cpu-limit" (list $resources.cpuLimit "")
  "memory" (list $resources.memory "256Mi")
  "memory-limit" (list $resources.memoryLimit "512Mi") -}}
{{- range $name, $both := $said }}
{{- if ne (first $both) (last $both) }}
sidecar.infra.ai/{{ $name }}: {{ first $both | quote }}
{{- end }}
{{- end }}
{{- end }}
