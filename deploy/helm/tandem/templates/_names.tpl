{{/* The name of the release's objects, with room for suffixes: a StatefulSet's name may have 52 characters. */}}
{{- define "tandem.fullname" -}}
{{- $long := default (printf "%s-%s" .Release.Name (default .Chart.Name .Values.nameOverride)) .Values.fullnameOverride -}}
{{- if not (regexMatch "^[a-z][-a-z0-9]*$" $long) -}}
{{- fail (printf "fullnameOverride: %q, of which Services are named, must begin with a letter and have no dot" $long) -}}
{{- end -}}
{{- if gt (len $long) 40 -}}
{{- printf "%s-%s" ($long | trunc 31 | trimSuffix "-") ($long | sha256sum | trunc 8) -}}
{{- else -}}
{{- $long -}}
{{- end -}}
{{- end -}}

{{- define "tandem.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "tandem.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{/* What selects a component's pods. Takes a dict: root, component. */}}
{{- define "tandem.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* All labels of an object. Takes a dict: root, component. */}}
{{- define "tandem.labels" -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: tandem
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* name, labels and namespace of an object. Takes a dict: root, component, and suffix where it is not the component. */}}
{{- define "tandem.metadata" -}}
{{- $suffix := get . "suffix" | default .component -}}
name: {{ include "tandem.fullname" .root }}-{{ $suffix }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "tandem.labels" . | nindent 2 }}
{{- end -}}

{{/* Takes a dict: image (repository, tag, digest), tag (when it has none). */}}
{{- define "tandem.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .tag }}
{{- end -}}
{{- end -}}

{{/* How long a worker outlives the word to stop, in seconds: until router and controller have drained. */}}
{{- define "tandem.workerPauseSeconds" -}}
{{- addf .Values.config.drain_timeout_s .Values.router.preStopSeconds 10 | ceil | int -}}
{{- end -}}

{{/* How long any pod may take to end, in seconds: that, and time to close everything. */}}
{{- define "tandem.graceSeconds" -}}
{{- add (include "tandem.workerPauseSeconds" .) 30 -}}
{{- end -}}

{{- define "tandem.modelFolder" -}}
/models/{{ .Values.model.path | default .Values.model.name }}
{{- end -}}

{{- define "tandem.controller" -}}
{{ include "tandem.fullname" . }}-controller.{{ .Release.Namespace }}.svc
{{- end -}}

{{- define "tandem.registry" -}}
{{ include "tandem.fullname" . }}-registry.{{ .Release.Namespace }}.svc
{{- end -}}

{{/* How many workers of a pool are wanted. Takes the pool's values. */}}
{{- define "tandem.wanted" -}}
{{- ternary .replicas .autoscaling.maxReplicas (eq .autoscaling.kind "none") -}}
{{- end -}}
