/* libcuda.so.1 of the lab: the CUDA driver API on simulated cards.
 *
 * Device memory is host memory and kernels run on the CPU, but time is the card's own: every copy and launch
 * advances a per-device clock by what a card of this kind would need, and events read that clock. Measurements
 * are therefore steady on a busy machine, and a slow card is slow by exactly its factor.
 *
 * DRIVER_VERSION ("550.54.15") and CUDA_VERSION (12040) are set on the compiler's command line. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "simgpu.h"

#define API __attribute__((visibility("default")))
#define FLOPS_A_MICROSECOND 54e6 /* of single precision: 54 TFLOP/s */

struct card cards[MAX_CARDS];
int card_count = -1;

static __thread struct context *current;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct allocation *allocations;

static const char *path_of(const char *variable, const char *fallback) {
    const char *path = getenv(variable);
    return path ? path : fallback;
}

/* Which driver the kernel runs: copied out of /proc/driver/nvidia/version; 0 when no module is loaded. */
static int loaded_driver(char *version, size_t size) {
    char line[256], *start;
    FILE *file = fopen(path_of("GPUCHANGE_LAB_PROC", "/proc/driver/nvidia/version"), "r");
    if (!file) return 0;
    start = fgets(line, sizeof line, file) ? strstr(line, "Kernel Module") : NULL;
    fclose(file);
    if (!start) return 0;
    start += strlen("Kernel Module");
    start += strspn(start, " ");
    snprintf(version, size, "%.*s", (int)strcspn(start, " "), start);
    return 1;
}

/* A driver whose firmware does not answer any more: nobody who asks it comes back. */
static void hang_if_told(void) {
    if (access(path_of("GPUCHANGE_LAB_HANG", "/run/gpuchange-lab/hang"), F_OK) == 0)
        for (;;) pause();
}

static void read_cards(void) {
    struct card card;
    FILE *file = fopen(path_of("GPUCHANGE_LAB_STATE", "/run/gpuchange-lab/cards.state"), "r");
    card_count = 0;
    if (!file) return;
    memset(&card, 0, sizeof card);
    while (card_count < MAX_CARDS
           && fscanf(file, "gpu %d %47s %x:%x:%x.0 %llu %d %d %d %d %lf %lf %d %95[^\n]\n", &card.minor, card.uuid, &card.domain,
                     &card.bus, &card.device, &card.memory, &card.cc_major, &card.cc_minor, &card.lost, &card.wrong,
                     &card.slow, &card.link, &card.hang_after, card.name) == 14)
        if (!card.lost) cards[card_count++] = card;
    fclose(file);
}

static void spend(struct card *card, double microseconds) { card->clock_us += microseconds * card->slow; }

static void spend_copy(size_t bytes, double gigabytes_per_second) {
    if (current) spend(current->card, 4.0 + bytes / (gigabytes_per_second * 1e3));
}

static struct card *card_at(int device) { return device >= 0 && device < card_count ? &cards[device] : NULL; }

/* --- start, devices ------------------------------------------------------------------------------------- */

API int cuInit(unsigned flags) {
    char version[64];
    if (flags) return INVALID_VALUE;
    if (!loaded_driver(version, sizeof version)) return NO_DEVICE;
    hang_if_told();
    if (strcmp(version, DRIVER_VERSION)) return DRIVER_MISMATCH;
    pthread_mutex_lock(&lock);
    if (card_count < 0) read_cards();
    pthread_mutex_unlock(&lock);
    return card_count ? SUCCESS : NO_DEVICE;
}

API int cuDriverGetVersion(int *version) {
    if (!version) return INVALID_VALUE;
    *version = CUDA_VERSION;
    return SUCCESS;
}

API int cuDeviceGetCount(int *count) {
    if (card_count < 0) return NOT_INITIALIZED;
    *count = card_count;
    return SUCCESS;
}

