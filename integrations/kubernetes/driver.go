// The driver: what the kubelet asks of it, and what it tells the API server.
//
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"bfcd/integrations/kubernetes/internal/bfcd"
)

const leaseNameMax = 63 // bytes

type driver struct {
	config *Config
	node   string
	client kubernetes.Interface
	period time.Duration // between looks at bfcd
	helper *kubeletplugin.Helper

	mutex      sync.Mutex
	partitions map[string]*partition // by the names of their devices; as bfcd last said
	isAway     bool
	claims     map[types.UID]*preparedClaim // at the last look
}

// startDriver registers with the kubelet and publishes until the context ends; then call stop().
func startDriver(ctx context.Context, c *Config, node string, client kubernetes.Interface, period time.Duration,
	options ...kubeletplugin.Option) (*driver, error) {
	d := &driver{config: c, node: node, client: client, period: period, isAway: true}
	helper, err := kubeletplugin.Start(ctx, d, append([]kubeletplugin.Option{
		kubeletplugin.DriverName(driverName), kubeletplugin.NodeName(node), kubeletplugin.KubeClient(client)}, options...)...)
	if err != nil {
		return nil, err
	}
	d.helper = helper
	go d.publish(ctx)
	return d, nil
}

func (d *driver) stop() { d.helper.Stop() }

// look asks bfcd for its state, and makes leases again that it has lost.
func (d *driver) look(ctx context.Context) (err error) {
	defer func() {
		d.mutex.Lock()
		d.isAway = err != nil
		d.mutex.Unlock()
	}()
	s, err := bfcd.Open(ctx, d.config.Socket)
	if err != nil {
		return err
	}
	defer s.Close()
	state, err := s.State()
	if err != nil {
		return err
	}
	partitions, err := partitionsOf(state, d.tenants())
	if err != nil {
		return err
	}
	d.mutex.Lock()
	d.partitions = partitions
	d.mutex.Unlock()
	d.remake(ctx, s)
	return nil
}

func (d *driver) tenants() map[string]bool {
	names := map[string]bool{}
	for _, tenant := range d.config.Tenants {
		names[tenant] = true
	}
	return names
}

// remake makes the leases of prepared claims that bfcd no longer has, as after a loss of its ledger. It does not ask for those
// that are there: bfcd counts refused requests.
func (d *driver) remake(ctx context.Context, s *bfcd.Session) {
	rows, err := s.Leases("")
	if err != nil {
		runtime.HandleErrorWithContext(ctx, err, "leases cannot be listed")
		return
	}
	exists := map[string]bool{}
	for _, row := range rows {
		exists[row.Name] = true
	}
	records, err := d.config.records()
	if err != nil {
		runtime.HandleErrorWithContext(ctx, err, "records of prepared claims cannot be read")
	}
	for _, r := range records {
		for _, l := range r.Leases {
			if exists[l.Name] {
				continue
			}
			if !d.config.isPrepared(r.UID) {
				break
			}
			if err := s.Ensure(l); err != nil {
				runtime.HandleErrorWithContext(ctx, err, "a lease of a prepared claim cannot be made", "lease", l.Name)
			}
			if d.config.isPrepared(r.UID) {
				continue
			}
			// It was unprepared meanwhile, maybe before the lease was made.
			if err := s.End(partOfName(r.UID)); err != nil {
				runtime.HandleErrorWithContext(ctx, err, "a lease of a claim that was unprepared cannot be ended", "lease", l.Name)
			}
			break
		}
	}
}

// publish keeps the ResourceSlices as bfcd's partitions are.
func (d *driver) publish(ctx context.Context) {
	var published *resourceslice.DriverResources
	for {
		err := d.look(ctx)
		if err != nil && ctx.Err() == nil {
			runtime.HandleErrorWithContext(ctx, err, "bfcd's devices get no new pods")
		}
		d.lookAtClaims(ctx)
		resources := d.resources()
		if !reflect.DeepEqual(resources, published) {
			if err := d.helper.PublishResources(ctx, *resources); err == nil {
				published = resources
			} else if ctx.Err() == nil {
				runtime.HandleErrorWithContext(ctx, err, "ResourceSlices cannot be published")
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(d.period):
		}
	}
}

// resources: one pool with the devices of this node. While bfcd is away they are those that it last had.
func (d *driver) resources() *resourceslice.DriverResources {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	slice := resourceslice.Slice{}
	for _, name := range slices.Sorted(maps.Keys(d.partitions)) {
		slice.Devices = append(slice.Devices, deviceOf(name, d.partitions[name], d.isAway))
	}
	return &resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{d.node: {Slices: []resourceslice.Slice{slice}}}}
}

// ---- claims

// A lease's name begins with that of the pod or the claim, for people, and has the claim's UID, by which it is found again.
func leaseName(r *record, i int) string {
	end := fmt.Sprintf(".%s.%d", r.UID, i)
	name := cmp.Or(r.Pod, r.Claim)
	return name[:min(len(name), leaseNameMax-len(end))] + end
}

func partOfName(uid types.UID) string { return "." + string(uid) + "." }

