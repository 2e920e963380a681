// The scheduler's own allocator with the slices that the driver publishes.
//
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"

	"bfcd/integrations/kubernetes/internal/rig"
)

// classes has the class of docs/kubernetes.md.
type classes struct{}

func (classes) Get(name string) (*resourceapi.DeviceClass, error) {
	return &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourceapi.DeviceClassSpec{
		Selectors: []resourceapi.DeviceSelector{selector(`device.driver == "memory.bfcd"`)}}}, nil
}

func (c classes) List() ([]*resourceapi.DeviceClass, error) {
	class, err := c.Get("bfcd")
	return []*resourceapi.DeviceClass{class}, err
}

func selector(expression string) resourceapi.DeviceSelector {
	return resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}
}

// scheduler has what it has allocated.
type scheduler struct {
	*stage
	state structured.AllocatedState
}

func newScheduler(t *testing.T) *scheduler {
	t.Helper()
	s := &scheduler{stage: newStage(t, false), state: structured.AllocatedState{AllocatedDevices: sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](), AggregatedCapacity: structured.NewConsumedCapacityCollection()}}
	s.waitForTaint("")
	return s
}

// allocate returns the device and the bytes for a claim of one request; "": it does not fit.
func (s *scheduler) allocate(memory string) (string, int64) {
	s.t.Helper()
	features := structured.Features{ConsumableCapacity: true, DeviceTaints: true}
	list, err := s.client.ResourceV1().ResourceSlices().List(s.t.Context(), metav1.ListOptions{})
	rig.Must(s.t, err)
	var slices []*resourceapi.ResourceSlice
	for i := range list.Items {
		slices = append(slices, &list.Items[i])
	}
	request := &resourceapi.ExactDeviceRequest{DeviceClassName: "bfcd", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
		Selectors: []resourceapi.DeviceSelector{selector(`device.attributes["memory.bfcd"].partition == "Train_1"`)},
		Capacity: &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{
			capacity: resource.MustParse(memory)}}}
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "team-a", UID: types.UID(fmt.Sprint(len(s.state.AggregatedCapacity)))},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
			Requests: []resourceapi.DeviceRequest{{Name: "memory", Exactly: request}}}}}
	allocator, err := structured.NewAllocator(s.t.Context(), features, s.state, classes{}, slices,
		cel.NewCache(10, cel.Features{EnableConsumableCapacity: true}))
	rig.Must(s.t, err)
	results, err := allocator.Allocate(context.Background(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, []*resourceapi.ResourceClaim{claim})
	rig.Must(s.t, err)
	if len(results) == 0 {
		return "", 0
	}
	result := results[0].Devices.Results[0]
	id := structured.MakeDeviceID(result.Driver, result.Pool, result.Device)
	s.state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, result.ShareID))
	s.state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, result.ConsumedCapacity))
	consumed := result.ConsumedCapacity[capacity]
	return result.Device, consumed.Value()
}

func TestTheSchedulerCountsThePartition(t *testing.T) {
	s := newScheduler(t)
	for range 2 { // of 224Mi
		if device, n := s.allocate("99Mi"); device != "train-1" || n != 100*mib {
			t.Fatalf("device '%s', %d bytes", device, n)
		}
	}
	if device, _ := s.allocate("26Mi"); device != "" {
		t.Fatal("a claim that does not fit got a device")
	}
	if device, n := s.allocate("24Mi"); device != "train-1" || n != 24*mib {
		t.Fatalf("device '%s', %d bytes", device, n)
	}
}

func TestTheSchedulerAvoidsADeviceWithoutBfcd(t *testing.T) {
	s := newScheduler(t)
	s.Kill()
	s.waitForTaint("memory.bfcd/away")
	if device, _ := s.allocate("2Mi"); device != "" {
		t.Fatal("a claim got a device")
	}
	s.Run()
	s.waitForTaint("")
	if device, _ := s.allocate("2Mi"); device != "train-1" {
		t.Fatal("a claim got no device")
	}
}
