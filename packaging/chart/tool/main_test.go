// Helm's linter; what comes of several values, decoded as the API server would; the configuration of bfcd, by bfcd itself; and
// the examples.
//
// BFCD: the program. VERSION: that of meson.build.
//
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"errors"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	chart "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/lint"
	"helm.sh/helm/v4/pkg/chart/v2/lint/support"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	yamlstream "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

const (
	chartFolder = "../bfcd"
	examples    = "../../../examples/kubernetes/"
)

func load(t *testing.T) *chart.Chart {
	t.Helper()
	c, err := loader.Load(chartFolder)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func valuesOf(t *testing.T, text string) map[string]any {
	t.Helper()
	values := map[string]any{}
	if err := yaml.UnmarshalStrict([]byte(text), &values); err != nil {
		t.Fatal(err)
	}
	return values
}

// decode fails on a kind, a field or a type that Kubernetes does not know. Of a ServiceMonitor there are no types here.
func decode(t *testing.T, text string) []runtime.Object {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		corev1.AddToScheme, appsv1.AddToScheme, batchv1.AddToScheme, rbacv1.AddToScheme, resourceapi.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	decoder := json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme, scheme,
		json.SerializerOptions{Yaml: true, Strict: true})
	reader := yamlstream.NewYAMLReader(bufio.NewReader(strings.NewReader(text)))
	var objects []runtime.Object
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return objects
		}
		if err != nil {
			t.Fatal(err)
		}
		var any map[string]any
		if err := yaml.UnmarshalStrict(document, &any); err != nil {
			t.Fatalf("%v\n%s", err, document)
		}
		if len(any) == 0 || any["kind"] == "ServiceMonitor" {
			continue
		}
		object, _, err := decoder.Decode(document, nil, nil)
		if err != nil {
			t.Fatalf("%v\n%s", err, document)
		}
		objects = append(objects, object)
	}
}

// find returns the object of this type and name.
func find[T interface {
	runtime.Object
	GetName() string
}](t *testing.T, objects []runtime.Object, name string) T {
	t.Helper()
	for _, o := range objects {
		if found, ok := o.(T); ok && found.GetName() == name {
			return found
		}
	}
	t.Fatalf("there is no %s", name)
	panic("")
}

func renderAll(t *testing.T, values string) []runtime.Object {
	t.Helper()
	manifests, notes, err := render(load(t), valuesOf(t, values), "bfcd")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(notes, "kubectl --namespace bfcd exec daemonset/bfcd ") {
		t.Errorf("the notes are:\n%s", notes)
	}
	var text strings.Builder
	for _, manifest := range manifests {
		text.WriteString("---\n" + manifest + "\n")
	}
	if n, all := len(decode(t, plain(manifests))), len(decode(t, text.String())); n != all-2 { // the ConfigMap and the Job of a hook
		t.Errorf("the plain manifests have %d objects, of %d", n, all)
	}
	return decode(t, text.String())
}

const gpus = `
config:
  devices:
    - {id: host, size: 2GiB, partitions: [{name: ram, limit: 2GiB}]}
    - {id: "cuda:0", mps: allow, partitions: [{name: train, limit: 70GiB}]}
    - {id: GPU-1b1f9b3c-0000-4000-8000-0123456789ab, partitions: [{name: infer, limit: 75%}]}
  tenants:
    - name: vision
      match: {uid: [20001]}
      quotas: [{partition: train, limit: 50%, park: {to: ram, idle: 30s}}, {partition: ram}]
tenants: {vision: vision, vision-test: vision}
`

const all = `
image: {repository: registry.example.org/bfcd, tag: "1.2", pullPolicy: Always}
imagePullSecrets: [{name: registry}]
gpu: {runtimeClassName: "", visibleDevices: "", devices: []}
kubeletFolder: /var/lib/k0s/kubelet
cdiFolder: /etc/cdi
deviceClass: {create: false, name: memory}
metrics: {port: 9000, driverPort: 9001, serviceMonitor: {enabled: true, interval: 10s, labels: {release: prometheus}}}
nodeSelector: {bfcd: "true"}
affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: a, operator: Exists}]}]}}}
tolerations: [{key: nvidia.com/gpu, operator: Exists}]
priorityClassName: ""
podAnnotations: {example.org/a: b}
podLabels: {example.org/c: d}
resources:
  bfcd: {requests: {cpu: 100m, memory: 1Gi}}
  keeper: {requests: {memory: 2Gi}}
  exporter: {limits: {memory: 64Mi}}
  dra: {limits: {memory: 128Mi}}
`

func cases(t *testing.T) map[string]string {
	t.Helper()
	borrow, err := os.ReadFile(examples + "borrow-values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return map[string]string{"default": "", "gpus": gpus, "all": all, "gpus and all": gpus + all, "no metrics": "metrics: {enabled: false}",
		"borrow": string(borrow)}
}

func TestLint(t *testing.T) {
	for name, values := range cases(t) {
		for _, m := range lint.RunAll(chartFolder, valuesOf(t, values), "bfcd").Messages {
			if m.Severity > support.InfoSev {
				t.Errorf("%s: %s", name, m)
			}
		}
	}
}