API int cuDeviceGet(int *device, int ordinal) {
    if (card_count < 0) return NOT_INITIALIZED;
    if (!card_at(ordinal)) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

API int cuDeviceGetName(char *name, int size, int device) {
    if (!card_at(device)) return INVALID_DEVICE;
    snprintf(name, size, "%s", cards[device].name);
    return SUCCESS;
}

API int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    const char *text;
    int filled = 0;
    if (!card_at(device)) return INVALID_DEVICE;
    for (text = cards[device].uuid + strlen("GPU-"); *text && filled < 16; text += *text == '-' ? 1 : 2) {
        unsigned byte;
        if (*text != '-' && sscanf(text, "%2x", &byte) == 1) uuid[filled++] = byte;
    }
    return filled == 16 ? SUCCESS : INVALID_VALUE;
}

API int cuDeviceGetUuid(unsigned char *uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }

API int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    if (!card_at(device)) return INVALID_DEVICE;
    *bytes = cards[device].memory;
    return SUCCESS;
}

API int cuDeviceGetPCIBusId(char *text, int size, int device) {
    if (!card_at(device)) return INVALID_DEVICE;
    snprintf(text, size, "%04X:%02X:%02X.0", cards[device].domain, cards[device].bus, cards[device].device);
    return SUCCESS;
}

API int cuDeviceGetAttribute(int *value, int attribute, int device) {
    struct card *card = card_at(device);
    if (!card) return INVALID_DEVICE;
    struct { int attribute, value; } known[] = {
        {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {8, 49152}, {10, 32}, {12, 65536}, {13, 1980000},
        {16, 132}, {33, (int)card->bus}, {34, (int)card->device}, {36, 2619000}, {37, 5120}, {38, 52428800}, {39, 2048},
        {41, 1}, {50, (int)card->domain}, {75, card->cc_major}, {76, card->cc_minor},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].attribute == attribute) return *value = known[i].value, SUCCESS;
    return INVALID_VALUE;
}

/* --- contexts ------------------------------------------------------------------------------------------- */

/* As with a real card, a process that uses one holds /dev/nvidiactl and /dev/nvidiaN open. */
static void open_nodes(struct context *context) {
    char node[32];
    snprintf(node, sizeof node, "/dev/nvidia%d", context->card->minor);
    context->control = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
    context->node = open(node, O_RDWR | O_CLOEXEC);
}

API int cuCtxCreate_v2(struct context **context, unsigned flags, int device) {
    (void)flags;
    if (!card_at(device)) return INVALID_DEVICE;
    if (!(*context = calloc(1, sizeof **context))) return OUT_OF_MEMORY;
    (*context)->card = &cards[device];
    open_nodes(*context);
    current = *context;
    return SUCCESS;
}

API int cuCtxDestroy_v2(struct context *context) {
    if (!context) return INVALID_CONTEXT;
    if (context->control >= 0) close(context->control);
    if (context->node >= 0) close(context->node);
    if (current == context) current = NULL;
    free(context);
    return SUCCESS;
}

API int cuDevicePrimaryCtxRetain(struct context **context, int device) {
    struct context *mine = current;
    if (!card_at(device)) return INVALID_DEVICE;
    if (!cards[device].primary) {
        int rc = cuCtxCreate_v2(&cards[device].primary, 0, device);
        current = mine;
        if (rc) return rc;
    }
    cards[device].primary_uses++;
    *context = cards[device].primary;
    return SUCCESS;
}

API int cuDevicePrimaryCtxRelease_v2(int device) {
    if (!card_at(device)) return INVALID_DEVICE;
    if (!cards[device].primary_uses) return INVALID_CONTEXT;
    if (--cards[device].primary_uses) return SUCCESS;
    struct context *last = cards[device].primary;
    cards[device].primary = NULL;
    return cuCtxDestroy_v2(last);
}

API int cuDevicePrimaryCtxRelease(int device) { return cuDevicePrimaryCtxRelease_v2(device); }

