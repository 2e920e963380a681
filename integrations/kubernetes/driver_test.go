// The driver with the real library of Kubernetes, a real bfcd, a fake API server, and the test in the place of the kubelet.
//
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	drahealth "k8s.io/kubelet/pkg/apis/dra-health/v1"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	cdi "tags.cncf.io/container-device-interface/specs-go"

	"bfcd/integrations/kubernetes/internal/bfcd"
	"bfcd/integrations/kubernetes/internal/rig"
	"bfcd/integrations/kubernetes/internal/wire"
)

const (
	node     = "node1"
	podUID   = "0a1b2c3d-0000-4000-8000-00000000000a"
	claimUID = "9f8e7d6c-0000-4000-8000-00000000000c"
	mib      = 1 << 20
)

// stage is a node.
type stage struct {
	*rig.Rig
	t       *testing.T
	config  *Config
	client  *fake.Clientset
	kubelet *grpc.ClientConn
	driver  *driver
	end     func() // of the driver
}

func newStage(t *testing.T, keeps bool) *stage {
	t.Helper()
	s := &stage{Rig: rig.Start(t, keeps), t: t}
	rig.Must(t, os.WriteFile(s.Folder+"/dra.yaml", []byte("tenants: {team-a: vision, team-b: speech}\n"), 0o644))
	config, err := readConfig(s.Folder + "/dra.yaml")
	rig.Must(t, err)
	config.Socket, config.LeasesFolder, config.CDIFolder = s.Socket, s.Folder+"/leases", s.Folder+"/cdi"
	s.config = config
	rig.Must(t, os.MkdirAll(s.Folder+"/plugin", 0o755))
	rig.Must(t, os.MkdirAll(s.Folder+"/registry", 0o755))

	s.client = fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node, UID: "n"}})
	var n atomic.Int64 // the fake gives no names
	s.client.PrependReactor("create", "resourceslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
		slice := action.(clienttesting.CreateAction).GetObject().(*resourceapi.ResourceSlice)
		if slice.Name == "" {
			slice.Name = fmt.Sprintf("%s%d", slice.GenerateName, n.Add(1))
		}
		return false, nil, nil
	})
	s.start()
	t.Cleanup(func() { s.end() })
	return s
}

func (s *stage) start() {
	s.t.Helper()
	ctx, cancel := context.WithCancel(s.t.Context())
	d, err := startDriver(ctx, s.config, node, s.client, 50*time.Millisecond,
		kubeletplugin.PluginDataDirectoryPath(s.Folder+"/plugin"), kubeletplugin.RegistrarDirectoryPath(s.Folder+"/registry"))
	rig.Must(s.t, err)
	s.kubelet, s.driver = s.connect("/plugin/dra.sock"), d
	s.end = func() { cancel(); d.stop() }
}

func (s *stage) connect(socket string) *grpc.ClientConn {
	s.t.Helper()
	conn, err := grpc.NewClient("unix://"+s.Folder+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	rig.Must(s.t, err)
	s.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// addClaim puts an allocated claim of a pod's template into the API server.
func (s *stage) addClaim(change func(*resourceapi.ResourceClaim)) *dra.Claim {
	s.t.Helper()
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "memory", Namespace: "team-a", UID: claimUID, OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "v1", Kind: "Pod", Name: "train-0", UID: podUID, Controller: new(true)}}},
		Status: resourceapi.ResourceClaimStatus{
			Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
				Results: []resourceapi.DeviceRequestAllocationResult{requestOf("train", "train-1", 8*mib)}}},
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "train-0", UID: podUID}},
		},
	}
	if change != nil {
		change(claim)
	}
	_, err := s.client.ResourceV1().ResourceClaims(claim.Namespace).Create(s.t.Context(), claim, metav1.CreateOptions{})
	rig.Must(s.t, err)
	return &dra.Claim{Namespace: claim.Namespace, Name: claim.Name, Uid: string(claim.UID)}
}

func requestOf(request, device string, n int64) resourceapi.DeviceRequestAllocationResult {
	return resourceapi.DeviceRequestAllocationResult{Request: request, Driver: driverName, Pool: node, Device: device,
		ShareID: new(types.UID("share-" + request)), ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{
			capacity: *resource.NewQuantity(n, resource.BinarySI)}}
}