func TestVersionIsThatOfMeson(t *testing.T) {
	m := load(t).Metadata
	if want := os.Getenv("VERSION"); m.Version != want || m.AppVersion != want {
		t.Errorf("Chart.yaml has version %s and appVersion %s, meson.build %s", m.Version, m.AppVersion, want)
	}
}

// check has bfcd read its configuration, without the GPUs.
func check(t *testing.T, config string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "bfcd.yaml")
	if err := os.WriteFile(path, []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(os.Getenv("BFCD"), "--no-memory", "--check", path, "--user", "root").CombinedOutput(); err != nil {
		t.Errorf("bfcd --check: %v\n%s%s", err, out, config)
	}
}

// Of the node, in the values here.
var nodeFolders = []string{"/run/bfcd", "/var/lib/bfcd", "/var/run/cdi", "/etc/cdi",
	"/var/lib/kubelet/plugins/memory.bfcd", "/var/lib/kubelet/plugins_registry",
	"/var/lib/k0s/kubelet/plugins/memory.bfcd", "/var/lib/k0s/kubelet/plugins_registry"}

// checkPod finds what nobody may get by a change of the chart unseen: a pod or a container with more rights than today. isOfNode:
// it may see the node's processes, and have folders of it.
func checkPod(t *testing.T, spec *corev1.PodSpec, isOfNode bool) {
	t.Helper()
	if spec.HostNetwork || spec.HostIPC || spec.HostPID != isOfNode || *spec.SecurityContext.RunAsUser != 9470 {
		t.Errorf("the pod shares %+v", spec)
	}
	for _, v := range spec.Volumes {
		if v.HostPath != nil && (*v.HostPath.Type != corev1.HostPathDirectoryOrCreate || !slices.Contains(nodeFolders, v.HostPath.Path) ||
			!isOfNode) {
			t.Errorf("the volume %s is of the node's %s", v.Name, v.HostPath.Path)
		}
	}
	for _, c := range slices.Concat(spec.InitContainers, spec.Containers) {
		s := c.SecurityContext
		if s == nil || s.Privileged != nil || *s.AllowPrivilegeEscalation || !*s.ReadOnlyRootFilesystem ||
			!slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) {
			t.Errorf("the container %s has %+v", c.Name, s)
		}
		if len(s.Capabilities.Add) > 0 && c.Name != "folder" {
			t.Errorf("the container %s has the capabilities %v", c.Name, s.Capabilities.Add)
		}
		if s.RunAsUser != nil && *s.RunAsUser == 0 && !slices.Contains([]string{"folder", "proxy", "cdi", "dra"}, c.Name) {
			t.Errorf("the container %s runs as root", c.Name)
		}
		for _, m := range c.VolumeMounts {
			if m.MountPropagation != nil {
				t.Errorf("the container %s has a mount that propagates", c.Name)
			}
		}
	}
}

func TestRender(t *testing.T) {
	for name, values := range cases(t) {
		t.Run(name, func(t *testing.T) {
			objects := renderAll(t, values)
			config := find[*corev1.ConfigMap](t, objects, "bfcd").Data["bfcd.yaml"]
			check(t, config)
			if checked := find[*corev1.ConfigMap](t, objects, "bfcd-check").Data["bfcd.yaml"]; checked != config {
				t.Errorf("another configuration is checked:\n%s", checked)
			}
			for _, set := range []string{"bfcd", "bfcd-keepers"} {
				checkPod(t, &find[*appsv1.DaemonSet](t, objects, set).Spec.Template.Spec, true)
			}
			job := find[*batchv1.Job](t, objects, "bfcd-check").Spec.Template.Spec
			checkPod(t, &job, false)
			if *job.AutomountServiceAccountToken {
				t.Error("the job has the rights of an account")
			}
			for _, rule := range find[*rbacv1.ClusterRole](t, objects, "bfcd-bfcd").Rules {
				if slices.Contains(rule.Verbs, "*") || slices.Contains(rule.Resources, "*") || slices.Contains(rule.Resources, "secrets") {
					t.Errorf("the role has %v", rule)
				}
			}
		})
	}
}

