// Renders the chart to plain manifests, or packs it, with Helm's own library. See scripts/check-chart.
//
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	chart "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	chartutil "helm.sh/helm/v4/pkg/chart/v2/util"
	"helm.sh/helm/v4/pkg/engine"
	"sigs.k8s.io/yaml"
)

const release = "bfcd"

// render returns the manifests by the names of their templates, and the notes.
func render(c *chart.Chart, values map[string]any, namespace string) (map[string]string, string, error) {
	capabilities := common.DefaultCapabilities.Copy()
	capabilities.KubeVersion = common.KubeVersion{Version: "v1.37.0", Major: "1", Minor: "37"}
	options := common.ReleaseOptions{Name: release, Namespace: namespace, IsInstall: true}
	all, err := util.ToRenderValues(c, values, options, capabilities)
	if err != nil {
		return nil, "", err
	}
	files, err := engine.Render(c, all)
	if err != nil {
		return nil, "", err
	}
	manifests := map[string]string{}
	notes := ""
	for name, text := range files {
		switch base := path.Base(name); {
		case base == "NOTES.txt":
			notes = text
		case strings.HasSuffix(base, ".yaml") && strings.TrimSpace(text) != "":
			manifests[base] = text
		}
	}
	return manifests, notes, nil
}

// plain is one file for kubectl apply, without what only Helm does.
func plain(manifests map[string]string) string {
	var out bytes.Buffer
	names := []string{}
	for name, text := range manifests {
		if !strings.Contains(text, "helm.sh/hook:") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		fmt.Fprintf(&out, "---\n# %s\n%s\n", name, strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(manifests[name]), "---")))
	}
	return out.String()
}

func run() error {
	namespace := flag.String("namespace", "bfcd", "the namespace of the manifests")
	valuesPath := flag.String("values", "", "a file with values; default: those of the chart")
	pack := flag.String("pack", "", "do not render: pack the chart into this folder")
	flag.Parse()
	if flag.NArg() != 1 {
		return fmt.Errorf("usage: tool [--namespace NAME] [--values FILE] [--pack FOLDER] CHART")
	}
	c, err := loader.Load(flag.Arg(0))
	if err != nil {
		return err
	}
	if *pack != "" {
		name, err := chartutil.Save(c, *pack)
		if err == nil {
			fmt.Println(name)
		}
		return err
	}
	values := map[string]any{}
	if *valuesPath != "" {
		text, err := os.ReadFile(*valuesPath)
		if err != nil {
			return err
		}
		if err := yaml.UnmarshalStrict(text, &values); err != nil {
			return fmt.Errorf("%s: %w", *valuesPath, err)
		}
	}
	manifests, _, err := render(c, values, *namespace)
	if err == nil {
		fmt.Print(plain(manifests))
	}
	return err
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "chart:", err)
		os.Exit(1)
	}
}
