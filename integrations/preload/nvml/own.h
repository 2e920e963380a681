/* The functions that the proxy of NVML implements: OWN(symbol, type of the result, arguments). Also included by
 * trampolines.S.
 *
 * SPDX-License-Identifier: Apache-2.0 */
OWN(nvmlErrorString, const char *, (int result))
OWN(nvmlDeviceGetMemoryInfo, int, (void *device, struct nvml_memory *ret))
OWN(nvmlDeviceGetMemoryInfo_v2, int, (void *device, struct nvml_memory_v2 *ret))