API int cuDeviceCanAccessPeer(int *can, int device, int other) {
    if (!card_at(device) || !card_at(other)) return INVALID_DEVICE;
    return *can = device != other, SUCCESS;
}

API int cuCtxEnablePeerAccess(struct context *peer, unsigned flags) {
    (void)flags;
    if (!current || !peer) return INVALID_CONTEXT;
    if (current->peer == peer) return PEER_ALREADY_ENABLED;
    return current->peer = peer, SUCCESS;
}

API int cuCtxSetCurrent(struct context *context) { return current = context, SUCCESS; }
API int cuCtxGetCurrent(struct context **context) { return *context = current, SUCCESS; }
API int cuCtxSynchronize(void) { return current ? SUCCESS : INVALID_CONTEXT; }
API int cuStreamSynchronize(void *stream) { return (void)stream, cuCtxSynchronize(); }

/* --- memory --------------------------------------------------------------------------------------------- */

static int inside(uint64_t pointer, size_t bytes) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (struct allocation *a = allocations; a && !found; a = a->next)
        found = pointer >= a->start && pointer + bytes <= a->start + a->bytes;
    pthread_mutex_unlock(&lock);
    return found;
}

API int cuMemAlloc_v2(uint64_t *pointer, size_t bytes) {
    struct allocation *a;
    if (!current) return INVALID_CONTEXT;
    if (!bytes) return INVALID_VALUE;
    if (current->card->used + bytes > current->card->memory) return OUT_OF_MEMORY;
    if (!(a = malloc(sizeof *a)) || !(a->start = (uint64_t)malloc(bytes))) return OUT_OF_MEMORY;
    a->bytes = bytes, a->card = current->card;
    pthread_mutex_lock(&lock);
    a->next = allocations, allocations = a, a->card->used += bytes;
    pthread_mutex_unlock(&lock);
    *pointer = a->start;
    return SUCCESS;
}

API int cuMemFree_v2(uint64_t pointer) {
    struct allocation **link, *a;
    pthread_mutex_lock(&lock);
    for (link = &allocations; (a = *link) && a->start != pointer; link = &a->next) {}
    if (a) *link = a->next, a->card->used -= a->bytes;
    pthread_mutex_unlock(&lock);
    if (!a) return INVALID_VALUE;
    free((void *)a->start);
    free(a);
    return SUCCESS;
}

API int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    if (!current) return INVALID_CONTEXT;
    *total = current->card->memory, *free_bytes = *total - current->card->used;
    return SUCCESS;
}

API int cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    (void)flags;
    return (*pointer = malloc(bytes)) ? SUCCESS : OUT_OF_MEMORY;
}

API int cuMemAllocHost_v2(void **pointer, size_t bytes) { return cuMemHostAlloc(pointer, bytes, 0); }
API int cuMemFreeHost(void *pointer) { return free(pointer), SUCCESS; }

static int copy(void *to, const void *from, size_t bytes, int known, double gigabytes_per_second) {
    if (!current) return INVALID_CONTEXT;
    if (!known) return INVALID_VALUE;
    memmove(to, from, bytes);
    spend_copy(bytes, gigabytes_per_second);
    return SUCCESS;
}

static double linked(void) { return current ? current->card->link : 1.0; }

API int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) {
    return copy((void *)to, from, bytes, inside(to, bytes), 54.0 * linked());
}

API int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) {
    return copy(to, (void *)from, bytes, inside(from, bytes), 51.0 * linked());
}

API int cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t bytes) {
    return copy((void *)to, (void *)from, bytes, inside(to, bytes) && inside(from, bytes), 1400.0);
}

/* NVLink between the cards: as slow as the slower of the two. */
API int cuMemcpyPeerAsync(uint64_t to, struct context *there, uint64_t from, struct context *here, size_t bytes, void *s) {
    double behind;
    (void)s;
    if (!there || !here) return INVALID_CONTEXT;
    behind = current && there->card->slow > current->card->slow ? there->card->slow / current->card->slow : 1.0;
    return copy((void *)to, (void *)from, bytes, inside(to, bytes) && inside(from, bytes), 370.0 / behind);
}

