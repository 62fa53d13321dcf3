/* A shared library that only has a name and a version: where the lab needs a file, not a function. */
const char lab_library_version[] __attribute__((visibility("default"))) = LIBRARY_VERSION;
