{{/*
The sidecar in a pod, as `sidecar inject` adds it. For a chart of your own, with this one as a dependency and
`serving.enabled: false`, give each the context of the dependency:

  {{- $sidecar := index .Subcharts "llm-sidecar" }}
  initContainers:
    - {{- include "llm-sidecar.container" $sidecar | nindent 6 }}
*/}}

{{/* An entry of `initContainers`: before the engine's own. */}}
{{- define "llm-sidecar.container" -}}
{{- $resources := .Values.sidecar.resources -}}
name: llm-sidecar
image: {{ include "llm-sidecar.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
restartPolicy: Always
args:
  - run
ports:
  - name: http-llm
    containerPort: 9400
    protocol: TCP
  - name: http-admin
    containerPort: 9401
    protocol: TCP
  - name: grpc-control
    containerPort: 9402
    protocol: TCP
env:
  - name: POD_NAME
    valueFrom:
      fieldRef:
        fieldPath: metadata.name
  - name: NODE_NAME
    valueFrom:
      fieldRef:
        fieldPath: spec.nodeName
  - name: REDIS_URL
    valueFrom:
      secretKeyRef:
        name: {{ .Values.sidecar.redis.secret | quote }}
        key: {{ .Values.sidecar.redis.key | quote }}
        optional: {{ not .Values.sidecar.redis.required }}
  - name: SIDECAR_UPSTREAM
    value: http://127.0.0.1:{{ int .Values.engine.port }}
  - name: SIDECAR_POLICY
    value: /etc/llm-sidecar/policy
  - name: SIDECAR_LISTEN
    value: ":9400"
  - name: SIDECAR_ADMIN
    value: ":9401"
  - name: SIDECAR_CONTROL
    value: ":9402"
  - name: SIDECAR_OPERATORS
    value: unix:///run/llm-sidecar/admin.sock
  - name: SIDECAR_SETTLE
    value: 5s
  - name: SIDECAR_DRAIN
    value: {{ int .Values.sidecar.drainSeconds }}s
  - name: SIDECAR_LOG_FORMAT
    value: json
  {{- with .Values.sidecar.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
resources:
  requests:
    cpu: {{ $resources.cpu | quote }}
    memory: {{ $resources.memory | quote }}
  {{- if or $resources.cpuLimit $resources.memoryLimit }}
  limits:
    {{- with $resources.cpuLimit }}
    cpu: {{ . | quote }}
    {{- end }}
    {{- with $resources.memoryLimit }}
    memory: {{ . | quote }}
    {{- end }}
  {{- end }}
# It does not wait for the engine, which starts after it.
startupProbe:
  httpGet:
    path: /livez
    port: 9401
  periodSeconds: 1
  timeoutSeconds: 3
  failureThreshold: 60
  terminationGracePeriodSeconds: 10
livenessProbe:
  httpGet:
    path: /livez
    port: 9401
  periodSeconds: 10
  timeoutSeconds: 3
  failureThreshold: 6
  # One that hangs has nothing to drain.
  terminationGracePeriodSeconds: 10
readinessProbe:
  httpGet:
    path: /readyz
    port: 9401
  periodSeconds: 2
  timeoutSeconds: 3
  failureThreshold: 1
lifecycle:
  preStop:
    exec:
      command:
        - sidecar
        - drain
        - --wait
        - {{ include "llm-sidecar.waitSeconds" . }}s
securityContext:
  runAsUser: 65532
  runAsGroup: 65532
  runAsNonRoot: true
  privileged: false
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop:
      - ALL
  seccompProfile:
    type: RuntimeDefault
volumeMounts:
  - name: llm-sidecar-run
    mountPath: /run/llm-sidecar
  - name: llm-sidecar-policy
    mountPath: /etc/llm-sidecar/policy
    readOnly: true
{{- end }}

{{/* Entries of the pod's `volumes`. */}}
{{- define "llm-sidecar.volumes" -}}
- name: llm-sidecar-run
  emptyDir:
    medium: Memory
    sizeLimit: 1Mi
- name: llm-sidecar-policy
  configMap:
    name: {{ .Values.policy.configMap | quote }}
    optional: true
{{- end }}

{{/* An entry of the engine's `volumeMounts`. */}}
{{- define "llm-sidecar.engineMount" -}}
name: llm-sidecar-run
mountPath: /run/llm-sidecar
readOnly: true
{{- end }}

{{/* The engine's `lifecycle.preStop`: it gets its SIGTERM, at which it would drop its requests, when the sidecar has none left. */}}
{{- define "llm-sidecar.enginePreStop" -}}
exec:
  command:
    - python3
    - -S
    - -c
    - |
      import os, socket, sys
      def ask(line):
          with socket.socket(socket.AF_UNIX) as s:
              s.settimeout(float(sys.argv[1]) + 5)
              s.connect("/run/llm-sidecar/admin.sock")
              head = "Host: sidecar\r\nContent-Length: 0\r\nConnection: close"
              s.sendall(f"{line} HTTP/1.1\r\n{head}\r\n\r\n".encode())
              s.makefile("rb").read()
      try:
          ask("POST /drain")
          ask(f"GET /drained?wait={sys.argv[1]}s")
      except OSError as e:
          print("no sidecar to wait for:", e, file=sys.stderr)
    - {{ include "llm-sidecar.waitSeconds" . | quote }}
{{- end }}

{{/* How a probe asks the engine, which is bound to loopback: from within. */}}
{{- define "llm-sidecar.engineProbe" -}}
exec:
  command:
    - python3
    - -S
    - -c
    - |
      import ssl, sys, urllib.request as u
      def get(url, timeout, *headers):
          direct = u.build_opener(u.ProxyHandler({}), u.HTTPSHandler(context=ssl._create_unverified_context()))
          direct.open(u.Request(url, headers=dict(h.split(":", 1) for h in headers)), timeout=float(timeout)).read(1)
      try:
          get(*sys.argv[1:])
      except Exception as e:
          sys.exit(f"{sys.argv[1]}: {e}")
    - http://127.0.0.1:{{ int .Values.engine.port }}/health
    - "5"
{{- end }}

{{/* The pod's terminationGracePeriodSeconds: the drain, and 30 s for the engine's own end. */}}
{{- define "llm-sidecar.graceSeconds" -}}
{{ add (include "llm-sidecar.waitSeconds" . | int) 30 }}
{{- end }}
