/* libnvidia-ml.so.1 of the lab: the part of NVML that monitoring tools start with. Error numbers are NVML's own. */
#include <stdio.h>
#include <string.h>

#define API __attribute__((visibility("default")))
enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, DRIVER_NOT_LOADED = 9, LIBRARY_MISMATCH = 18, GPU_LOST = 15 };

struct device { int minor, lost; char uuid[48], pci[32], name[96]; unsigned long long memory; };
static struct device devices[16];
static int count = -1;

static int loaded(char *version) {
    FILE *file = fopen("/proc/driver/nvidia/version", "r");
    int found = file && fscanf(file, "NVRM version: NVIDIA UNIX x86_64 Kernel Module %63s", version) == 1;
    if (file) fclose(file);
    return found;
}

static void read_devices(void) {
    FILE *file = fopen("/run/gpuchange-lab/cards.state", "r");
    struct device d;
    for (count = 0; file && count < 16; devices[count++] = d)
        if (fscanf(file, "gpu %d %47s %31s %llu %*d %*d %d %*d %*f %*f %*d %95[^\n]\n", &d.minor, d.uuid, d.pci, &d.memory,
                   &d.lost, d.name) != 6) break;
    if (file) fclose(file);
}

API int nvmlInitWithFlags(unsigned flags) {
    char version[64];
    (void)flags;
    if (!loaded(version)) return DRIVER_NOT_LOADED;
    if (strcmp(version, DRIVER_VERSION)) return LIBRARY_MISMATCH;
    read_devices();
    return OK;
}

API int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
API int nvmlShutdown(void) { return count = -1, OK; }

API int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    if (count < 0) return UNINITIALIZED;
    snprintf(text, size, "%s", DRIVER_VERSION);
    return OK;
}

API int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = CUDA_VERSION, OK; }
API int nvmlDeviceGetCount_v2(unsigned *n) { return count < 0 ? UNINITIALIZED : (*n = count, OK); }

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **device) {
    if (count < 0) return UNINITIALIZED;
    if ((int)index >= count) return INVALID;
    *device = &devices[index];
    return (*device)->lost ? GPU_LOST : OK;
}

API int nvmlDeviceGetName(struct device *d, char *text, unsigned n) { return snprintf(text, n, "%s", d->name), OK; }
API int nvmlDeviceGetUUID(struct device *d, char *text, unsigned n) { return snprintf(text, n, "%s", d->uuid), OK; }
API int nvmlDeviceGetMinorNumber(struct device *d, unsigned *minor) { return *minor = d->minor, OK; }

API const char *nvmlErrorString(int code) {
    switch (code) {
        case OK: return "Success";
        case UNINITIALIZED: return "Uninitialized";
        case INVALID: return "Invalid Argument";
        case DRIVER_NOT_LOADED: return "Driver Not Loaded";
        case GPU_LOST: return "GPU is lost";
        case LIBRARY_MISMATCH: return "Driver/library version mismatch";
        default: return "Unknown Error";
    }
}