// leasesOf returns the leases that the claim needs, and what the kubelet is told of each.
func (d *driver) leasesOf(claim *resourceapi.ResourceClaim) (*record, []kubeletplugin.Device, error) {
	tenant := d.config.Tenants[claim.Namespace]
	if tenant == "" {
		return nil, nil, fmt.Errorf("namespace '%s' has no tenant of bfcd: an operator adds it to 'tenants' of the driver's config",
			claim.Namespace)
	}
	r := &record{UID: claim.UID, Namespace: claim.Namespace, Claim: claim.Name}
	// What is reserved for one pod can be so for others later. A claim of a template is its pod's for ever.
	if owner := metav1.GetControllerOf(claim); owner != nil && owner.Kind == "Pod" {
		r.Pod = owner.Name
	}
	var devices []kubeletplugin.Device
	d.mutex.Lock()
	defer d.mutex.Unlock()
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver != driverName {
			continue
		}
		p := d.partitions[result.Device]
		if p == nil || result.Pool != d.node {
			return nil, nil, fmt.Errorf("bfcd has no partition for device '%s' of pool '%s'", result.Device, result.Pool)
		}
		for _, l := range r.Leases {
			if l.Partition == p.name {
				return nil, nil, fmt.Errorf("the claim has two requests in partition '%s', where it has one lease", p.name)
			}
		}
		memory := result.ConsumedCapacity[capacity]
		if memory.Value() <= 0 || memory.Value()%bfcd.Granularity != 0 {
			return nil, nil, fmt.Errorf("request '%s' has %s of memory, which is not a multiple of 2Mi", result.Request, memory.String())
		}
		i := len(r.Leases)
		ids := []string{cdiKind + "=" + cdiName(string(claim.UID), i)}
		for _, id := range d.config.GPUDevices {
			if p.isGPU() {
				ids = append(ids, strings.ReplaceAll(id, "{uuid}", p.uuid()))
			}
		}
		r.Leases = append(r.Leases, &bfcd.Lease{Name: leaseName(r, i), Tenant: tenant, Partition: p.name,
			Socket: string(claim.UID), Limit: uint64(memory.Value())})
		devices = append(devices, kubeletplugin.Device{Requests: []string{result.Request}, PoolName: result.Pool,
			DeviceName: result.Device, CDIDeviceIDs: ids, ShareID: result.ShareID})
	}
	return r, devices, nil
}

func (d *driver) makeLeases(s *bfcd.Session, r *record) error {
	for _, l := range r.Leases {
		if err := s.Ensure(l); err != nil {
			return err
		}
	}
	return d.config.writeCDI(r)
}

// checkDevices returns why a device gets no new pods. The scheduler learns of it later, by a taint, and may have placed a pod
// there. The kubelet asks again, so the pod waits, where its requests for memory would fail.
func (d *driver) checkDevices(devices []kubeletplugin.Device) error {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	for _, device := range devices {
		if p := d.partitions[device.DeviceName]; p != nil {
			if problem, _ := p.problem(); problem != "" {
				return fmt.Errorf("partition '%s' gets no new pods: %s", p.name, problem)
			}
		}
	}
	return nil
}

func (d *driver) prepare(ctx context.Context, claim *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	if err := d.look(ctx); err != nil {
		return nil, err
	}
	r, devices, err := d.leasesOf(claim)
	if err != nil {
		return nil, err
	}
	isNew := !d.config.isPrepared(claim.UID) // else its containers may run, and keep what they have
	if isNew {
		if err := d.checkDevices(devices); err != nil {
			return nil, err
		}
	}
	s, err := bfcd.Open(ctx, d.config.Socket)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	if err := d.makeLeases(s, r); err != nil {
		if isNew {
			err = errors.Join(err, s.End(partOfName(claim.UID)))
		}
		return nil, err
	}
	klog.FromContext(ctx).Info("Prepared", "claim", klog.KObj(claim), "leases", len(r.Leases))
	return devices, nil
}

// unprepare removes the record first: else the leases could be made again.
func (d *driver) unprepare(ctx context.Context, uid types.UID) error {
	if err := d.config.removeCDI(string(uid)); err != nil {
		return err
	}
	s, err := bfcd.Open(ctx, d.config.Socket)
	if err != nil {
		return err
	}
	defer s.Close()
	return s.End(partOfName(uid))
}

// PrepareResourceClaims is called before the containers of a pod start, also again.
func (d *driver) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		devices, err := d.prepare(ctx, claim)
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: devices, Err: err}
	}
	return results, nil
}

// UnprepareResourceClaims is called after they have ended, also again.
func (d *driver) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	results := map[types.UID]error{}
	for _, claim := range claims {
		results[claim.UID] = d.unprepare(ctx, claim.UID)
	}
	return results, nil
}

// HandleError ends the driver where trying again cannot help.
func (d *driver) HandleError(ctx context.Context, err error, msg string) {
	runtime.HandleErrorWithContext(ctx, err, msg)
	if !errors.Is(err, kubeletplugin.ErrRecoverable) {
		klog.FlushAndExit(klog.ExitFlushTimeout, 1)
	}
}

// ---- health

// WatchHealthStatus tells the kubelet how the devices are, which it shows in the status of pods.
func (d *driver) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case reports <- d.health():
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(d.period):
		}
	}
}

func (d *driver) health() kubeletplugin.DeviceHealthReport {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	report := kubeletplugin.DeviceHealthReport{}
	for name, p := range d.partitions {
		h := kubeletplugin.DeviceHealth{PoolName: d.node, DeviceName: name, Health: kubeletplugin.HealthStatusHealthy,
			LastUpdated: time.Now(), HealthCheckTimeout: 3*d.period + 10*time.Second}
		h.Message, _ = p.problem()
		switch {
		case d.isAway:
			h.Health, h.Message = kubeletplugin.HealthStatusUnknown, "bfcd does not answer"
		case p.device.State == "lost" || p.device.State == "hung":
			h.Health = kubeletplugin.HealthStatusUnhealthy
		}
		report.Devices = append(report.Devices, h)
	}
	return report
}