func TestKeepers(t *testing.T) {
	objects := renderAll(t, gpus)
	set := find[*appsv1.DaemonSet](t, objects, "bfcd-keepers")
	if set.Spec.UpdateStrategy.Type != appsv1.OnDeleteDaemonSetStrategyType {
		t.Errorf("an upgrade ends keepers: %v", set.Spec.UpdateStrategy)
	}
	if r := set.Spec.Template.Spec.RuntimeClassName; r == nil || *r != "nvidia" {
		t.Errorf("the runtime class is %v", r)
	}
	want := map[string][]string{
		"keeper-host":   {"bfcd-keeper", "host", "--socket", "/run/bfcd/keepers/host"},
		"keeper-cuda-0": {"bfcd-keeper", "cuda:0", "--socket", "/run/bfcd/keepers/cuda:0", "--allow-mps"},
		"keeper-gpu-1b1f9b3c-0000-4000-8000-0123456789ab": {"bfcd-keeper", "GPU-1b1f9b3c-0000-4000-8000-0123456789ab", "--socket",
			"/run/bfcd/keepers/GPU-1b1f9b3c-0000-4000-8000-0123456789ab"},
	}
	found := map[string][]string{}
	for _, c := range set.Spec.Template.Spec.Containers {
		found[c.Name] = c.Command
		if hasGPU := len(c.Env) > 0; hasGPU == (c.Name == "keeper-host") {
			t.Errorf("%s has the environment %v", c.Name, c.Env)
		}
	}
	if !maps.EqualFunc(want, found, slices.Equal) {
		t.Errorf("the keepers are %v", found)
	}
	// Without host memory there is the ledger.
	objects = renderAll(t, `
config:
  devices: [{id: "cuda:0", partitions: [{name: train, limit: 1GiB}]}]
  tenants: [{name: default, match: {uid: [1]}, quotas: [{partition: train}]}]
`)
	containers := find[*appsv1.DaemonSet](t, objects, "bfcd-keepers").Spec.Template.Spec.Containers
	if len(containers) != 2 || containers[1].Name != "keeper-host" {
		t.Errorf("the keepers are %v", containers)
	}
}

// What the CDI file mounts is what the container "proxy" installs.
func TestProxy(t *testing.T) {
	objects := renderAll(t, gpus)
	var cdi struct {
		Devices []struct {
			ContainerEdits struct {
				Mounts []struct{ HostPath, ContainerPath string }
			}
		}
	}
	if err := yaml.Unmarshal([]byte(find[*corev1.ConfigMap](t, objects, "bfcd").Data["cdi.yaml"]), &cdi); err != nil {
		t.Fatal(err)
	}
	var mounted, installed []string
	for _, m := range cdi.Devices[0].ContainerEdits.Mounts {
		mounted = append(mounted, m.HostPath)
		if filepath.Base(m.HostPath) != filepath.Base(m.ContainerPath) {
			t.Errorf("%s is mounted as %s", m.HostPath, m.ContainerPath)
		}
	}
	for _, c := range find[*appsv1.DaemonSet](t, objects, "bfcd").Spec.Template.Spec.InitContainers {
		if c.Name == "proxy" {
			for _, file := range c.Command[2:] {
				installed = append(installed, "/var/lib/bfcd/"+filepath.Base(file))
			}
		}
	}
	slices.Sort(mounted)
	slices.Sort(installed)
	if len(mounted) != 3 || !slices.Equal(mounted, installed) {
		t.Errorf("mounted: %v; installed: %v", mounted, installed)
	}
}

func TestTenants(t *testing.T) {
	for values, want := range map[string]string{"": `{"default":"default"}`, gpus: `{"vision":"vision","vision-test":"vision"}`} {
		objects := renderAll(t, values)
		if got := find[*corev1.ConfigMap](t, objects, "bfcd").Data["dra.yaml"]; !strings.Contains(got, "tenants: "+want+"\n") {
			t.Errorf("the driver has\n%s", got)
		}
	}
}

// Another configuration starts bfcd again, and no keeper.
func TestConfigIsRolledOut(t *testing.T) {
	before := renderAll(t, "")
	for _, change := range []string{"tenants: {default: default, more: default}", "config: {max_sessions: 7}"} {
		after := renderAll(t, change)
		for set, differs := range map[string]bool{"bfcd": true, "bfcd-keepers": false} {
			x := find[*appsv1.DaemonSet](t, before, set).Spec.Template.String()
			y := find[*appsv1.DaemonSet](t, after, set).Spec.Template.String()
			if (x != y) != differs {
				t.Errorf("%s: the pods of %s differ: %v", change, set, x != y)
			}
		}
	}
}

func TestWrongValuesAreRefused(t *testing.T) {
	for values, says := range map[string]string{
		"imag: {}":                                              "imag",
		"config: {admin_socket: {path: /x}}":                    "config",
		"config: {devices: []}":                                 "devices",
		"config: {devices: [{id: gpu0}]}":                       "devices",
		"tenants: {vision: speech}":                             "which is not in config.tenants",
		"tenants: {vision: 1}":                                  "vision",
		"metrics: {port: 0}":                                    "port",
		"gpu: {devices: [nvidia]}":                              "gpu",
		"image: {repository: ''}":                               "repository",
		"resources: {bfcd: {}, keepers: {}}":                    "resources",
		"kubeletFolder: var/lib/kubelet":                        "kubeletFolder",
		"metrics: {serviceMonitor: {enabled: 'yes'}}":           "enabled",
		"config: {lease_socket: {path: /run/x}, tenants: null}": "config",
	} {
		if _, _, err := render(load(t), valuesOf(t, values), "bfcd"); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", values, err)
		}
	}
}

func TestExamples(t *testing.T) {
	files, err := filepath.Glob(examples + "*.yaml")
	if err != nil || len(files) < 3 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		if strings.HasSuffix(file, "-values.yaml") {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if len(decode(t, string(text))) == 0 {
			t.Errorf("%s has no object", file)
		}
	}
}
