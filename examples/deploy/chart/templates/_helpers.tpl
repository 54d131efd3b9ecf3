{{- define "kvtier.name" -}}
{{ .Values.nameOverride | default .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "kvtier.selector" -}}
app.kubernetes.io/name: kvtier
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvtier.labels" -}}
{{ include "kvtier.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "kvtier.folder" -}}
{{ .Values.socketFolder }}/{{ include "kvtier.name" . }}
{{- end }}
