// The driver's configuration.
//
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"

	"sigs.k8s.io/yaml"
)

// Config is the file of --config.
type Config struct {
	// Socket is bfcd's lease socket (lease_socket in bfcd.yaml).
	Socket string `json:"socket"`
	// LeasesFolder is bfcd's folder of leases' sockets: "leases" beside its admin socket.
	LeasesFolder string `json:"leasesFolder"`
	// ClientFolder is where a container gets the socket of its claim, bfcd.sock.
	ClientFolder string `json:"clientFolder"`
	// Tenants of bfcd, by the namespace of the claim. Claims of other namespaces are refused.
	Tenants map[string]string `json:"tenants"`
	// CDIFolder is where the container runtime looks for CDI files.
	CDIFolder string `json:"cdiFolder"`
	// GPUDevices are more CDI devices for containers with a claim on a GPU's partition; {uuid} is that of the GPU.
	GPUDevices []string `json:"gpuDevices"`
}

func readConfig(path string) (*Config, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	c := &Config{
		Socket:       "/run/bfcd/lease/lease.sock",
		LeasesFolder: "/run/bfcd/leases",
		ClientFolder: "/run/bfcd/client",
		CDIFolder:    "/var/run/cdi",
		GPUDevices:   []string{"bfcd/client=proxy", "nvidia.com/gpu=GPU-{uuid}"},
	}
	if err := yaml.UnmarshalStrict(text, c); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	for _, p := range []string{c.Socket, c.LeasesFolder, c.ClientFolder, c.CDIFolder} {
		if !filepath.IsAbs(p) {
			return nil, fmt.Errorf("%s: '%s' is not an absolute path", path, p)
		}
	}
	if len(c.Tenants) == 0 {
		return nil, fmt.Errorf("%s: tenants is empty: it says which namespaces may have memory", path)
	}
	return c, nil
}
