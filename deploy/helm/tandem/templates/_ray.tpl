{{/* Pods of Ray. Each takes a dict: root, component, values. The first container is Ray's: KubeRay counts on it.
     Nothing of ours lies in Ray's object store: 80 MiB, a little above its minimum, fit into any /dev/shm. */}}

{{- define "tandem.headPod" -}}
metadata:
  {{- include "tandem.podMetadata" . | nindent 2 }}
spec:
  {{- include "tandem.podSpec" . | nindent 2 }}
  shareProcessNamespace: true  # the controller's Ray finds the node beside it by looking at processes
  containers:
    - name: ray-head
      {{- if not .root.Values.ray.operator.enabled }}
      command: [ray, start, --head, --block]
      args:
        {{- include "tandem.headArguments" .root | nindent 8 }}
      {{- end }}
      ports:
        - {name: gcs, containerPort: 6379}
        - {name: raylet, containerPort: 6380}
      {{- include "tandem.grpcProbes" (dict "port" 6379) | nindent 6 }}
      lifecycle: {preStop: {sleep: {seconds: {{ include "tandem.workerPauseSeconds" .root }}}}}
      resources:
        {{- toYaml .values.resources | nindent 8 }}
      {{- include "tandem.container" . | nindent 6 }}
      {{- include "tandem.headFaultTolerance" .root | nindent 8 }}
        - {name: RAY_health_check_period_ms, value: "1000"}
        - {name: RAY_health_check_timeout_ms, value: "1000"}
        - {name: RAY_health_check_failure_threshold, value: "5"}
    - name: controller
      command: [tandem, controller, --config, /etc/tandem/config.yaml, --ray-address, $(POD_IP):6379]
      ports:
        - {name: health, containerPort: 8081}
        - {name: controller, containerPort: 50053}
      startupProbe:
        httpGet: {path: /livez, port: health}
        periodSeconds: 2
        failureThreshold: 60
      livenessProbe:
        httpGet: {path: /livez, port: health}
        periodSeconds: 10
        timeoutSeconds: 5
      readinessProbe:
        httpGet: {path: /readyz, port: health}
        periodSeconds: 5
        timeoutSeconds: 5
      lifecycle: {preStop: {sleep: {seconds: {{ .root.Values.router.preStopSeconds }}}}}
      resources:
        {{- toYaml .values.controllerResources | nindent 8 }}
      {{- include "tandem.container" . | nindent 6 }}
{{- end -}}

{{- define "tandem.workerPod" -}}
metadata:
  {{- include "tandem.podMetadata" . | nindent 2 }}
spec:
  {{- include "tandem.podSpec" . | nindent 2 }}
  containers:
    - name: ray-worker
      {{- if not .root.Values.ray.operator.enabled }}
      command: [ray, start, --block]
      args:
        - --address={{ include "tandem.fullname" .root }}-head.{{ .root.Release.Namespace }}.svc:6379
        - --node-manager-port=6380
        - --object-store-memory=83886080
        - --resources={"tandem_{{ .component }}":1}
        {{- with .values.rayLabels }}
        - --labels={{ range $i, $key := keys . | sortAlpha }}{{ if $i }},{{ end }}{{ $key }}={{ get $.values.rayLabels $key }}{{ end }}
        {{- end }}
      {{- end }}
      ports:
        - {name: raylet, containerPort: 6380}
        - {name: metrics, containerPort: 9400}
      {{- include "tandem.grpcProbes" (dict "port" 6380) | nindent 6 }}
      # Its streams go on elsewhere; when the whole release ends, it waits for router and controller as before.
      lifecycle:
        preStop:
          exec:
            command:
              - tandem
              - leave
              - --registry={{ include "tandem.registry" .root }}:50052
              - --controller={{ include "tandem.controller" .root }}:50053
              - --after={{ add .root.Values.router.preStopSeconds 2 }}
              - --within={{ include "tandem.workerPauseSeconds" .root }}
      resources:
        {{- toYaml .values.resources | nindent 8 }}
      {{- include "tandem.container" . | nindent 6 }}
{{- end -}}

{{- define "tandem.headArguments" -}}
- --port=6379
- --node-manager-port=6380
- --num-cpus=0
- --object-store-memory=83886080
- --include-dashboard=false
{{- with .Values.ray.gcsFaultTolerance }}
{{- if and .enabled .auth.secretName }}
- --redis-password=$(REDIS_PASSWORD_OF_RAY)
{{- end }}
{{- end }}
{{- end -}}

{{/* Environment of a head that keeps its tables; KubeRay makes it itself from gcsFaultToleranceOptions. */}}
{{- define "tandem.headFaultTolerance" -}}
{{- $options := .Values.ray.gcsFaultTolerance -}}
{{- if and $options.enabled (not .Values.ray.operator.enabled) -}}
- {name: RAY_REDIS_ADDRESS, value: "{{ include "tandem.fullname" . }}-gcs:6379"}
- {name: RAY_external_storage_namespace, value: {{ include "tandem.fullname" . }}}
{{- with $options.auth }}
{{- if .secretName }}
- name: REDIS_PASSWORD_OF_RAY
  valueFrom:
    secretKeyRef: {name: {{ .secretName }}, key: {{ .secretKey }}}
{{- end }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Ray's GCS and raylet answer grpc.health.v1, with and without a token. Takes a dict: port. */}}
{{- define "tandem.grpcProbes" -}}
startupProbe:
  grpc: {port: {{ .port }}}
  periodSeconds: 2
  failureThreshold: 90
livenessProbe:
  grpc: {port: {{ .port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  grpc: {port: {{ .port }}}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end -}}
