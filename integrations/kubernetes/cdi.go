// CDI files: what containers of a claim get. A claim's file is also the driver's record of the claim and its leases, which
// outlives the driver.
//
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"k8s.io/apimachinery/pkg/types"
	cdi "tags.cncf.io/container-device-interface/specs-go"

	"bfcd/integrations/kubernetes/internal/bfcd"
)

const (
	cdiKind        = "bfcd/claim"
	cdiPrefix      = "bfcd-claim-"
	recordOfClaim  = "bfcd.claim"
	oldestCDI      = "0.6.0" // with annotations
	clientSocket   = "bfcd.sock"
	cdiPermissions = 0o644
)

func (c *Config) cdiFile(uid string) string {
	return filepath.Join(c.CDIFolder, cdiPrefix+uid+".json")
}

// isPrepared says whether the claim has its file. If that is unknown, it has.
func (c *Config) isPrepared(uid types.UID) bool {
	_, err := os.Stat(c.cdiFile(string(uid)))
	return !errors.Is(err, fs.ErrNotExist)
}

// cdiName is the name of the device for one lease of a claim, as the kubelet gives it to the container runtime.
func cdiName(uid string, i int) string { return fmt.Sprintf("%s-%d", uid, i) }

// record is a claim that is prepared on this node.
type record struct {
	UID       types.UID     `json:"uid"`
	Namespace string        `json:"namespace"`
	Claim     string        `json:"claim"`
	Pod       string        `json:"pod"` // that owns the claim, the only one; "": pods can share it
	Leases    []*bfcd.Lease `json:"leases"`
}

// writeCDI replaces the claim's file.
func (c *Config) writeCDI(r *record) error {
	own, err := json.Marshal(r)
	if err != nil {
		return err
	}
	uid := string(r.UID)
	spec := cdi.Spec{Version: oldestCDI, Kind: cdiKind, Annotations: map[string]string{recordOfClaim: string(own)}}
	for i, l := range r.Leases {
		spec.Devices = append(spec.Devices, cdi.Device{Name: cdiName(uid, i), ContainerEdits: cdi.ContainerEdits{
			Env: []string{"BFC_SOCKET=" + filepath.Join(c.ClientFolder, clientSocket), "BFC_PARTITION=" + l.Partition},
			// The folder, so that a container finds the socket of a daemon that was started later.
			Mounts: []*cdi.Mount{{HostPath: filepath.Join(c.LeasesFolder, l.Socket), ContainerPath: c.ClientFolder,
				Options: []string{"bind", "ro", "nosuid", "nodev", "noexec"}}},
		}})
	}
	text, err := json.MarshalIndent(spec, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(c.CDIFolder, 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(c.CDIFolder, "."+cdiPrefix) // no suffix of a CDI file
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(text)
	if err == nil {
		err = f.Chmod(cdiPermissions)
	}
	if err == nil {
		err = f.Sync() // else the file could be empty after a crash
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), c.cdiFile(uid))
}

func (c *Config) removeCDI(uid string) error {
	err := os.Remove(c.cdiFile(uid))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// records are those of all claims that are prepared on this node.
func (c *Config) records() ([]*record, error) {
	files, err := filepath.Glob(filepath.Join(c.CDIFolder, cdiPrefix+"*.json"))
	if err != nil {
		return nil, err
	}
	var all []*record
	for _, file := range files {
		var spec cdi.Spec
		r := &record{}
		text, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = json.Unmarshal(text, &spec)
		}
		if err == nil {
			err = json.Unmarshal([]byte(spec.Annotations[recordOfClaim]), r)
		}
		if err != nil {
			return all, fmt.Errorf("%s: %w", file, err)
		}
		all = append(all, r)
	}
	return all, nil
}
