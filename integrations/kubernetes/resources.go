// What bfcd has, as devices of the Kubernetes API.
//
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/hex"
	"fmt"
	"regexp"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"bfcd/integrations/kubernetes/internal/bfcd"
	"bfcd/integrations/kubernetes/internal/wire"
)

const (
	driverName = "memory.bfcd"
	capacity   = resourceapi.QualifiedName("memory")
)

// partition is one that can have leases.
type partition struct {
	name   string
	device *wire.DeviceRow
	row    *wire.PartitionRow
	bytes  uint64 // that leases can have in all
}

func (p *partition) isGPU() bool { return len(p.device.Uuid) > 0 }

// uuid is that of the GPU, as NVIDIA's tools print it behind "GPU-".
func (p *partition) uuid() string {
	h := hex.EncodeToString(p.device.Uuid)
	if len(h) != 32 {
		return h
	}
	return strings.Join([]string{h[:8], h[8:12], h[12:16], h[16:20], h[20:]}, "-")
}

var notInLabels = regexp.MustCompile(`[^a-z0-9]+`)

// deviceName makes a DNS label of a partition's name.
func deviceName(partition string) string {
	return strings.Trim(notInLabels.ReplaceAllString(strings.ToLower(partition), "-"), "-")
}

// partitionsOf returns the partitions by the name of their device in Kubernetes. What the config guarantees to tenants that no
// namespace has is not for pods. Partitions that preallocate have no room for leases. tenants: of the namespaces.
func partitionsOf(state *bfcd.State, tenants map[string]bool) (map[string]*partition, error) {
	all := map[string]*partition{}
	for _, row := range state.Partitions {
		p := &partition{name: row.Name, row: row, bytes: row.GetStats().GetBytesLimit()}
		for _, device := range state.Devices {
			if device.Id == row.Device {
				p.device = device
			}
		}
		if p.device == nil || row.Growth == "preallocate" {
			continue
		}
		for _, t := range state.Tenants {
			if t.Partition == row.Name && !tenants[t.Tenant] {
				p.bytes -= min(p.bytes, t.GetStats().GetBytesGuaranteed())
			}
		}
		p.bytes -= p.bytes % bfcd.Granularity
		if p.bytes == 0 {
			continue
		}
		name := deviceName(row.Name)
		if other := all[name]; other != nil || name == "" {
			return nil, fmt.Errorf("partition '%s' has no name of its own in Kubernetes, where it is '%s': rename it", row.Name, name)
		}
		all[name] = p
	}
	return all, nil
}

// problem says why the device should get no more pods; "": it can. The second is the taint's key.
func (p *partition) problem() (string, string) {
	switch p.device.State {
	case "ok":
		return "", ""
	case "lost", "hung":
		return "the device is " + p.device.State, driverName + "/" + p.device.State
	default:
		return "an operator drains the device", driverName + "/drained"
	}
}

// deviceOf describes a partition for a ResourceSlice. isAway: bfcd does not answer.
func deviceOf(name string, p *partition, isAway bool) resourceapi.Device {
	text := func(s string) resourceapi.DeviceAttribute {
		s = s[:min(len(s), resourceapi.DeviceAttributeMaxValueLength)]
		return resourceapi.DeviceAttribute{StringValue: &s}
	}
	kind := "host"
	if p.isGPU() {
		kind = "gpu"
	}
	d := resourceapi.Device{
		Name:                     name,
		AllowMultipleAllocations: new(true),
		Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			"partition": text(p.name), "device": text(p.device.Id), "type": text(kind), "share": text(p.row.Share),
		},
		Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{capacity: {
			Value: bytes(p.bytes),
			RequestPolicy: &resourceapi.CapacityRequestPolicy{
				Default: new(bytes(p.bytes)),
				ValidRange: &resourceapi.CapacityRequestPolicyRange{
					Min: new(bytes(bfcd.Granularity)), Max: new(bytes(p.bytes)), Step: new(bytes(bfcd.Granularity)),
				},
			},
		}},
	}
	if p.isGPU() {
		d.Attributes["uuid"] = text("GPU-" + p.uuid())
		d.Attributes["productName"] = text(p.device.Name)
	}
	_, key := p.problem()
	if isAway {
		key = driverName + "/away"
	}
	if key != "" {
		d.Taints = []resourceapi.DeviceTaint{{Key: key, Effect: resourceapi.DeviceTaintEffectNoSchedule}}
	}
	return d
}

func bytes(n uint64) resource.Quantity { return *resource.NewQuantity(int64(n), resource.BinarySI) }