func (s *stage) prepare(claim *dra.Claim) *dra.NodePrepareResourceResponse {
	s.t.Helper()
	reply, err := dra.NewDRAPluginClient(s.kubelet).NodePrepareResources(s.t.Context(),
		&dra.NodePrepareResourcesRequest{Claims: []*dra.Claim{claim}})
	rig.Must(s.t, err)
	return reply.Claims[claim.Uid]
}

func (s *stage) unprepare(claim *dra.Claim) string {
	s.t.Helper()
	reply, err := dra.NewDRAPluginClient(s.kubelet).NodeUnprepareResources(s.t.Context(),
		&dra.NodeUnprepareResourcesRequest{Claims: []*dra.Claim{claim}})
	rig.Must(s.t, err)
	return reply.Claims[claim.Uid].Error
}

func (s *stage) expectLeases(names ...string) {
	s.t.Helper()
	if got := s.Leases(); !slices.Equal(got, names) {
		s.t.Fatalf("leases are %v, not %v", got, names)
	}
}

func (s *stage) devices() map[string]resourceapi.Device {
	s.t.Helper()
	list, err := s.client.ResourceV1().ResourceSlices().List(s.t.Context(), metav1.ListOptions{})
	rig.Must(s.t, err)
	devices := map[string]resourceapi.Device{}
	for _, slice := range list.Items {
		for _, d := range slice.Spec.Devices {
			devices[d.Name] = d
		}
	}
	return devices
}

func (s *stage) waitForTaint(key string) {
	s.t.Helper()
	s.Wait("the taint '"+key+"'", func() bool {
		d, ok := s.devices()["train-1"]
		return ok && ((key == "" && len(d.Taints) == 0) || (len(d.Taints) == 1 && d.Taints[0].Key == key))
	})
}

const leaseOfClaim = "train-0." + claimUID + ".0"

func TestPrepareMakesTheLeaseAndUnprepareEndsIt(t *testing.T) {
	s := newStage(t, false)
	claim := s.addClaim(nil)
	for range 2 {
		reply := s.prepare(claim)
		if reply.Error != "" || len(reply.Devices) != 1 {
			t.Fatalf("the answer is %v", reply)
		}
		d := reply.Devices[0]
		if d.PoolName != node || d.DeviceName != "train-1" || !slices.Equal(d.RequestNames, []string{"train"}) ||
			!slices.Equal(d.CdiDeviceIds, []string{"bfcd/claim=" + claimUID + "-0"}) || d.GetShareId() != "share-train" {
			t.Fatalf("the device is %v", d)
		}
		s.expectLeases(leaseOfClaim)
	}
	rows, err := s.Session().Leases("")
	rig.Must(t, err)
	if l := rows[0]; l.Tenant != "vision" || l.Partition != "Train_1" || l.MatchKind != "socket" || l.Match != claimUID || l.GetStats().GetBytesLimit() != 8*mib {
		t.Fatalf("the lease is %v", l)
	}
	for range 2 {
		if sentence := s.unprepare(claim); sentence != "" {
			t.Fatal(sentence)
		}
		s.expectLeases()
	}
	if files, err := os.ReadDir(s.config.CDIFolder); err != nil || len(files) != 0 {
		t.Fatalf("CDI files are left: %v, %v", files, err)
	}
}

func TestContainersGetTheClientSocket(t *testing.T) {
	s := newStage(t, false)
	s.prepare(s.addClaim(func(c *resourceapi.ResourceClaim) {
		results := &c.Status.Allocation.Devices.Results
		*results = append(*results, requestOf("serve", "serve", 4*mib))
	}))
	s.expectLeases(leaseOfClaim, "train-0."+claimUID+".1")
	spec := s.cdiOf(claimUID)
	if spec.Kind != "bfcd/claim" || len(spec.Devices) != 2 {
		t.Fatalf("the file is %v", spec)
	}
	for i, partition := range []string{"Train_1", "serve"} {
		d := spec.Devices[i]
		if d.Name != fmt.Sprintf("%s-%d", claimUID, i) || len(d.ContainerEdits.Mounts) != 1 ||
			d.ContainerEdits.Mounts[0].HostPath != s.Folder+"/leases/"+claimUID ||
			d.ContainerEdits.Mounts[0].ContainerPath != "/run/bfcd/client" || !slices.Contains(d.ContainerEdits.Mounts[0].Options, "ro") ||
			!slices.Equal(d.ContainerEdits.Env,
				[]string{"BFC_SOCKET=/run/bfcd/client/bfcd.sock", "BFC_PARTITION=" + partition}) {
			t.Fatalf("device %d is %v", i, d)
		}
	}
	client := s.join(s.Folder+"/leases/"+claimUID+"/bfcd.sock", "", "serve")
	if client.Tenant != "vision" || len(client.Partitions) != 2 || client.Partitions[client.DefaultPartition].BytesLimit != 4*mib {
		t.Fatalf("a container gets %v", client)
	}
}

