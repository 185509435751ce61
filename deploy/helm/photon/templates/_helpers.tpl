{{/* The gRPC port of each role. */}}
{{- define "photon.ports" -}}
registry: 7400
eventstore: 7410
joiner: 7420
dispatcher: 7430
{{- end }}

{{/* How many pods of a role this datacenter has: (list $own role). */}}
{{- define "photon.count" -}}
{{- $own := index . 0 -}}{{- $role := index . 1 -}}
{{- if eq $role "registry" }}{{ len ($own.registry | default list) }}{{ else }}{{ index $own (printf "%ss" $role) | default 0 | int }}{{ end -}}
{{- end }}

{{/* "host:port", ... of a role's pods: (list name own role port). */}}
{{- define "photon.addresses" -}}
{{- $name := index . 0 -}}{{- $own := index . 1 -}}{{- $role := index . 2 -}}{{- $port := index . 3 -}}
{{- $found := list -}}
{{- range $n := until (include "photon.count" (list $own $role) | int) -}}
{{- $found = append $found (printf "%s-%s-%d.%s-%s.%s:%d" $name $role $n $name $role $own.domain $port | quote) -}}
{{- end -}}
{{- join ", " $found -}}
{{- end }}

{{- define "photon.image" -}}
{{- if .Values.image.digest }}{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else }}{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end -}}
{{- end }}

{{- define "photon.labels" -}}
app.kubernetes.io/name: photon
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
photon/datacenter: {{ .Values.datacenter }}
{{- end }}

{{/* photon.toml: the same in all datacenters. */}}
{{- define "photon.toml" -}}
{{- $ports := include "photon.ports" . | fromYaml -}}
[system]
out = "/data/out"
work = "/data/work"
secret_file = "/run/photon/secret"

[network]
bind = "0.0.0.0"

[tls]
cert = "/certs/tls.crt"
key = "/certs/tls.key"
ca = "/certs/ca.crt"

[metrics]
serve = true
{{ range $table, $values := .Values.settings }}
[{{ $table }}]
{{- range $key, $value := $values }}
{{ $key }} = {{ if kindIs "float64" $value }}{{ if eq (floor $value) $value }}{{ int64 $value }}{{ else }}{{ $value }}{{ end }}{{ else }}{{ toJson $value }}{{ end }}
{{- end }}
{{ end }}
{{- range $name, $own := .Values.datacenters }}
[datacenters.{{ $name }}]
{{- with $own.region }}
region = {{ . | quote }}
{{- end }}
{{- if or $own.dispatchers $own.joiners }}
primary = {{ toJson $own.primary }}
foreign = {{ toJson $own.foreign }}
{{- range $role := list "eventstore" "joiner" "dispatcher" }}
{{ $role }}s = [{{ include "photon.addresses" (list $name $own $role (index $ports $role | int)) }}]
{{- end }}
{{- end }}
{{ range $n, $replica := $own.registry }}
[replicas.{{ $replica }}]
datacenter = {{ $name | quote }}
grpc = "{{ $name }}-registry-{{ $n }}.{{ $name }}-registry.{{ $own.domain }}:7400"
raft = "{{ $name }}-registry-{{ $n }}.{{ $name }}-registry.{{ $own.domain }}:7401"
{{ end }}
{{- end }}
{{- end }}

{{/* What can be known to be wrong before anything is made. */}}
{{- define "photon.check" -}}
{{- if not (hasKey .Values.datacenters .Values.datacenter) }}
{{- fail (printf "datacenter '%s' is not among datacenters: %s" .Values.datacenter (keys .Values.datacenters | sortAlpha | join ", ")) }}
{{- end }}
{{- $names := list }}
{{- range .Values.datacenters }}{{ $names = concat $names (.registry | default list) }}{{ end }}
{{- if lt (len $names) 3 }}{{ fail (printf "%d registry replicas in all datacenters: three at least, or none may fail" (len $names)) }}{{ end }}
{{- $domain := (index .Values.datacenters .Values.datacenter).domain | default "" }}
{{- $found := printf "%s.svc.cluster.local" .Release.Namespace }}
{{- if and (hasSuffix ".svc.cluster.local" $domain) (ne $domain $found) }}
{{- fail (printf "the pods of '%s' would be looked for under %s, but in this namespace they are under %s: name that as its domain, or install with --namespace %s" .Values.datacenter $domain $found (first (splitList "." $domain))) }}
{{- end }}
{{- if ne (len $names) (len (uniq $names)) }}{{ fail "two registry replicas have one name" }}{{ end }}
{{- end }}
