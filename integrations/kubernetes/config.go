// The driver's configuration.
//
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"
)

// Config is the file of --config.
type Config struct {
	// Socket is bfcd's lease socket (lease_socket in bfcd.yaml).
	Socket string `json:"socket"`
	// ClientFolder has bfcd's client socket, bfcd.sock. Containers get this folder, at the same path.
	ClientFolder string `json:"clientFolder"`
	// Tenants of bfcd, by the namespace of the claim. Claims of other namespaces are refused.
	Tenants map[string]string `json:"tenants"`
	// CgroupRoots are where the kubelet may make the control groups of pods, as paths that bfcd sees.
	CgroupRoots []string `json:"cgroupRoots"`
	// CgroupMount is where the unified hierarchy of the host is mounted.
	CgroupMount string `json:"cgroupMount"`
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
		ClientFolder: "/run/bfcd/client",
		CgroupRoots:  []string{"/kubepods", "/kubepods.slice"},
		CgroupMount:  "/sys/fs/cgroup",
		CDIFolder:    "/var/run/cdi",
		GPUDevices:   []string{"bfcd/client=proxy", "nvidia.com/gpu=GPU-{uuid}"},
	}
	if err := yaml.UnmarshalStrict(text, c); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	for _, p := range append([]string{c.Socket, c.ClientFolder, c.CgroupMount, c.CDIFolder}, c.CgroupRoots...) {
		if !filepath.IsAbs(p) {
			return nil, fmt.Errorf("%s: '%s' is not an absolute path", path, p)
		}
	}
	if len(c.Tenants) == 0 {
		return nil, fmt.Errorf("%s: tenants is empty: it says which namespaces may have memory", path)
	}
	return c, nil
}

// podCgroup finds the control group of a pod, which the kubelet has made before it prepares the pod's claims. It is below
// the group of the pod's class, and its name depends on the kubelet's driver, cgroupfs or systemd.
func (c *Config) podCgroup(uid string) (string, error) {
	if uid == "" || strings.Trim(uid, "0123456789abcdefABCDEF-") != "" {
		return "", fmt.Errorf("'%s' is not the UID of a pod", uid)
	}
	var found []string
	for _, root := range c.CgroupRoots {
		for _, name := range []string{
			"/pod" + uid, "/*/pod" + uid,
			"/*-pod" + strings.ReplaceAll(uid, "-", "_") + ".slice",
			"/*/*-pod" + strings.ReplaceAll(uid, "-", "_") + ".slice",
		} {
			matches, err := filepath.Glob(c.CgroupMount + root + name)
			if err != nil {
				return "", err
			}
			for _, match := range matches {
				found = append(found, strings.TrimPrefix(match, c.CgroupMount))
			}
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return "", fmt.Errorf("pod %s has no control group below %s in %s", uid, strings.Join(c.CgroupRoots, " or "), c.CgroupMount)
	default:
		return "", errors.New("the pod has more than one control group: " + strings.Join(found, ", "))
	}
}