API int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t n, void *s) { return (void)s, cuMemcpyHtoD_v2(to, from, n); }
API int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t n, void *s) { return (void)s, cuMemcpyDtoH_v2(to, from, n); }
API int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t n, void *s) { return (void)s, cuMemcpyDtoD_v2(to, from, n); }

API int cuMemsetD32_v2(uint64_t to, unsigned value, size_t count) {
    if (!current) return INVALID_CONTEXT;
    if (!inside(to, count * 4)) return INVALID_VALUE;
    for (size_t i = 0; i < count; i++) ((uint32_t *)to)[i] = value;
    return SUCCESS;
}

/* --- modules and kernels -------------------------------------------------------------------------------- */

API int cuModuleLoadDataEx(struct module **module, const void *image, unsigned n, void *options, void *values) {
    (void)n, (void)options, (void)values;
    if (!current) return INVALID_CONTEXT;
    return ptx_load(image, module);
}

API int cuModuleLoadData(struct module **module, const void *image) {
    return cuModuleLoadDataEx(module, image, 0, NULL, NULL);
}

API int cuModuleUnload(struct module *module) { return ptx_unload(module), SUCCESS; }
API int cuModuleGetFunction(struct entry **f, struct module *m, const char *name) { return ptx_entry(m, name, f); }

API int cuLaunchKernel(struct entry *entry, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                       unsigned shared, void *stream, void **params, void **extra) {
    unsigned long long fmas = 0;
    int rc;
    (void)shared, (void)stream;
    if (!current) return INVALID_CONTEXT;
    if (!entry) return INVALID_HANDLE;
    if (extra || gy != 1 || gz != 1 || by != 1 || bz != 1 || !gx || !bx || bx > 1024) return INVALID_VALUE;
    rc = ptx_run(entry, gx, bx, params, current->card->wrong, inside, &fmas);
    while (fmas && current->card->hang_after && ++current->card->launches > current->card->hang_after) pause();
    spend(current->card, 2.3 + (double)gx * bx / 1e6 + 2.0 * fmas / FLOPS_A_MICROSECOND);
    return rc;
}

/* --- events: the card's own clock ----------------------------------------------------------------------- */

API int cuEventCreate(double **event, unsigned flags) {
    (void)flags;
    if (!current) return INVALID_CONTEXT;
    return (*event = calloc(1, sizeof **event)) ? SUCCESS : OUT_OF_MEMORY;
}

API int cuEventRecord(double *event, void *stream) {
    (void)stream;
    if (!current) return INVALID_CONTEXT;
    *event = current->card->clock_us;
    return SUCCESS;
}

API int cuEventSynchronize(double *event) { return event ? SUCCESS : INVALID_HANDLE; }
API int cuEventQuery(double *event) { return cuEventSynchronize(event); }
API int cuEventDestroy_v2(double *event) { return free(event), SUCCESS; }
API int cuEventElapsedTime(float *ms, double *start, double *end) { return *ms = (float)((*end - *start) / 1e3), SUCCESS; }

/* --- errors --------------------------------------------------------------------------------------------- */

static const struct { int code; const char *name, *text; } errors[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {PEER_ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {DRIVER_MISMATCH, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
};

static int error_at(int code) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return (int)i;
    return -1;
}

API int cuGetErrorName(int code, const char **name) {
    int at = error_at(code);
    *name = at < 0 ? NULL : errors[at].name;
    return at < 0 ? INVALID_VALUE : SUCCESS;
}

API int cuGetErrorString(int code, const char **text) {
    int at = error_at(code);
    *text = at < 0 ? NULL : errors[at].text;
    return at < 0 ? INVALID_VALUE : SUCCESS;
}
