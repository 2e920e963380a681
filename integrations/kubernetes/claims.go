// Claims that are prepared: which pods have them, and those that the API server no longer has.
//
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"net"
	"net/http"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/net/netutil"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/klog/v2"
)

const (
	goneLook    = time.Minute      // between looks whether a claim of one pod still exists
	looksAtMost = 10 * time.Second // while the API server does not answer, bfcd is looked at

	// All pods of the cluster can connect, and each connection costs the driver memory and a file descriptor.
	metricsConnections = 32
	metricsTimeout     = 10 * time.Second
)

type preparedClaim struct {
	*record
	pods   []string // for which the claim is reserved
	looked time.Time
}

// lookAtClaims asks the API server for the pods of shared claims, and, less often, whether claims still exist. A claim cannot go
// while a pod uses it. One that has gone without being unprepared was forgotten by the kubelet, with its files: its leases end.
func (d *driver) lookAtClaims(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, looksAtMost)
	defer cancel()
	records, err := d.config.records()
	if err != nil {
		runtime.HandleErrorWithContext(ctx, err, "records of prepared claims cannot be read")
		return
	}
	claims := map[types.UID]*preparedClaim{}
	for _, r := range records {
		c := &preparedClaim{record: r, looked: time.Now()}
		if was := d.claims[r.UID]; was != nil {
			c.pods, c.looked = was.pods, was.looked
		} else if r.Pod == "" {
			c.looked = time.Time{}
		}
		if r.Pod != "" {
			c.pods = []string{r.Pod}
		}
		if (r.Pod != "" && time.Since(c.looked) < goneLook) || d.lookAtClaim(ctx, c) {
			claims[r.UID] = c
		}
	}
	d.mutex.Lock()
	d.claims = claims
	d.mutex.Unlock()
}

// lookAtClaim returns false if the claim is gone.
func (d *driver) lookAtClaim(ctx context.Context, c *preparedClaim) bool {
	claim, err := d.client.ResourceV1().ResourceClaims(c.Namespace).Get(ctx, c.Claim, metav1.GetOptions{})
	if apierrors.IsNotFound(err) || (err == nil && claim.UID != c.UID) {
		if err := d.unprepare(ctx, c.UID); err != nil {
			runtime.HandleErrorWithContext(ctx, err, "the leases of a claim that is gone cannot be ended", "claim", klog.KRef(c.Namespace, c.Claim))
			return true
		}
		klog.FromContext(ctx).Info("The claim is gone: its leases have ended", "claim", klog.KRef(c.Namespace, c.Claim))
		return false
	}
	if err != nil {
		return true // what was known stays
	}
	c.looked = time.Now()
	if c.Pod == "" {
		c.pods = nil
		for _, user := range claim.Status.ReservedFor {
			if user.Resource == "pods" && user.APIGroup == "" {
				c.pods = append(c.pods, user.Name)
			}
		}
		slices.Sort(c.pods)
		c.pods = slices.Compact(c.pods) // one that was made again has the same name
	}
	return true
}

// ---- metrics

var claimInfo = prometheus.NewDesc("bfcd_claim_info", "A lease of a claim, for each pod that has it.",
	[]string{"lease", "tenant", "partition", "namespace", "claim", "pod"}, nil)

func (d *driver) Describe(descs chan<- *prometheus.Desc) { descs <- claimInfo }

// Collect sends a series for each lease and pod, as they were at the last look.
func (d *driver) Collect(metrics chan<- prometheus.Metric) {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	for _, c := range d.claims {
		for _, l := range c.Leases {
			for _, pod := range c.pods {
				metrics <- prometheus.MustNewConstMetric(claimInfo, prometheus.GaugeValue, 1,
					l.Name, l.Tenant, l.Partition, c.Namespace, c.Claim, pod)
			}
		}
	}
}

func (d *driver) metricsHandler() http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(d)
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{})
}

// serveMetrics serves /metrics until the context ends, and closes the listener.
func (d *driver) serveMetrics(ctx context.Context, listener net.Listener) error {
	mux := http.NewServeMux()
	mux.Handle("/metrics", d.metricsHandler())
	server := &http.Server{Handler: mux, ReadTimeout: metricsTimeout, WriteTimeout: metricsTimeout}
	context.AfterFunc(ctx, func() { _ = server.Close() })
	if err := server.Serve(netutil.LimitListener(listener, metricsConnections)); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