func (s *stage) cdiOf(uid string) *cdi.Spec {
	s.t.Helper()
	text, err := os.ReadFile(s.config.CDIFolder + "/bfcd-claim-" + uid + ".json")
	rig.Must(s.t, err)
	spec := &cdi.Spec{}
	rig.Must(s.t, json.Unmarshal(text, spec))
	return spec
}

// join is the hello of a process; its session ends with the test.
func (s *stage) join(socket, tenant, partition string) *wire.HelloReply {
	s.t.Helper()
	client, err := bfcd.Join(s.t.Context(), socket, &wire.Hello{Tenant: tenant, Partition: partition})
	rig.Must(s.t, err)
	s.t.Cleanup(client.Close)
	return client.Hello
}

func (s *stage) metrics() string {
	s.t.Helper()
	reply := httptest.NewRecorder()
	s.driver.metricsHandler().ServeHTTP(reply, httptest.NewRequest("GET", "/metrics", nil))
	if reply.Code != 200 {
		s.t.Fatalf("/metrics: %d %s", reply.Code, reply.Body)
	}
	return reply.Body.String()
}

// shared is a claim that no pod owns.
func shared(c *resourceapi.ResourceClaim) { c.Name, c.OwnerReferences = "team", nil }

func (s *stage) update(claim *dra.Claim, change func(*resourceapi.ResourceClaim)) {
	s.t.Helper()
	claims := s.client.ResourceV1().ResourceClaims(claim.Namespace)
	changed, err := claims.Get(s.t.Context(), claim.Name, metav1.GetOptions{})
	rig.Must(s.t, err)
	change(changed)
	_, err = claims.Update(s.t.Context(), changed, metav1.UpdateOptions{})
	rig.Must(s.t, err)
}

// The kubelet asks only for the first pod of a claim.
func TestPodsShareAClaim(t *testing.T) {
	const lease = "team." + claimUID + ".0"
	s := newStage(t, false)
	claim := s.addClaim(shared)
	if reply := s.prepare(claim); reply.Error != "" {
		t.Fatal(reply.Error)
	}
	s.expectLeases(lease)
	s.update(claim, func(c *resourceapi.ResourceClaim) {
		c.Status.ReservedFor = append(c.Status.ReservedFor,
			resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "train-1", UID: "b"},
			resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "train-1", UID: "c"},
			resourceapi.ResourceClaimConsumerReference{Resource: "other", Name: "no-pod", UID: "d"})
	})
	if reply := s.prepare(claim); reply.Error != "" { // as after a restart of the kubelet
		t.Fatal(reply.Error)
	}
	s.expectLeases(lease)
	for range 2 { // one container of each pod
		if hello := s.join(s.Folder+"/leases/"+claimUID+"/bfcd.sock", "", ""); hello.Partitions[0].Lease != lease {
			t.Fatalf("a container gets %v", hello)
		}
	}
	series := `bfcd_claim_info{claim="team",lease="` + lease + `",namespace="team-a",partition="Train_1",pod="%s",tenant="vision"} 1`
	s.Wait("the series of both pods", func() bool {
		text := s.metrics()
		return strings.Contains(text, fmt.Sprintf(series, "train-0")) && strings.Contains(text, fmt.Sprintf(series, "train-1"))
	})
	s.update(claim, func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor = c.Status.ReservedFor[:1] })
	s.Wait("one series", func() bool { return strings.Count(s.metrics(), "bfcd_claim_info{") == 1 })
	if sentence := s.unprepare(claim); sentence != "" {
		t.Fatal(sentence)
	}
	s.Wait("no series", func() bool { return !strings.Contains(s.metrics(), "bfcd_claim_info{") })
}

