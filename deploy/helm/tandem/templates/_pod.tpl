{{/* What all pods have in common. Takes a dict: root, component, values (of the component). Without the chart's version:
     a chart that renders the same pods replaces none. */}}
{{- define "tandem.podMetadata" -}}
labels:
  {{- include "tandem.selector" . | nindent 2 }}
annotations:
  checksum/config: {{ include "tandem.config" .root | sha256sum }}
  {{- with .values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Who runs, where, and how it ends. Takes the same dict. */}}
{{- define "tandem.podSpec" -}}
serviceAccountName: {{ include "tandem.serviceAccount" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "tandem.graceSeconds" .root }}
securityContext:
  {{- include "tandem.podSecurity" . | nindent 2 }}
{{- include "tandem.pullSecrets" .root }}
{{- if .values.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- tpl (toYaml .) $.root | nindent 2 }}
{{- end }}
{{- with .values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- tpl (toYaml .) $.root | nindent 2 }}
{{- end }}
{{- with include "tandem.modelInit" .root }}
initContainers:
  {{- . | nindent 2 }}
{{- end }}
volumes:
  {{- include "tandem.volumes" . | nindent 2 }}
{{- end -}}

{{- define "tandem.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "tandem.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Takes a dict with an optional ipcLock. */}}
{{- define "tandem.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- if .ipcLock }}
  add: [IPC_LOCK]
  {{- end }}
{{- end -}}

{{/* Not empty for pods of workers with a disk tier. */}}
{{- define "tandem.hasDiskCache" -}}
{{- if and .root.Values.config.disk_cache_bytes (has .component (list "prefill" "decode")) }}yes{{ end -}}
{{- end -}}

{{- define "tandem.volumes" -}}
{{- $model := .root.Values.model -}}
- name: config
  configMap:
    name: {{ include "tandem.fullname" .root }}-config
- name: tmp
  emptyDir: {}
{{- if include "tandem.hasDiskCache" . }}
- name: cache
  emptyDir: {}
{{- end }}
{{- with .values.shmSize }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ . }}
{{- end }}
{{- with .root.Values.redis.external.caSecretName }}
- name: redis-ca
  secret:
    secretName: {{ . }}
{{- end }}
- name: model
{{- if eq $model.source "claim" }}
  persistentVolumeClaim:
    claimName: {{ $model.claim.name }}
    readOnly: true
{{- else if eq $model.source "image" }}
  image:
    reference: {{ $model.image.reference }}
    pullPolicy: {{ $model.image.pullPolicy }}
{{- else }}
  emptyDir:
    sizeLimit: {{ $model.sizeLimit }}
{{- end }}
{{- end -}}

{{/* The init container that makes the model's folder; empty when a volume brings it. */}}
{{- define "tandem.modelInit" -}}
{{- if has .Values.model.source (list "default" "init") -}}
{{- $init := .Values.model.init -}}
- name: model
  securityContext:
    {{- include "tandem.containerSecurity" dict | nindent 4 }}
  {{- if eq .Values.model.source "default" }}
  image: {{ include "tandem.image" (dict "image" .Values.image "tag" .Chart.AppVersion) }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [tandem, model, fetch, --to, {{ include "tandem.modelFolder" . }}]
  {{- else }}
  image: {{ $init.image }}
  {{- with $init.command }}
  command: {{ toJson . }}
  {{- end }}
  {{- with $init.args }}
  args: {{ toJson . }}
  {{- end }}
  {{- end }}
  env:
    - {name: HOME, value: /tmp}
    - {name: TANDEM_CACHE, value: /tmp/tandem}
    {{- with $init.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  resources:
    {{- toYaml .Values.model.resources | nindent 4 }}
  volumeMounts:
    - {name: model, mountPath: /models}
    - {name: tmp, mountPath: /tmp}
{{- end -}}
{{- end -}}

{{/* Image, security, environment and mounts of every container of ours. Takes the dict of the pod. */}}
{{- define "tandem.container" -}}
{{- $values := .root.Values -}}
image: {{ include "tandem.image" (dict "image" $values.image "tag" .root.Chart.AppVersion) }}
imagePullPolicy: {{ $values.image.pullPolicy }}
securityContext:
  {{- include "tandem.containerSecurity" .values | nindent 2 }}
volumeMounts:
  - {name: config, mountPath: /etc/tandem, readOnly: true}
  - {name: model, mountPath: /models, readOnly: true}
  - {name: tmp, mountPath: /tmp}
  {{- if include "tandem.hasDiskCache" . }}
  - {name: cache, mountPath: /cache}
  {{- end }}
  {{- if .values.shmSize }}
  - {name: shm, mountPath: /dev/shm}
  {{- end }}
  {{- if $values.redis.external.caSecretName }}
  - {name: redis-ca, mountPath: /etc/tandem/redis-ca, readOnly: true}
  {{- end }}
env:
  - {name: HOME, value: /tmp}
  - {name: TANDEM_CACHE, value: /tmp/tandem}
  {{- include "tandem.redisEnv" .root | nindent 2 }}
  {{- include "tandem.rayEnv" .root | nindent 2 }}
  {{- with .values.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* TANDEM_REDIS_URL; a password comes from its Secret by Kubernetes' $(NAME). */}}
{{- define "tandem.redisEnv" -}}
{{- $redis := .Values.redis -}}
{{- $host := printf "%s-redis:6379/0" (include "tandem.fullname" .) -}}
{{- if and (eq $redis.mode "external") $redis.external.urlSecret.name -}}
- name: TANDEM_REDIS_URL
  valueFrom:
    secretKeyRef: {name: {{ $redis.external.urlSecret.name }}, key: {{ $redis.external.urlSecret.key }}}
{{- else if eq $redis.mode "external" -}}
- name: TANDEM_REDIS_URL
  value: {{ $redis.external.url | quote }}
{{- else if $redis.auth.secretName -}}
- name: INDEX_PASSWORD  # KubeRay refuses a head with REDIS_PASSWORD: that is of Ray's tables
  valueFrom:
    secretKeyRef: {name: {{ $redis.auth.secretName }}, key: {{ $redis.auth.secretKey }}}
- name: TANDEM_REDIS_URL
  value: redis://:$(INDEX_PASSWORD)@{{ $host }}
{{- else -}}
- name: TANDEM_REDIS_URL
  value: redis://{{ $host }}
{{- end }}
{{- end -}}

{{/* Ray's settings, the same in every process that speaks to Ray. */}}
{{- define "tandem.rayEnv" -}}
- name: POD_IP
  valueFrom:
    fieldRef: {fieldPath: status.podIP}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_worker_niceness, value: "0"}  # Ray's 15 would let any other process starve the engine
- {name: RAY_memory_monitor_refresh_ms, value: "0"}  # our pools are bounded; the pod has a limit of its own
- {name: RAY_process_group_cleanup_enabled, value: "true"}  # what a dead worker had started is killed, frozen or not: its ranks
- {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: "0"}  # preStop has drained; Ray would wait 30 s for its worker to end
- {name: RAY_gcs_rpc_server_reconnect_timeout_s, value: "600"}  # how long a worker waits for a head that is away
{{- with .Values.ray.auth }}
{{- if .secretName }}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .secretName }}, key: {{ .secretKey }}}
{{- else }}
- {name: RAY_AUTH_MODE, value: disabled}
{{- end }}
{{- end }}
{{- end -}}
