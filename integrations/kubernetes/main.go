// bfcd-dra gives pods leases of bfcd's memory (Dynamic Resource Allocation). See docs/kubernetes.md.
//
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
)

func run() error {
	configPath := flag.String("config", "/etc/bfcd/dra.yaml", "the driver's configuration")
	node := flag.String("node", os.Getenv("NODE_NAME"), "the name of this node; default $NODE_NAME")
	kubeconfig := flag.String("kubeconfig", "", "how to reach the API server; default: as a pod")
	kubelet := flag.String("kubelet-folder", "/var/lib/kubelet", "the folder of the kubelet")
	period := flag.Duration("period", 5*time.Second, "the time between looks at bfcd")
	metrics := flag.String("metrics", "", "the address of metrics for Prometheus, such as :9846; default: none")
	klog.InitFlags(nil)
	flag.Parse()
	if flag.NArg() > 0 || *node == "" {
		return fmt.Errorf("usage: bfcd-dra [OPTION...], with --node or NODE_NAME; --help shows the options")
	}
	c, err := readConfig(*configPath)
	if err != nil {
		return err
	}
	var server *rest.Config
	if *kubeconfig != "" {
		server, err = clientcmd.BuildConfigFromFlags("", *kubeconfig)
	} else {
		server, err = rest.InClusterConfig()
	}
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(server)
	if err != nil {
		return err
	}
	options := []kubeletplugin.Option{
		kubeletplugin.RegistrarDirectoryPath(*kubelet + "/plugins_registry"),
		kubeletplugin.PluginDataDirectoryPath(*kubelet + "/plugins/" + driverName),
	}
	if uid := os.Getenv("POD_UID"); uid != "" { // an update of the DaemonSet starts the new pod before it ends the old one
		options = append(options, kubeletplugin.RollingUpdate(types.UID(uid)))
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := os.MkdirAll(*kubelet+"/plugins/"+driverName, 0o750); err != nil {
		return err
	}
	d, err := startDriver(ctx, c, *node, client, *period, options...)
	if err != nil {
		return err
	}
	defer d.stop()
	if *metrics != "" {
		listener, err := net.Listen("tcp", *metrics)
		if err != nil {
			return err
		}
		return d.serveMetrics(ctx, listener)
	}
	<-ctx.Done()
	return nil
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "bfcd-dra:", err)
		os.Exit(1)
	}
}