// counter counts the connections that a listener has accepted and that are open.
type counter struct {
	net.Listener
	open, most atomic.Int64
}

type counted struct {
	net.Conn
	of   *counter
	once sync.Once
}

func (c *counter) Accept() (net.Conn, error) {
	conn, err := c.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c.most.Store(max(c.most.Load(), c.open.Add(1)))
	return &counted{Conn: conn, of: c}, nil
}

func (c *counted) Close() error {
	c.once.Do(func() { c.of.open.Add(-1) })
	return c.Conn.Close()
}

// Each pod of the cluster can ask for metrics.
func TestACrowdAsksForMetrics(t *testing.T) {
	s := newStage(t, false)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	rig.Must(t, err)
	c := &counter{Listener: listener}
	ended := make(chan error)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { ended <- s.driver.serveMetrics(ctx, c) }()
	var crowd []net.Conn
	for range 4 * metricsConnections {
		conn, err := net.Dial("tcp", listener.Addr().String())
		rig.Must(t, err)
		defer conn.Close()
		crowd = append(crowd, conn)
	}
	s.Wait("connections", func() bool { return c.most.Load() >= metricsConnections })
	for _, conn := range crowd {
		_, err := io.WriteString(conn, "GET /metrics HTTP/1.0\r\n\r\n")
		rig.Must(t, err)
	}
	for _, conn := range crowd {
		answer, err := io.ReadAll(conn)
		if err != nil || !strings.Contains(string(answer), "200 OK") {
			t.Fatalf("%q, %v", answer, err)
		}
	}
	if most := c.most.Load(); most > metricsConnections {
		t.Errorf("%d connections at once", most)
	}
	cancel()
	rig.Must(t, <-ended)
}

// Tenants of two namespaces, both of which match all processes here.
func TestAPodGetsNoOtherTenant(t *testing.T) {
	s := newStage(t, false)
	s.prepare(s.addClaim(nil))
	_, err := bfcd.Join(t.Context(), s.Folder+"/leases/"+claimUID+"/bfcd.sock", &wire.Hello{Tenant: "speech"})
	if !errors.Is(err, syscall.EACCES) {
		t.Fatalf("the answer is %v", err)
	}
	if hello := s.join(s.Folder+"/client/bfcd.sock", "speech", ""); hello.Partitions[0].Lease != "" {
		t.Fatalf("beside the claim a process gets %v", hello)
	}
}

// A kubelet that has lost its state does not unprepare.
func TestLeasesOfClaimsThatAreGoneEnd(t *testing.T) {
	s := newStage(t, false)
	claim := s.addClaim(shared)
	other := s.addClaim(func(c *resourceapi.ResourceClaim) { c.Name, c.UID, c.OwnerReferences = "other", podUID, nil })
	s.prepare(claim)
	s.prepare(other)
	claims := s.client.ResourceV1().ResourceClaims("team-a")
	s.client.PrependReactor("get", "resourceclaims", func(action clienttesting.Action) (bool, runtime.Object, error) {
		if action.(clienttesting.GetAction).GetName() == other.Name {
			return true, nil, errors.New("the API server is busy") // which tells nothing
		}
		return false, nil, nil
	})
	rig.Must(t, claims.Delete(t.Context(), claim.Name, metav1.DeleteOptions{}))
	s.Wait("the end of the lease", func() bool { return slices.Equal(s.Leases(), []string{"other." + podUID + ".0"}) })
	if _, err := os.Stat(s.config.cdiFile(claimUID)); !os.IsNotExist(err) {
		t.Fatalf("the CDI file: %v", err)
	}
}

