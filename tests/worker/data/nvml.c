/* A management library of a machine with $FAKE_GPUS GPUs, with the functions and structures of NVML that are read. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned index; } Gpu;
static Gpu gpus[8] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};
static Gpu mig = {99};
static unsigned registered, reported;

static unsigned count(void) { return (unsigned)atoi(getenv("FAKE_GPUS")); }

int nvmlInit_v2(void) { return getenv("FAKE_NO_DRIVER") ? 9 : 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = count(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **gpu) {
  if (index >= count()) return 2;
  if (getenv("FAKE_LOST") && index == (unsigned)atoi(getenv("FAKE_LOST"))) return 15; /* it fell off the bus */
  *gpu = &gpus[index];
  return 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **gpu) {
  if (strcmp(uuid, "MIG-aaaa")) return 6;
  *gpu = &mig;
  return 0;
}
int nvmlDeviceGetUUID(Gpu *gpu, char *text, unsigned size) { snprintf(text, size, "GPU-%04x", gpu->index); return 0; }
int nvmlDeviceGetName(Gpu *gpu, char *text, unsigned size) { (void)gpu; snprintf(text, size, "NVIDIA Fake"); return 0; }
int nvmlDeviceGetMinorNumber(Gpu *gpu, unsigned *minor) { *minor = gpu->index; return 0; }
int nvmlDeviceGetUtilizationRates(Gpu *gpu, unsigned rates[2]) {
  if (gpu == &mig) return 3;
  rates[0] = 90 + gpu->index; rates[1] = 5;
  return 0;
}
int nvmlDeviceGetMemoryInfo(Gpu *gpu, uint64_t memory[3]) {
  (void)gpu;
  memory[0] = 85899345920u; memory[1] = 1073741824u; memory[2] = memory[0] - memory[1];
  return 0;
}
int nvmlDeviceGetPowerUsage(Gpu *gpu, unsigned *mw) { *mw = 650500; return gpu == &mig ? 3 : 0; }
int nvmlDeviceGetTemperature(Gpu *gpu, unsigned sensor, unsigned *value) {
  if (sensor != 0 || gpu == &mig) return 2;
  *value = 61;
  return 0;
}
int nvmlDeviceGetClockInfo(Gpu *gpu, unsigned kind, unsigned *mhz) { (void)gpu; *mhz = 1755; return kind == 1 ? 0 : 2; }
#ifdef NEW_NAMES
int nvmlDeviceGetCurrentClocksEventReasons(Gpu *gpu, uint64_t *reasons)
#else
int nvmlDeviceGetCurrentClocksThrottleReasons(Gpu *gpu, uint64_t *reasons)
#endif
{ *reasons = gpu->index == 1 ? 0x1 | 0x4 | 0x20 : 0x1; return 0; }
int nvmlDeviceGetTotalEccErrors(Gpu *gpu, unsigned kind, unsigned counter, uint64_t *errors) {
  if (counter != 0 || gpu->index == 2) return 3; /* no ECC there */
  const char *asked = getenv("FAKE_ECC");
  *errors = kind == 0 ? 5000000000u : asked && gpu->index != 1 ? 0 : asked ? (uint64_t)atoi(asked) : 1;
  return 0;
}
int nvmlEventSetCreate(void **set) { static int it; *set = &it; return 0; }
int nvmlDeviceRegisterEvents(Gpu *gpu, uint64_t kinds, void *set) {
  (void)set;
  if (kinds == 8) registered |= 1u << gpu->index % 8;
  return 0;
}
typedef struct { Gpu *gpu; uint64_t kind, data; unsigned gi, ci; } Event;
int nvmlEventSetWait_v2(void *set, Event *event, unsigned timeout) {
  (void)set;
  if (timeout != 0 || reported++ > 1 || !(registered & 2)) return 10; /* nothing more */
  event->gpu = &gpus[1]; event->kind = 8; event->data = reported == 1 ? 79 : 119;
  return 0;
}
#ifdef NEW_NAMES
int nvmlGpmSampleAlloc(void **sample) { *sample = calloc(1, 64); return 0; }
int nvmlGpmSampleFree(void *sample) { free(sample); return 0; }
int nvmlGpmSampleGet(Gpu *gpu, void *sample) { *(unsigned *)sample = gpu->index; return gpu->index == 2 ? 3 : 0; }
typedef struct { unsigned id; int code; double value; const char *names[3]; } Metric;
typedef struct { unsigned version, count; void *first, *second; Metric metrics[477]; } Query;
int nvmlGpmMetricsGet(Query *query) {
  if (query->version != 1 || query->count != 1 || query->metrics[0].id != 2) return 2;
  query->metrics[0].code = 0;
  query->metrics[0].value = 50.0 + *(unsigned *)query->first + *(unsigned *)query->second;
  return 0;
}
#endif
#ifdef HEALTH
int nvmlDeviceGetRemappedRows(Gpu *gpu, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
  *corrected = *uncorrected = 0;
  *pending = getenv("FAKE_PENDING") && gpu->index == 1;
  *failed = getenv("FAKE_FAILED") && gpu->index == 1;
  return 0;
}
int nvmlDeviceGetNvLinkState(Gpu *gpu, unsigned link, unsigned *up) {
  if (link > 3) return 2;
  *up = link < (getenv("FAKE_DOWN") && gpu->index == (unsigned)atoi(getenv("FAKE_DOWN")) ? 2u : 3u);
  return 0;
}
#endif
