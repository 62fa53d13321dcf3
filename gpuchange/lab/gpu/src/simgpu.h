/* What libcuda.c and ptx.c share. Error numbers are the CUDA driver API's own. */
#ifndef SIMGPU_H
#define SIMGPU_H
#include <stddef.h>
#include <stdint.h>

#define MAX_CARDS 16

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_PTX = 218, INVALID_HANDLE = 400, NOT_FOUND = 500,
    ILLEGAL_ADDRESS = 700, PEER_ALREADY_ENABLED = 704, DRIVER_MISMATCH = 803,
};

struct card {
    int minor, cc_major, cc_minor, lost, wrong, primary_uses;
    int hang_after, launches; /* which arithmetic kernel of a process never ends; 0: none */
    unsigned domain, bus, device;
    unsigned long long memory, used; /* bytes */
    double slow, link, clock_us;     /* factor of time; share of the full link; microseconds of work done so far */
    char uuid[48], name[96];
    struct context *primary;
};

struct context {
    struct card *card;
    struct context *peer; /* reachable directly */
    int control, node;
};

struct allocation {
    uint64_t start;
    size_t bytes;
    struct card *card;
    struct allocation *next;
};

struct module;
struct entry;

int ptx_load(const char *text, struct module **module);
void ptx_unload(struct module *module);
int ptx_entry(struct module *module, const char *name, struct entry **entry);
/* Runs every thread of a one-dimensional launch; a wrong card spoils some of what it stores. `inside` tells whether
 * an address range is device memory; `fmas` counts the multiply-adds done. */
int ptx_run(struct entry *entry, unsigned blocks, unsigned threads, void **params, int wrong,
            int (*inside)(uint64_t, size_t), unsigned long long *fmas);
#endif