func TestPrepareRefuses(t *testing.T) {
	s := newStage(t, false)
	for i, c := range []struct {
		sentence string
		change   func(*resourceapi.ResourceClaim)
	}{
		{"namespace 'team-c' has no tenant", func(c *resourceapi.ResourceClaim) { c.Namespace = "team-c" }},
		{"no partition for device 'fixed'", func(c *resourceapi.ResourceClaim) {
			c.Status.Allocation.Devices.Results[0].Device = "fixed"
		}},
		{"of pool 'node2'", func(c *resourceapi.ResourceClaim) { c.Status.Allocation.Devices.Results[0].Pool = "node2" }},
		{"is not a multiple of 2Mi", func(c *resourceapi.ResourceClaim) {
			c.Status.Allocation.Devices.Results[0] = requestOf("train", "train-1", 3*mib)
		}},
		{"two requests in partition", func(c *resourceapi.ResourceClaim) {
			results := &c.Status.Allocation.Devices.Results
			*results = append(*results, (*results)[0])
		}},
		{"is more than the limit of tenant 'vision'", func(c *resourceapi.ResourceClaim) {
			c.Status.Allocation.Devices.Results[0] = requestOf("train", "train-1", 200*mib)
		}},
		// The first of two leases is not left behind.
		{"no quota for 'speech' in 'serve'", func(c *resourceapi.ResourceClaim) {
			c.Namespace = "team-b"
			results := &c.Status.Allocation.Devices.Results
			*results = append(*results, requestOf("serve", "serve", 4*mib))
		}},
	} {
		claim := s.addClaim(func(claim *resourceapi.ResourceClaim) {
			claim.Name = fmt.Sprintf("claim-%d", i)
			c.change(claim)
		})
		if reply := s.prepare(claim); !strings.Contains(reply.Error, c.sentence) || len(reply.Devices) != 0 {
			t.Errorf("%q is not in: %v", c.sentence, reply)
		}
		s.expectLeases()
	}
}

// The scheduler may not have heard of it yet. scripts/test-kubernetes --cluster drains a real one.
func TestADeviceInTroubleGetsNoNewPods(t *testing.T) {
	device := &wire.DeviceRow{Id: "cuda:0", State: "ok"}
	d := &driver{partitions: map[string]*partition{"infer": {name: "infer", device: device}}}
	devices := []kubeletplugin.Device{{DeviceName: "infer"}}
	rig.Must(t, d.checkDevices(devices))
	for state, words := range map[string]string{"lost": "is lost", "hung": "is hung", "draining": "drains"} {
		device.State = state
		if err := d.checkDevices(devices); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("state '%s': %v", state, err)
		}
	}
}

// A claim whose containers may run keeps its lease, whatever is asked later.
func TestAFailedRepetitionChangesNothing(t *testing.T) {
	s := newStage(t, false)
	claim := s.addClaim(nil)
	s.prepare(claim)
	s.update(claim, func(c *resourceapi.ResourceClaim) {
		c.Status.Allocation.Devices.Results[0] = requestOf("train", "train-1", 16*mib)
	})
	if reply := s.prepare(claim); !strings.Contains(reply.Error, "exists already") {
		t.Fatalf("the answer is %v", reply)
	}
	rows, err := s.Session().Leases("")
	rig.Must(t, err)
	if len(rows) != 1 || rows[0].State != "active" || rows[0].GetStats().GetBytesLimit() != 8*mib {
		t.Fatalf("leases are %v", rows)
	}
}

func TestSlicesHaveThePartitions(t *testing.T) {
	s := newStage(t, false)
	s.waitForTaint("")
	devices := s.devices()
	if len(devices) != 2 {
		t.Fatalf("devices are %v", devices)
	}
	d := devices["train-1"]
	memory := d.Capacity[capacity]
	if !*d.AllowMultipleAllocations || memory.Value.Value() != (256-32)*mib || memory.RequestPolicy.ValidRange.Step.Value() != 2*mib {
		t.Fatalf("the device is %v", d) // 'house' has a reserve, and no namespace
	}
	for name, value := range map[resourceapi.QualifiedName]string{
		"partition": "Train_1", "device": "host", "type": "host", "share": "fd"} {
		if got := d.Attributes[name].StringValue; got == nil || *got != value {
			t.Errorf("attribute '%s' is %v", name, got)
		}
	}
}

func TestARestartOfBfcdKeepsLeases(t *testing.T) {
	s := newStage(t, true)
	claim := s.addClaim(nil)
	s.prepare(claim)
	s.waitForTaint("")
	s.Kill()
	s.waitForTaint("memory.bfcd/away")
	if reply := s.prepare(claim); !strings.Contains(reply.Error, "cannot reach bfcd") {
		t.Fatalf("the answer is %v", reply)
	}
	if sentence := s.unprepare(&dra.Claim{Namespace: "team-a", Name: "other", Uid: podUID}); !strings.Contains(sentence, "cannot reach bfcd") {
		t.Fatalf("the answer is '%s'", sentence)
	}
	s.Run()
	s.waitForTaint("")
	s.expectLeases(leaseOfClaim)
	if reply := s.prepare(claim); reply.Error != "" {
		t.Fatal(reply.Error)
	}
	s.expectLeases(leaseOfClaim)
}

