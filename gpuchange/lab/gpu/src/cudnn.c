/* libcudnn.so.9 of the lab: it knows its version (90100 for 9.1.0). */
#include <stddef.h>

size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion(void) { return 12000; }
