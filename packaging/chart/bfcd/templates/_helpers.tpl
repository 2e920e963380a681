{{- define "bfcd.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end }}
{{- end }}

{{- define "bfcd.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "bfcd.labels" -}}
{{ include "bfcd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "bfcd.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{- /* What all containers have; the image's user is bfcd. */}}
{{- define "bfcd.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "bfcd.where" -}}
securityContext:
  runAsUser: 9470
  runAsGroup: 9470
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* What both pods have. The PID namespace: bfcd identifies clients by their pids, and the driver of a GPU tells pids of
the host. */}}
{{- define "bfcd.pod" -}}
hostPID: true
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{ include "bfcd.where" . }}
initContainers:
  # The kubelet makes /run/bfcd for root.
  - name: folder
    {{- include "bfcd.image" . | nindent 4 }}
    command:
      - install
      - --directory
      - --owner=bfcd
      - --group=bfcd
      - /run/bfcd
      - /run/bfcd/client
    securityContext:
      {{- include "bfcd.security" . | replace "{drop: [ALL]}" "{drop: [ALL], add: [CHOWN, DAC_OVERRIDE, FOWNER]}" | nindent 6 }}
      runAsUser: 0
      runAsGroup: 0
    volumeMounts:
      - {name: run, mountPath: /run/bfcd}
{{- end }}

{{- define "bfcd.runVolume" -}}
- name: run
  hostPath: {path: /run/bfcd, type: DirectoryOrCreate}
{{- end }}

{{- define "bfcd.bfcdConfig" -}}
socket: {path: /run/bfcd/client/bfcd.sock, mode: "0666"}
admin_socket: {path: /run/bfcd/admin.sock, mode: "0600"}
monitor_socket: {path: /run/bfcd/monitor.sock, mode: "0660", group: bfcd-monitor}
lease_socket: {path: /run/bfcd/lease.sock, mode: "0660", group: bfcd-lease}
{{ toYaml .Values.config }}
{{- end }}

{{- define "bfcd.driverConfig" -}}
socket: /run/bfcd/lease.sock
clientFolder: /run/bfcd/client
cdiFolder: {{ .Values.cdiFolder }}
gpuDevices: {{ concat (.Values.gpu.proxy | ternary (list "bfcd/client=proxy") list) .Values.gpu.devices | toJson }}
tenants: {{ include "bfcd.tenants" . }}
{{- end }}

{{- /* Not a default value, which Helm would add to those that are given. */}}
{{- define "bfcd.tenants" -}}
{{- $known := list }}
{{- range .Values.config.tenants }}{{ $known = append $known .name }}{{ end }}
{{- $tenants := .Values.tenants | default (dict "default" "default") }}
{{- range $namespace, $tenant := $tenants }}
{{- if not (has $tenant $known) }}
{{- fail (printf "tenants: the namespace '%s' has the tenant '%s', which is not in config.tenants" $namespace $tenant) }}
{{- end }}
{{- end }}
{{- toJson $tenants }}
{{- end }}

{{- define "bfcd.hasGPU" -}}
{{- range .Values.config.devices }}{{ if ne .id "host" }}true{{ end }}{{ end }}
{{- end }}

{{- define "bfcd.hasProxy" -}}
{{- if .Values.gpu.proxy }}{{ include "bfcd.hasGPU" . }}{{ end }}
{{- end }}

{{- /* As integrations/containers/bfcd.yaml.in, for the files that the container "proxy" installs. */}}
{{- define "bfcd.cdi" -}}
cdiVersion: "0.3.0"
kind: bfcd/client
devices:
  - name: proxy
    containerEdits:
      env:
        - LD_LIBRARY_PATH=/usr/lib/bfcd/preload:/usr/lib/bfcd/preload/nvml:/usr/lib/bfcd
      mounts:
        {{- range $file, $folder := dict "libcuda.so.1" "preload/" "libnvidia-ml.so.1" "preload/nvml/" "libbfcclient.so.0" "" }}
        - hostPath: {{ $.Values.gpu.proxyFolder }}/{{ $file }}
          containerPath: /usr/lib/bfcd/{{ $folder }}{{ $file }}
          options: [bind, ro, nosuid, nodev]
        {{- end }}
{{- end }}