// The new driver knows of the claim what the old one wrote.
func TestARestartOfTheDriverKeepsLeases(t *testing.T) {
	s := newStage(t, false)
	claim := s.addClaim(nil)
	s.prepare(claim)
	s.end()
	s.start()
	s.expectLeases(leaseOfClaim)
	if reply := s.prepare(claim); reply.Error != "" {
		t.Fatal(reply.Error)
	}
	s.end()
	s.start()
	if sentence := s.unprepare(claim); sentence != "" {
		t.Fatal(sentence)
	}
	s.expectLeases()
}

// bfcd serves a tenant's schedulers 256 requests for leases in a minute, also those that it refuses.
func TestLooksUseUpNoRequests(t *testing.T) {
	s := newStage(t, false)
	s.prepare(s.addClaim(nil))
	for range 300 {
		rig.Must(t, s.driver.look(t.Context()))
	}
	if reply := s.prepare(s.addClaim(func(c *resourceapi.ResourceClaim) { c.Name, c.UID = "other", podUID })); reply.Error != "" {
		t.Fatal(reply.Error)
	}
}

// A bfcd that starts without its ledger has no lease.
func TestLostLeasesAreMadeAgain(t *testing.T) {
	s := newStage(t, false)
	s.prepare(s.addClaim(nil))
	other := s.addClaim(func(c *resourceapi.ResourceClaim) { c.Name, c.UID = "other", podUID })
	s.prepare(other)
	mounted, err := os.Stat(s.Folder + "/leases/" + claimUID) // in containers that run
	rig.Must(t, err)
	s.Kill()
	rig.Must(t, s.config.removeCDI(podUID)) // unprepared
	s.Run()
	s.Wait("the lease", func() bool { return len(s.Leases()) > 0 })
	s.waitForTaint("")
	s.expectLeases(leaseOfClaim)
	s.join(s.Folder+"/leases/"+claimUID+"/bfcd.sock", "", "")
	if again, err := os.Stat(s.Folder + "/leases/" + claimUID); err != nil || !os.SameFile(mounted, again) {
		t.Fatalf("the folder is another one, or %v", err)
	}
}

func TestTheKubeletFindsTheDriverAndItsHealth(t *testing.T) {
	s := newStage(t, false)
	info, err := registration.NewRegistrationClient(s.connect("/registry/memory.bfcd-reg.sock")).GetInfo(t.Context(), &registration.InfoRequest{})
	rig.Must(t, err)
	if info.Name != "memory.bfcd" || info.Endpoint != s.Folder+"/plugin/dra.sock" {
		t.Fatalf("the driver is %v", info)
	}
	s.waitForTaint("")
	stream, err := drahealth.NewDRAResourceHealthClient(s.kubelet).NodeWatchResources(t.Context(), &drahealth.NodeWatchResourcesRequest{})
	rig.Must(t, err)
	is := func(status drahealth.HealthStatus) func() bool {
		return func() bool {
			reply, err := stream.Recv()
			rig.Must(t, err)
			return len(reply.Devices) == 2 && reply.Devices[0].Health == status
		}
	}
	s.Wait("health", is(drahealth.HealthStatus_HEALTHY))
	s.Kill()
	s.Wait("unknown health", is(drahealth.HealthStatus_UNKNOWN))
}

func TestABadConfigIsRefused(t *testing.T) {
	for text, sentence := range map[string]string{
		"tenants: {}":                           "tenants is empty",
		"tenants: {a: b}\nsocket: lease.sock":   "'lease.sock' is not an absolute path",
		"tenants: {a: b}\ncolour: red":          "unknown field \"colour\"",
		"tenants: {a: b}\nleasesFolder: leases": "'leases' is not an absolute path",
	} {
		path := t.TempDir() + "/dra.yaml"
		rig.Must(t, os.WriteFile(path, []byte(text), 0o644))
		if _, err := readConfig(path); err == nil || !strings.Contains(err.Error(), sentence) {
			t.Errorf("%q: %v", text, err)
		}
	}
}
